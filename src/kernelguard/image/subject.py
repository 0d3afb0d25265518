"""What does a lock say was to be verified: which model, for which run?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelguard.declare.config import read_config
from kernelguard.errors import InputError
from kernelguard.image.running import Subject
from kernelguard.lock.values import Lock

_ASSUMED = " (assumed)"
_SWITCHES = frozenset(
    {"packed", "use_kernels", "liger", "compile", "use_cache", "grouped_heads", "own_convolution", "trust_remote_code"}
)


def subject_of(lock: Lock, lock_path: Path, *, model: str = "", length: int = 4096) -> Subject:
    """The model that was locked for, found where the lock says or where `model` says.

    Raises:
        InputError: it is not there, or it is another one than the lock's.
    """
    source = model or lock.model.source
    place = Path(source)
    if not model and not place.is_absolute() and not place.exists():
        # A lock is often read from another folder than it was written in.
        place = lock_path.parent / source
    if place.exists():
        source = str(place)
    try:
        config = read_config(source)
    except InputError as error:
        raise InputError(
            f"the lock's model is not to be found: {error.message}", hint="say where it is: --model PATH"
        ) from error
    text = json.dumps(config.raw, sort_keys=True, separators=(",", ":"), default=str)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != lock.model.sha256:
        raise InputError(
            f"{config.source} is not the model of the lock: its configuration has sha256 {digest[:16]}..., the lock "
            f"was made for {lock.model.sha256[:16]}...",
            hint="lock again for this one, or name the right one with --model",
        )
    where = config.folder if Path(config.source).name == "config.json" and config.folder else Path(config.source)
    return Subject(model=where, lock=lock, intent=intent_document(lock), length=length)


def intent_document(lock: Lock) -> Mapping[str, Any]:
    """The lock's intent as an intent file says it; what was only assumed is left out, and so assumed again."""
    found: dict[str, Any] = {}
    for name, text in lock.intent:
        if text.endswith(_ASSUMED) or not text:
            continue
        if name in _SWITCHES:
            found[name] = text == "True"
        elif name == "signals":
            found[name] = text.split(",")
        else:
            found[name] = text
    return found
