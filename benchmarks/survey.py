"""How long `kernelguard survey` takes over every model type of a transformers release: wall and processor time.

    .venv/bin/python benchmarks/survey.py [--transformers 5.24.0] [--runs 3] [--json FILE]

Two processes share the work, so wall time means something only on a machine with two idle cores; processor time is the
sum over all of them. The load average before the first run is written beside the result.
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
from typing import Any

BIN = Path(sys.executable).parent


def measure(command: list[str]) -> tuple[float, float, float, dict[str, Any]]:
    """Wall seconds, processor seconds and peak MB of one run, and what it printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, processor, after.ru_maxrss / 1024, json.loads(done.stdout)


def main() -> None:
    """Measure, print a line per run, and write JSON when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transformers", default="5.24.0")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    command = [str(BIN / "kernelguard"), "survey", "--transformers", options.transformers, "--json"]
    runs = []
    for _ in range(options.runs):
        wall, processor, peak, document = measure(command)
        runs.append(
            {"wall_s": round(wall, 2), "processor_s": round(processor, 2), "largest_process_mb": round(peak, 1)}
        )
        print(f"{wall:6.2f} s wall {processor:6.2f} s processor {peak:7.1f} MB in the largest process", flush=True)
    if options.json:
        result = {
            "schema": 1,
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "load_before": round(load, 2),
            "kernelguard": version("kernelguard-preflight"),
            "transformers": document["transformers"],
            "model_types": len(document["model_types"]),
            "runs": runs,
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
