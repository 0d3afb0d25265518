"""Make a profiler trace small enough to commit.

python tools/trim_trace.py IN.json.gz OUT.json.gz

Flow arrows, Python frames and the arguments that `kernelguard profile` does not read are left out; every timed event
stays with its exact times, so that the profile of both files is the same.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

from kernelguard.trace.stream import TraceStream

KEPT = {"External id", "correlation", "stream", "device", "bytes", "Input Dims", "Input type"}
BESIDE = {"schemaVersion", "deviceProperties", "distributedInfo", "displayTimeUnit", "cuda_driver_version"}


def trimmed(event: dict[str, Any]) -> dict[str, Any] | None:
    """The event with what is read of it; None: it is not needed."""
    if event.get("ph") != "X" or event.get("cat") in {"python_function", "Trace", None}:
        return None
    kept = {key: event[key] for key in ("ph", "cat", "name", "pid", "tid", "ts", "dur") if key in event}
    arguments = event.get("args")
    if isinstance(arguments, dict):
        kept["args"] = {key: value for key, value in arguments.items() if key in KEPT}
    return kept


def main() -> None:
    """Read one trace and write the other."""
    source, target = map(Path, sys.argv[1:])
    stream = TraceStream(source)
    events = [json.dumps(small, separators=(",", ":")) for event in stream if (small := trimmed(event)) is not None]
    head = {key: value for key, value in stream.header.items() if key in BESIDE}
    text = json.dumps(head)[:-1] + (", " if head else "") + '"traceEvents": [\n' + ",\n".join(events) + "\n]}\n"
    # No time of writing in the file: the same trace makes the same bytes.
    target.write_bytes(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{source.stat().st_size:,} -> {target.stat().st_size:,} bytes, {len(events):,} events")


if __name__ == "__main__":
    main()
