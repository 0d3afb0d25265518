"""Write the attestation of this run beside what it saves, and compare it with the one beside what it continues from."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelguard.guard import attestation
from kernelguard.guard.outcome import Outcome, from_document
from kernelguard.guard.ticket import Ticket


def current(
    ticket: Ticket,
    *,
    stage: str,
    bound: Mapping[str, str] | None = None,
    kernels: Mapping[str, tuple[str, ...]] | None = None,
    fields: Mapping[str, str] | None = None,
    outcome: Outcome | None = None,
) -> dict[str, Any]:
    """The attestation of this run as far as it is known; fields and outcome are those of the preflight."""
    agreed = _agreed(ticket) if outcome is None else outcome
    return attestation.build(
        ticket,
        _fields(ticket) if fields is None else fields,
        argv=sys.argv,
        world_size=int(os.environ.get("WORLD_SIZE", "1") or 1),
        bound=bound,
        kernels=kernels,
        seconds=None if agreed is None else preflight_seconds(agreed),
        collectives=None if agreed is None else agreed.collectives,
        stage=stage,
    )


def _fields(ticket: Ticket) -> dict[str, str]:
    rank = os.environ.get("RANK", "0") or "0"
    try:
        report = json.loads((Path(ticket.run_dir) / "ranks" / f"{rank}.json").read_text("utf-8"))
        return {**report["fields"], **report["hardware"]}
    except (OSError, ValueError, KeyError, TypeError):
        # A disk that cannot be written: what was admitted is known all the same.
        return {}


def _agreed(ticket: Ticket) -> Outcome | None:
    try:
        return from_document(json.loads((Path(ticket.run_dir) / "outcome.json").read_text("utf-8")))
    except (OSError, ValueError):
        return None


def preflight_seconds(outcome: Outcome) -> dict[str, float]:
    """What the preflight took, in all and by step, in the slowest rank."""
    return {"total": outcome.seconds, **outcome.timings}


def is_first() -> bool:
    """Whether this rank is the one that writes."""
    return (os.environ.get("RANK", "0") or "0") == "0"


def say_what_changed(folder: str | os.PathLike[str], ticket: Ticket | None) -> tuple[attestation.Change, ...]:
    """Compare with the run that wrote the checkpoint in `folder`, and say what is not as it was."""
    if ticket is None:
        return ()
    try:
        changes = attestation.on_resume(folder, current(ticket, stage="preflight"))
    except attestation.AttestationError as error:
        print(f"kernelguard: {error}; what has changed since cannot be told", file=sys.stderr, flush=True)
        return ()
    if is_first():
        attestation.report(changes)
    return changes


def save(folder: str | os.PathLike[str], ticket: Ticket | None) -> None:
    """Put the attestation of this run into the folder of a checkpoint, from rank 0 only."""
    if ticket is None or not is_first():
        return
    try:
        document = attestation.load(Path(ticket.run_dir) / attestation.NAME)
    except attestation.AttestationError:
        document = current(ticket, stage="preflight")
    problem = attestation.write(document, folder)
    if problem:
        print(f"kernelguard: {problem}", file=sys.stderr, flush=True)
