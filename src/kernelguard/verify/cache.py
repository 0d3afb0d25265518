"""What does `--warm-cache DIR` leave in DIR, how does a training find it, and is it already there?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from kernelguard.errors import InputError
from kernelguard.sources.http import write_whole
from kernelguard.verify.values import Fingerprint

NOTE = "kernelguard.json"
"""Beside the caches: what they were filled for, and how a training process finds them."""
COMPILED = "torch-compile-*.bin"
"""What torch.compile made for the bundled trainer (kernelguard_train/compiled.py)."""
_MATTERS = ("gpu", "capability", "torch", "triton", "ptxas", "distributions", "records", "shapes")


def cache_variables(folder: Path) -> dict[str, str]:
    """What a training process has to set to find what `--warm-cache` left: compiled kernels and tuned choices."""
    return {
        "TRITON_CACHE_DIR": str(folder.absolute()),
        "TRITON_CACHE_AUTOTUNING": "1",  # Triton's own switch
        "FLA_CACHE_RESULTS": "1",  # fla's, for the kernels that it tunes itself
        "TILELANG_CACHE_DIR": str(folder.absolute() / "tilelang"),  # flash-qla, and fla's own tilelang kernels
    }


def make_folder(folder: Path) -> None:
    """Make the cache folder.

    Raises:
        InputError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the cache folder {folder}: {error.strerror}", hint="--warm-cache /path/to/folder"
        ) from error


def is_filled(folder: Path, fingerprint: Fingerprint, *, first_step: str = "") -> bool:
    """Whether it was filled for exactly these versions, this GPU and these shapes, and this trainer's first step.

    A wrong answer costs time and nothing else: what is missing is compiled, and what is there is used.
    """
    try:
        note = json.loads((folder / NOTE).read_text("utf-8"))
        filled, stepped = note["filled_for"] == _digest(fingerprint), note.get("first_step") == first_step
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    # Copies may have left out what torch.compile made.
    return bool(filled) and (not first_step or (stepped and any(folder.glob(COMPILED))))


def note_filled(folder: Path, fingerprint: Fingerprint, *, first_step: str = "") -> None:
    """Leave a note that everything of this fingerprint was compiled and tuned into the folder.

    `first_step` is the digest of the run whose first step was compiled too (`FirstStep.digest`).

    Raises:
        OSError: it cannot be written.
    """
    note = {
        "filled_for": _digest(fingerprint),
        "first_step": first_step,
        "set": cache_variables(folder),
        "triton": fingerprint.triton,
        "gpu": fingerprint.gpu,
    }
    write_whole(folder / NOTE, (json.dumps(note, indent=1) + "\n").encode())


def _digest(fingerprint: Fingerprint) -> str:
    facts = {name: value for name, value in asdict(fingerprint).items() if name in _MATTERS}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
