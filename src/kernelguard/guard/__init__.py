"""Inside a rank: may it start, and is it still fast?

This room runs in the training interpreter: standard library, and torch once the training script has imported it.

    python -m kernelguard.guard -- train.py ARGS       any script, unchanged

    import kernelguard.guard as guard                  or two lines in it
    guard.before_training()
    guard.watch(model, optimizer)

    Trainer(..., callbacks=[guard.TrainerGuard()])     or in a Trainer
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["Refused", "TrainerGuard", "attest_checkpoint", "before_training", "watch"]


def before_training(resume_from: str = "") -> None:
    """The preflight of this rank's group; ends the process with the group's code unless it may start.

    Call it before anything is loaded. Under `python -m kernelguard.guard` it has been done, and is not done again.
    With `resume_from`, the folder of a checkpoint, what has changed since it was written is said on stderr.
    """
    from kernelguard.guard.preflight import DONE, preflight

    if os.environ.get(DONE) != str(os.getpid()):
        outcome = preflight()
        if outcome.code:
            raise SystemExit(outcome.code)
        os.environ[DONE] = str(os.getpid())
    if resume_from:
        from kernelguard.guard.attest import say_what_changed

        say_what_changed(resume_from, _ticket())


def attest_checkpoint(folder: str) -> None:
    """Put the run's attestation beside a checkpoint; without a launcher's ticket there is none. Rank 0 writes."""
    from kernelguard.guard.attest import save

    save(folder, _ticket())


def _ticket() -> Any:
    from kernelguard.guard.ticket import VARIABLE, load_ticket

    path = os.environ.get(VARIABLE, "")
    return load_ticket(path) if path else None


def watch(model: Any = None, optimizer: Any = None, *, on_refusal: str = "exit") -> Any:
    """Look at this model (or the first that trains in this process) in its first step; returns the `Watch`.

    What is wrong ends the process with 78, or 3 when it cannot be told; `on_refusal="raise"` raises `Refused` instead.
    """
    from kernelguard.guard.watch import Watch, current_ticket

    guard = Watch(current_ticket(), on_refusal=on_refusal)
    if model is None:
        guard.wait_for_any_model()
    else:
        guard.wait_for(model, optimizer)
    return guard


def __getattr__(name: str) -> Any:
    """`Refused` and `TrainerGuard` bring torch and transformers, so they are imported when they are asked for."""
    if name == "TrainerGuard":
        from kernelguard.guard.trainer import TrainerGuard

        return TrainerGuard
    if name == "Refused":
        from kernelguard.guard.watch import Refused

        return Refused
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
