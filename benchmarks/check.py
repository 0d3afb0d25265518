"""How long a static check takes, beside what a person would run instead; all in one run.

    .venv/bin/python benchmarks/check.py [--runs 7] [--json FILE]

`transformers env` and `import torch, transformers` run in the same environment. Wall time is the best of the runs
(the disk cache is warm), memory the peak resident set of the process and its children as the kernel counts it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent


def cases() -> dict[str, list[str]]:
    """The commands, by name."""
    model = str(ROOT / "examples" / "qwen3.8-27b")
    return {
        "kernelguard check --level resolve --target h100": [
            str(BIN / "kernelguard"),
            "check",
            model,
            "--level",
            "resolve",
            "--target",
            "h100",
        ],
        "kernelguard --version": [str(BIN / "kernelguard"), "--version"],
        "python -c pass": [sys.executable, "-c", "pass"],
        "python -c 'import torch, transformers'": [sys.executable, "-c", "import torch, transformers"],
        "transformers env": [str(BIN / "transformers"), "env"],
    }


def measure(command: list[str]) -> tuple[float, float]:
    """Seconds of wall time and peak MB of one run, in a process that has no other children."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        started = time.perf_counter()
        environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
        subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, check=False)
        seconds = time.perf_counter() - started
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        os.write(writer, json.dumps([seconds, peak]).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        seconds, peak = json.loads(stream.read())
    os.waitpid(child, 0)
    return seconds, peak


def main() -> None:
    """Measure, print a table, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, command in cases().items():
        runs = [measure(command) for _ in range(options.runs)]
        best = min(seconds for seconds, _ in runs)
        median = sorted(seconds for seconds, _ in runs)[len(runs) // 2]
        peak = max(megabytes for _, megabytes in runs)
        rows.append(
            {"command": name, "best_s": round(best, 3), "median_s": round(median, 3), "peak_mb": round(peak, 1)}
        )
        print(f"{best:7.3f} s best {median:7.3f} s median {peak:7.1f} MB   {name}", flush=True)
    if options.json:
        names = ("kernelguard-preflight", "transformers", "torch")
        result = {
            "schema": 1,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "versions": {n: version(n) for n in names},
            "runs": options.runs,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
