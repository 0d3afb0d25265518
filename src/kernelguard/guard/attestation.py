"""What ran on what, and why was it admitted? Written beside the checkpoints, compared when training goes on from them.

Runs in the training interpreter: standard library, Python 3.9 or newer. Nothing of the environment is written but the
variables on the ticket's list, and nothing that looks like a token or a password.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from kernelguard.guard.outcome import write_json
from kernelguard.guard.shown import masked, shown_arguments, shown_variables
from kernelguard.guard.ticket import Ticket

NAME = "kernelguard-attestation.json"
SCHEMA = 1

# How a field's change is judged: a kernel, torch or GPU kind that changed can change every number from here on.
_GRAVE = ("version of ", "RECORD of ", "binary ", "files of ")
_GRAVE_NAMES = frozenset(
    {"torch", "CUDA of torch", "GPU", "capability", "version of triton", "image", "lock", "model", "intent"}
)


class AttestationError(ValueError):
    """The file is no attestation; the message says why."""


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was when the checkpoint was written."""

    field: str
    before: str
    now: str
    grave: bool
    """It can change what is computed: a kernel, torch, the GPU kind. Otherwise it is only said."""

    def __str__(self) -> str:
        return (
            f"{self.field}: {self.before or '(nothing)'} when the checkpoint was written, {self.now or '(nothing)'} now"
        )


def build(
    ticket: Ticket,
    fields: Mapping[str, str],
    *,
    argv: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    world_size: int = 1,
    bound: Mapping[str, str] | None = None,
    kernels: Mapping[str, Sequence[str]] | None = None,
    seconds: Mapping[str, float] | None = None,
    collectives: Mapping[str, Any] | None = None,
    stage: str = "preflight",
) -> dict[str, Any]:
    """The attestation of a run.

    Args:
        ticket: What was admitted.
        fields: What the ranks agreed on, by name: versions, digests, GPU, driver, and what is bound.
        argv: The training script and its arguments; what names a secret is masked.
        environ: Variables; only those on the ticket's list are written. None: this process's.
        world_size: Number of ranks.
        bound: What the live model is really bound to, by fast path, once it was built.
        kernels: GPU kernels that step 1 ran, by fast path, once it was done.
        seconds: What the preflight took, `total` and by step, in the slowest rank.
        collectives: What the ranks' collectives did in the preflight.
        stage: How much of this has been seen: `preflight`, `model` or `step 1`.
    """
    shown = shown_variables(os.environ if environ is None else environ)
    return {
        "schema": SCHEMA,
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "stage": stage,
        "lock": {"path": ticket.lock.path, "digest": ticket.lock.digest},
        "verdict": {"path": ticket.verdict.path, "digest": ticket.verdict.digest, "level": ticket.verdict.level},
        "admission": {
            "admitted": ticket.admission.admitted,
            "reasons": [masked(reason) for reason in ticket.admission.reasons],
            "overrides": list(ticket.admission.overrides),
        },
        "level": ticket.level,
        "image": ticket.image,
        "model": {"config": ticket.model.config, "sha256": ticket.model.sha256, "dtype": ticket.model.dtype},
        "intent": dict(ticket.intent),
        "world_size": world_size,
        "fields": {name: masked(value) for name, value in sorted(fields.items())},
        "bound": {name: masked(value) for name, value in sorted((bound or {}).items())},
        "kernels": {name: sorted(found) for name, found in sorted((kernels or {}).items())},
        "preflight_seconds": dict(seconds or {}),
        "collectives": dict(collectives or {}),
        "script": list(shown_arguments(tuple(argv))),
        "variables": shown,
    }


def write(document: Mapping[str, Any], folder: str | os.PathLike[str]) -> str:
    """Write it into a folder, all of it or nothing; returns why it could not be done, or an empty text."""
    return write_json(Path(folder) / NAME, document)


def find(folder: str | os.PathLike[str]) -> Path | None:
    """The attestation of a checkpoint: in its own folder or in the one above, where the run keeps its checkpoints."""
    start = Path(folder)
    return next((p for p in (start / NAME, start.parent / NAME) if p.is_file()), None)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read one.

    Raises:
        AttestationError: it cannot be read, or is something else.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise AttestationError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise AttestationError(f"{path} is no attestation: {error}") from error
    if not isinstance(document, dict) or not isinstance(document.get("schema"), int):
        raise AttestationError(f"{path} is no attestation")
    if document["schema"] > SCHEMA:
        raise AttestationError(f"{path} has schema {document['schema']}; this kernelguard reads up to {SCHEMA}")
    if not all(isinstance(document.get(key, {}), dict) for key in ("fields", "bound", "lock", "model", "intent")):
        raise AttestationError(f"{path} is no attestation: one of its tables is none")
    return document


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[Change, ...]:
    """What has changed since, the grave changes first. A field that one of the two does not know is not a change."""
    old, new = _flat(before), _flat(now)
    changes = [
        Change(name, old[name], new[name], _is_grave(name))
        for name in sorted(set(old) & set(new))
        if old[name] != new[name]
    ]
    return tuple(sorted(changes, key=lambda change: not change.grave))


def _is_grave(name: str) -> bool:
    return name in _GRAVE_NAMES or name.startswith(_GRAVE) or " in modeling_" in name or name.startswith("bound ")


def _flat(document: Mapping[str, Any]) -> dict[str, str]:
    found = {name: str(value) for name, value in document.get("fields", {}).items()}
    found.update({f"bound {name}": str(value) for name, value in document.get("bound", {}).items()})
    found["lock"] = str(document.get("lock", {}).get("digest", ""))
    found["model"] = str(document.get("model", {}).get("sha256", ""))
    found["intent"] = json.dumps(document.get("intent", {}), sort_keys=True)
    found["image"] = str(document.get("image", ""))
    found["world_size"] = str(document.get("world_size", ""))
    return found


def on_resume(folder: str | os.PathLike[str], now: Mapping[str, Any]) -> tuple[Change, ...]:
    """Compare this run with the one that wrote the checkpoint in `folder`; nothing to compare with is no change.

    Raises:
        AttestationError: there is one that cannot be read.
    """
    path = find(folder)
    return () if path is None else compare(load(path), now)


def report(changes: Iterable[Change]) -> None:
    """Say what has changed, on stderr, before the first step."""
    for change in changes:
        mark = "CHANGED" if change.grave else "note"
        print(f"kernelguard: {mark}: {change}", file=sys.stderr, flush=True)
