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

__all__ = ["Refused", "TrainerGuard", "before_training", "watch"]


def before_training() -> None:
    """The preflight of this rank's group; ends the process with the group's code unless it may start.

    Call it before anything is loaded. Under `python -m kernelguard.guard` it has been done, and this returns at once.
    """
    from kernelguard.guard.preflight import DONE, preflight

    if os.environ.get(DONE) == str(os.getpid()):
        return
    outcome = preflight()
    if outcome.code:
        raise SystemExit(outcome.code)
    os.environ[DONE] = str(os.getpid())


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
