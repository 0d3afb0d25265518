"""What do the ranks agree on, and how does it reach whoever started them? One JSON file, or one line on stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelguard.guard.shown import masked
from kernelguard.guard.ticket import (
    CODE_CONFIGURATION,
    CODE_NODE,
    CODE_UNKNOWN,
    CODES,
    OUTCOME_LINE,
)

SCHEMA = 1
_WORDS = {
    0: "may start",
    CODE_CONFIGURATION: "this configuration is wrong; starting it again changes nothing",
    CODE_NODE: "a node is at fault; start again without it",
    CODE_UNKNOWN: "it could not be told",
}


@dataclass(frozen=True)
class Differing:
    """One field in which ranks differ from each other or from what was verified."""

    field: str
    values: Mapping[str, tuple[int, ...]]
    """Value -> the ranks that have it."""
    expected: str = ""
    """What the verdict was measured with; empty: it says nothing about this field."""


@dataclass(frozen=True)
class RankState:
    """What became of one rank."""

    rank: int
    host: str
    state: str
    """`ok`, `differs`, `fault`, `unknown`, `silent` (it came and never reported), `missing` (it never came)."""
    detail: str = ""


@dataclass(frozen=True)
class Outcome:
    """The one verdict of all ranks."""

    code: int
    summary: str
    nodes_at_fault: tuple[str, ...] = ()
    differing: tuple[Differing, ...] = ()
    ranks: tuple[RankState, ...] = ()
    seconds: float = 0.0
    phase: str = "preflight"
    """`preflight` or `training`."""
    causes: tuple[str, ...] = ()
    """Why, one sentence each, the rank named."""
    noted: tuple[str, ...] = ()
    """What to know, one sentence each; none of it refuses."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each step, of the slowest rank."""
    collectives: Mapping[str, Any] = field(default_factory=dict)
    """World size, backend, and what a large all-reduce took (`guard/collective_verdict.py`); empty: not measured."""


def to_document(outcome: Outcome) -> dict[str, Any]:
    """As JSON values."""
    return {"schema": SCHEMA, **_plain(asdict(outcome))}


def from_document(document: Mapping[str, Any]) -> Outcome:
    """The outcome that JSON values describe.

    Raises:
        ValueError: they describe none.
    """
    try:
        code = document["code"]
        if document["schema"] != SCHEMA or code not in CODES:
            raise ValueError(f"schema {document['schema']!r} with code {code!r} is no outcome")
        return Outcome(
            code=code,
            summary=str(document["summary"]),
            nodes_at_fault=tuple(document["nodes_at_fault"]),
            differing=tuple(
                Differing(
                    field=row["field"],
                    values={value: tuple(ranks) for value, ranks in row["values"].items()},
                    expected=row.get("expected", ""),
                )
                for row in document["differing"]
            ),
            ranks=tuple(
                RankState(rank=row["rank"], host=row["host"], state=row["state"], detail=row["detail"])
                for row in document["ranks"]
            ),
            seconds=float(document["seconds"]),
            phase=str(document.get("phase", "preflight")),
            causes=tuple(document.get("causes", ())),
            noted=tuple(document.get("noted", ())),
            timings=dict(document.get("timings", {})),
            collectives=dict(document.get("collectives", {})),
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"this is no outcome: {type(error).__name__}: {error}") from error


def describe(outcome: Outcome) -> str:
    """For a person: the verdict, why, and a table of only what differs."""
    lines = [f"kernelguard: exit code {outcome.code}: {_WORDS[outcome.code]}" if outcome.code else "kernelguard: go"]
    lines.append(f"  {outcome.summary}")
    lines += [f"  - {cause}" for cause in outcome.causes]
    if outcome.differing:
        lines.append("  what differs:")
        for row in outcome.differing:
            lines.append(f"    {row.field}" + (f"  (verified with: {row.expected})" if row.expected else ""))
            lines += [f"      {_ranks(ranks)}: {value}" for value, ranks in row.values.items()]
    if outcome.nodes_at_fault:
        lines.append(f"  at fault: {', '.join(outcome.nodes_at_fault)}")
    lines += [f"  note: {note}" for note in outcome.noted]
    if outcome.timings:
        steps = ", ".join(f"{name} {seconds:.1f}" for name, seconds in outcome.timings.items())
        if outcome.collectives:
            steps += f"; all-reduce at {outcome.collectives['bus_gb_per_s']['slowest']:.3g} GB/s"
        lines.append(f"  after {outcome.seconds:.1f} s (of the slowest rank: {steps})")
    return "\n".join(lines)


def _ranks(ranks: tuple[int, ...]) -> str:
    """`ranks 0-6, 8`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def ranks_text(ranks: tuple[int, ...]) -> str:
    """`rank 1` or `ranks 0-6, 8`."""
    return _ranks(ranks)


def publish(outcome: Outcome, run_dir: str, *, speak: bool) -> None:
    """Write RUN/outcome.json; where that cannot be done, or `speak`, say it in one line on stderr as well.

    With an empty `run_dir` (no launcher waits for it) nothing is written.
    """
    document = to_document(outcome)
    problem = write_json(Path(run_dir) / "outcome.json", document) if run_dir else ""
    if problem:
        print(f"kernelguard: {problem}", file=sys.stderr)
    if problem or speak:
        print(OUTCOME_LINE + masked(json.dumps(document)), file=sys.stderr, flush=True)


def write_json(path: Path, document: Mapping[str, Any]) -> str:
    """Write a file, all of it or nothing; returns why it could not be done, or an empty text."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(masked(json.dumps(document, indent=1, sort_keys=True)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        return f"{path} cannot be written: {error.strerror or error}"
    return ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
