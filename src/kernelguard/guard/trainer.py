"""The guard as a callback of transformers' Trainer and of everything that derives from it, TRL's trainers among it."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from kernelguard.guard import attest
from kernelguard.guard.watch import Watch, current_ticket


class TrainerGuard(TrainerCallback):  # type: ignore[misc]
    """Looks at the model when training begins and after its first step: `Trainer(..., callbacks=[TrainerGuard()])`.

    What is wrong ends the process with 78, or 3 when it cannot be told; `on_refusal="raise"` raises `Refused` instead.
    """

    def __init__(self, *, on_refusal: str = "exit") -> None:
        self.watch = Watch(current_ticket(), on_refusal=on_refusal)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is there; its first forward is waited for."""
        del state, control
        checkpoint = getattr(args, "resume_from_checkpoint", None)
        if checkpoint and os.path.isdir(str(checkpoint)):  # noqa: PTH112  # `True` is allowed there
            attest.say_what_changed(checkpoint, self.watch.ticket)
        if self.watch.state == "waiting":
            self.watch.wait_for(kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The attestation lies beside the weights."""
        del control, kwargs
        attest.save(os.path.join(args.output_dir, f"checkpoint-{state.global_step}"), self.watch.ticket)  # noqa: PTH118
        attest.save(args.output_dir, self.watch.ticket)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the first step nothing of the guard is left."""
        del args, state, control, kwargs
        if self.watch.state == "first-step":
            self.watch.end_of_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A training without a single step leaves its hooks here."""
        del args, state, control, kwargs
        if self.watch.state != "done":
            self.watch.close()
