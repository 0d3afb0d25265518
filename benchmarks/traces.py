"""How fast is a large trace read, and in how much memory? A real trace repeated to the sizes asked for.

python benchmarks/traces.py [--megabytes 100 500 2000] [--json benchmarks/results/traces.json]
Beside kernelguard, up to a size: `json.load` of the same file alone, and with `--hta PYTHON` the two breakdowns of
HolisticTraceAnalysis in that interpreter.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SEED = ROOT / "benchmarks/results/verify-h200-trace.json.gz"
READERS = {
    "kernelguard profile": "from pathlib import Path; from kernelguard.trace.profile import profile; "
    "p = profile(Path(sys.argv[1])); n = p.events",
    "json.load": "import json; n = len(json.load(open(sys.argv[1]))['traceEvents'])",
}
HTA = (
    "import contextlib, io; from hta.trace_analysis import TraceAnalysis; "
    "o = contextlib.redirect_stdout(io.StringIO()); o.__enter__(); a = TraceAnalysis(trace_files={0: sys.argv[1]}); "
    "a.get_temporal_breakdown(visualize=False); a.get_idle_time_breakdown(visualize=False); "
    "o.__exit__(None, None, None); n = len(a.t.get_trace(0))"
)
MEASURE = (
    "import sys, time, resource, json; t = time.perf_counter(); {body}; "
    "u = resource.getrusage(resource.RUSAGE_SELF); "
    "print(json.dumps(dict(events=n, seconds=round(time.perf_counter() - t, 2), "
    "cpu_seconds=round(u.ru_utime + u.ru_stime, 2), peak_mib=round(u.ru_maxrss / 1024))))"
)


def enlarge(path: Path, megabytes: int) -> int:
    """Write the seed's events again and again, each time later; returns the bytes."""
    document = json.loads(gzip.decompress(SEED.read_bytes()))
    span, apart = 60_000.0, 1_000_000
    forms = []
    for event in document["traceEvents"]:
        moved, numbers = dict(event), []
        if event.get("ph") == "X":
            # A form to fill in is written many times faster than JSON.
            moved["ts"] = "@0"
            numbers.append((event["ts"], span))
            arguments = dict(event.get("args") or {})
            for key in ("External id", "correlation"):
                if isinstance(arguments.get(key), int):
                    numbers.append((arguments[key], apart))
                    arguments[key] = f"@{len(numbers) - 1}"
            moved["args"] = arguments
        text = json.dumps(moved).replace("%", "%%")
        for place, (first, _) in enumerate(numbers):
            text = text.replace(f'"@{place}"', "%.3f" if isinstance(first, float) else "%d")
        forms.append((text, numbers))
    with path.open("w", encoding="utf-8") as out:
        head = {k: v for k, v in document.items() if k != "traceEvents"}
        head["distributedInfo"] = {"rank": 0, "world_size": 1}  # HolisticTraceAnalysis asks for it
        out.write(json.dumps(head, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        turn = 0
        while turn == 0 or out.tell() < megabytes * 1_000_000:
            lines = [form % tuple(first + turn * step for first, step in numbers) for form, numbers in forms]
            out.write(",\n".join(lines) + ",\n")
            turn += 1
        out.write("{}\n  ]\n}\n")
        return out.tell()


def measure(python: str, body: str, path: Path) -> dict[str, object]:
    """Seconds and peak memory of one reader, in a process of its own."""
    command = [python, "-c", MEASURE.format(body=body), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr.strip().splitlines()[-1][:200] if done.stderr.strip() else str(done.returncode)}
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def version_of_hta(python: str | None) -> str | None:
    """Of the distribution in that interpreter; None: it was not asked for."""
    if python is None:
        return None
    code = "import importlib.metadata; print(importlib.metadata.version('HolisticTraceAnalysis'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--hta", help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--largest-json", type=int, default=100, help="the others only up to this size, in MB")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in options.megabytes:
            path = Path(folder) / "trace.json"
            size = enlarge(path, megabytes)
            readers = {name: (sys.executable, body) for name, body in READERS.items()}
            if megabytes > options.largest_json:
                del readers["json.load"]
            if options.hta and megabytes <= options.largest_json:
                readers["HolisticTraceAnalysis"] = (options.hta, HTA)
            for name, (python, body) in readers.items():
                row = {"reader": name, "megabytes": round(size / 1e6), **measure(python, body, path)}
                print(row)
                results.append(row)
    if options.json:
        document = {
            "schema": 1,
            "kind": "profile-reading",
            "what": "one recorded step of an H200 repeated to the size; wall seconds are of a two-core machine that "
            "ran much else, so CPU seconds tell more",
            "command": "python benchmarks/traces.py --hta PYTHON --json benchmarks/results/traces.json",
            "versions": {"python": sys.version.split()[0], "HolisticTraceAnalysis": version_of_hta(options.hta)},
            "rows": results,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10} MiB here")
