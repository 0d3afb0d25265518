"""How is a thing called on every page? Units of a run, sets of signals, what a fast path ran on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def on_cpu(summary: Mapping[str, Any] | None) -> bool:
    """The run's summary says that there was no GPU."""
    return summary is not None and "gpu" in summary and not summary["gpu"]


def per(*summaries: Mapping[str, Any] | None) -> str:
    """What a rate is of: `GPU`, or `rank` where a run had none, or did not say."""
    return "GPU" if summaries and all(summary and summary.get("gpu") for summary in summaries) else "rank"


def versions_of_run(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a run's summary says of where it ran."""
    rows = [("torch", str(summary["torch"]))] if summary.get("torch") else []
    if "gpu" in summary:
        rows.append(("gpu", str(summary["gpu"] or "none: it ran on the CPU")))
    if summary.get("gpus"):
        rows.append(("ranks" if on_cpu(summary) else "gpus", str(summary["gpus"])))
    return rows


def sent(row: Mapping[str, Any]) -> str:
    """Which boundary signals one row of a verdict's isolation is about."""
    left_out = str(row.get("left_out") or "")
    signals = ", ".join(row["signals"]) or "none"
    if not left_out:
        return f"as the run sends them: {signals}"
    if left_out == "nothing":
        return f"with all that exist: {signals}"
    if left_out.startswith("all but "):
        return f"with {left_out.removeprefix('all but ')} alone"
    return f"without {left_out}"


def ran_on(row: Mapping[str, Any]) -> str:
    """What one row of a trace's implementations ran on."""
    fallbacks = ", ".join(row["fallbacks"])
    if not row["package"]:
        return f"the slow path: {fallbacks}"
    return f"{row['package']}; and the slow path: {fallbacks}" if fallbacks else str(row["package"])
