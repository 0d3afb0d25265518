"""What a guarded launch (`kernelguard launch`) wants of a trainer: verified kernels, its attestation at checkpoints.

Without such a launch nothing here does anything, and kernelguard need not be installed.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

TICKET = "KERNELGUARD_TICKET"
"""Set by the launcher, together with a copy of its guard on the path."""


def admits(symbol: str) -> bool:
    """Whether a kernel of the trainer's own may run: always, but under a guarded launch only one that was verified."""
    place = os.environ.get(TICKET)
    if not place:
        return True
    probes = json.loads(Path(place).read_text(encoding="utf-8")).get("probes", [])
    return any(probe.get("package") == "kernelguard_train" and probe.get("symbol") == symbol for probe in probes)


def attest(folder: Path) -> None:
    """Leave in a checkpoint's folder what ran on what, and admitted why."""
    if os.environ.get(TICKET):
        from kernelguard.guard import attest_checkpoint  # noqa: PLC0415 - only a guarded launch brings it

        attest_checkpoint(str(folder))


def say_what_changed(folder: Path) -> None:
    """Say which kernel, torch or GPU is another one than when this checkpoint was written."""
    if os.environ.get(TICKET):
        from kernelguard.guard import before_training  # noqa: PLC0415 - only a guarded launch brings it

        before_training(resume_from=str(folder))
