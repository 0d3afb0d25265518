"""What is in a profiler trace? Chrome trace events as torch.profiler writes them, plain or compressed."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.trace.values import KernelRun, TraceFacts

_HINT = "write one with torch.profiler's export_chrome_trace, or with: kernelguard verify MODEL --trace"
_LARGEST_BYTES = 4 * 2**30


def read_trace(path: Path) -> TraceFacts:
    """Read a trace file, `.json` or `.json.gz`.

    Raises:
        InputError: the file is missing, damaged or no trace.
    """
    try:
        with path.open("rb") as handle:
            packed = handle.read(2) == b"\x1f\x8b"
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{path} is larger than {_LARGEST_BYTES >> 30} GiB", hint="record fewer steps")
        if packed:
            with gzip.open(path, "rt", encoding="utf-8") as stream:
                document = json.load(stream)
        else:
            document = json.loads(path.read_text("utf-8"))
    except (gzip.BadGzipFile, EOFError) as error:
        raise InputError(f"{path} is a damaged gzip file: {error}", hint=_HINT) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", hint=_HINT) from error
    return parse_trace(document, source=str(path))


def parse_trace(document: Any, *, source: str) -> TraceFacts:
    """The facts in a trace document; `source` names it in messages.

    Raises:
        InputError: it is no trace.
    """
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        raise InputError(f"{source} has no list of trace events", hint=_HINT)
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
