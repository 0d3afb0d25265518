"""What did our trainer write down about a run? `steps.jsonl`, `summary.json` and what lies beside them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError

WARMUP_STEPS = 2
"""Steps that compile and tune; the trainer's own summary leaves them out too."""
_LONGEST_LINE = 1 << 20
_WANTED = frozenset(
    {"step", "loss", "step_s", "data_wait_s", "density", "tokens_per_s", "trained_tokens_per_s",
     "computed_tokens_per_s", "mfu", "gpu_utilization", "peak_gib"}
)  # fmt: skip
"""Only these are kept: a run may have a million steps."""
_HINT = "name the folder that kernelguard_train wrote (train.output), with its steps.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One training run by its own numbers; rates are per GPU."""

    folder: str
    steps: int
    """That count; the warm-up is left out where there is more."""
    step_s: float
    """Median seconds."""
    step_p95_s: float
    data_wait_s: float
    """Mean seconds in which a step waited for its batch."""
    density: float | None
    """Valid tokens / computed tokens; the rest is padding."""
    tokens_per_s: float | None
    """Valid tokens."""
    trained_tokens_per_s: float | None
    """Valid tokens that have a label."""
    computed_tokens_per_s: float | None
    mfu: float | None
    gpu_utilization: float | None
    """Mean of what NVML said, percent."""
    peak_gib: float | None
    losses: tuple[tuple[int, float], ...]
    """(step, loss), at most some hundred of them."""
    walls: tuple[tuple[int, float], ...]
    """(step, seconds), likewise."""
    summary: Mapping[str, Any]
    unreadable: int
    """Lines that are no JSON: a run that was killed leaves half a line."""


def is_run(path: Path) -> bool:
    """Whether this is a folder of the bundled trainer."""
    return (path / "steps.jsonl").is_file()


def read_run(folder: Path) -> RunFacts:
    """Read a training run's folder.

    Raises:
        InputError: it holds no step that can be read.
    """
    rows, unreadable = [], 0
    try:
        for row in _lines(folder / "steps.jsonl"):
            if row is None:
                unreadable += 1
            else:
                rows.append(row)
    except OSError as error:
        raise InputError(f"{folder}/steps.jsonl cannot be read: {error.strerror}", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{folder}/steps.jsonl is not text", hint=_HINT) from error
    if not rows:
        raise InputError(f"{folder}/steps.jsonl has no finished step", hint=_HINT)
    steady = rows[WARMUP_STEPS:] or rows
    walls = sorted(row["step_s"] for row in steady)
    return RunFacts(
        folder=str(folder),
        steps=len(steady),
        step_s=statistics.median(walls),
        step_p95_s=walls[min(len(walls) - 1, round(0.95 * len(walls)))],
        data_wait_s=_mean(steady, "data_wait_s") or 0.0,
        density=_mean(steady, "density"),
        tokens_per_s=_mean(steady, "tokens_per_s"),
        trained_tokens_per_s=_mean(steady, "trained_tokens_per_s"),
        computed_tokens_per_s=_mean(steady, "computed_tokens_per_s"),
        mfu=_mean(steady, "mfu"),
        gpu_utilization=_mean(steady, "gpu_utilization"),
        peak_gib=max((row["peak_gib"] for row in rows if "peak_gib" in row), default=None),
        losses=_thin([(row["step"], row["loss"]) for row in rows if "loss" in row]),
        walls=_thin([(row["step"], row["step_s"]) for row in rows]),
        summary=_summary(folder / "summary.json"),
        unreadable=unreadable,
    )


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Each line's numbers; None for a line that is none of ours."""
    with path.open(encoding="utf-8") as handle:
        while line := handle.readline(_LONGEST_LINE):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError:
                yield None
                continue
            numbers = (
                {k: row[k] for k in _WANTED & row.keys() if isinstance(row[k], (int, float)) and row[k] is not True}
                if isinstance(row, dict)
                else {}
            )
            yield numbers if "step" in numbers and numbers.get("step_s", 0) > 0 else None


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [float(row[name]) for row in rows if name in row]
    return statistics.fmean(values) if values else None


def _thin(points: list[tuple[int, float]], most: int = 400) -> tuple[tuple[int, float], ...]:
    stride = max(1, -(-len(points) // most))
    return tuple(points[::stride])


def _summary(path: Path) -> Mapping[str, Any]:
    """The trainer's own summary; empty when the run has not come to its end."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}", hint="remove it: the steps tell the same") from error
    return content if isinstance(content, dict) else {}
