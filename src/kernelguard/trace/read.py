"""What is in a profiler trace? Chrome trace events as torch.profiler writes them, plain or compressed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.trace.stream import HINT, TraceStream
from kernelguard.trace.values import KernelRun, TraceFacts


def read_trace(path: Path) -> TraceFacts:
    """Read a trace file of any size, `.json` or `.json.gz`.

    Raises:
        InputError: the file is missing, damaged, cut off or no trace.
    """
    return _facts(TraceStream(path), source=str(path))


def parse_trace(document: Any, *, source: str) -> TraceFacts:
    """The facts in a trace document; `source` names it in messages.

    Raises:
        InputError: it is no trace.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(f"{source} has no list of trace events", hint=HINT)
    return _facts(events, source=source)


def _facts(events: Iterable[Any], *, source: str) -> TraceFacts:
    counts: Counter[str] = Counter()
    spent: dict[str, float] = {}
    ops: Counter[str] = Counter()
    first, last = float("inf"), float("-inf")
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        name, kind = str(event.get("name", "")), event.get("cat")
        if kind == "kernel":
            start, duration = _number(event.get("ts")), _number(event.get("dur"))
            counts[name] += 1
            spent[name] = spent.get(name, 0.0) + duration
            first, last = min(first, start), max(last, start + duration)
        elif kind == "cpu_op":
            ops[name] += 1
    runs = [KernelRun(name=n, count=c, microseconds=spent[n]) for n, c in counts.items()]
    runs.sort(key=lambda run: (-run.microseconds, run.name))
    return TraceFacts(
        source=source,
        kernels=tuple(runs),
        ops=dict(ops.most_common()),
        gpu_microseconds=sum(run.microseconds for run in runs),
        span_microseconds=last - first if runs else 0.0,
        launches=sum(counts.values()),
    )


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else 0.0
