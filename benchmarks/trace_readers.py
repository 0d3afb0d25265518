"""What do two readers say of the same trace? kernelguard beside HolisticTraceAnalysis, on one recorded step of an H200.

python benchmarks/trace_readers.py --hta PYTHON [--json benchmarks/results/trace-readers.json]
PYTHON is an interpreter that has HolisticTraceAnalysis (python -m pip install HolisticTraceAnalysis==0.5.0).
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from traces import SEED, version_of_hta

from kernelguard.trace.profile import profile

HTA = """
import contextlib, io, json, sys
from hta.trace_analysis import TraceAnalysis
with contextlib.redirect_stdout(io.StringIO()):
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]})
    times = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    idle = analysis.get_idle_time_breakdown(visualize=False)[0].set_index("idle_category")["idle_time"]
    kinds = analysis.get_gpu_kernel_breakdown(visualize=False)[0]
print(json.dumps({
    "kernels_us": float(kinds["sum"].sum()), "idle_us": float(times["idle_time(us)"]),
    "host_us": float(idle["host_wait"]), "between_us": float(idle["kernel_wait"]),
}))
"""
TITLES = {
    "kernels_us": "all kernels and copies",
    "idle_us": "GPU idle",
    "host_us": "of it waiting for the host",
    "between_us": "of it between kernels",
}


def of_kernelguard() -> dict[str, float]:
    """Microseconds, by what they are about."""
    found = profile(SEED)
    return {
        "kernels_us": found.kernels_total,
        "idle_us": found.idle.total,
        "host_us": found.idle.total - found.idle.device,
        "between_us": found.idle.device,
    }


def of_hta(python: str) -> dict[str, float]:
    """The same of HolisticTraceAnalysis."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        document = json.loads(gzip.decompress(SEED.read_bytes()))
        document["distributedInfo"] = {"rank": 0, "world_size": 1}  # it asks for it
        path.write_text(json.dumps(document))
        done = subprocess.run([python, "-c", HTA, str(path)], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hta", required=True, help="an interpreter that has HolisticTraceAnalysis")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ours, theirs = of_kernelguard(), of_hta(options.hta)
    for key, title in TITLES.items():
        print(f"{title:<28} {ours[key]:>10,.0f} µs {theirs[key]:>10,.0f} µs")
    if options.json:
        document: dict[str, Any] = {
            "schema": 1,
            "kind": "trace-readers",
            "trace": SEED.name,
            "command": "python benchmarks/trace_readers.py --hta PYTHON --json benchmarks/results/trace-readers.json",
            "versions": {"python": sys.version.split()[0], "HolisticTraceAnalysis": version_of_hta(options.hta)},
            "kernelguard": {key: round(value, 3) for key, value in ours.items()},
            "HolisticTraceAnalysis": theirs,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
