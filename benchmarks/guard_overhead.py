"""What does the guard cost a training? Step times of one script with and without it, in turns.

python benchmarks/guard_overhead.py [--steps 150] [--pairs 3] [--json benchmarks/results/guard-overhead.json]

A tiny Qwen3.5 on the CPU with working crafted kernels: its steps take milliseconds, so that a hook that stayed would
show. CPU time, as the machine may do other things; and, exactly, how many functions Python calls in a later step.
Step 1 is traced, and that it is slower is shown as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "guard"), str(ROOT / "tests" / "verify")]

import group  # noqa: E402
import packages  # noqa: E402
import scripts  # noqa: E402

import observed  # noqa: E402

_TIMED = (
    scripts.MODEL
    + """
import json, time
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
ids = torch.randint(2, 64, (1, 12))
seconds = []
for step in range(int(sys.argv[1])):
    began = time.process_time()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.process_time() - began)

calls = 0
def count(frame, event, argument):
    global calls
    calls += event in ("call", "c_call")
sys.setprofile(count)
model(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
optimizer.zero_grad()
sys.setprofile(None)
print(json.dumps([seconds, calls]))
"""
)


def measure(python: Path, folder: Path, steps: int, *, guarded: bool) -> tuple[list[float], int]:
    """CPU seconds of every step of one process, and the calls of one more."""
    guard = ["-m", "kernelguard.guard", "--"] if guarded else []
    argv = [str(python), *guard, "timed.py", str(steps)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=True)
    seconds, calls = json.loads(done.stdout.splitlines()[-1])
    return seconds, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        env = group.make_interpreter(folder / "env", "5.24.0", packages.working())
        (folder / "timed.py").write_text(_TIMED)
        runs: dict[bool, list[list[float]]] = {False: [], True: []}
        calls: dict[bool, set[int]] = {False: set(), True: set()}
        for number in range(options.pairs):
            for guarded in (number % 2 == 0, number % 2 == 1):
                seconds, count = measure(env.python, folder, options.steps, guarded=guarded)
                runs[guarded].append(seconds)
                calls[guarded].add(count)
    # The first step warms up, the second one still finds hooks on its way out.
    medians = {guarded: [statistics.median(run[2:]) for run in found] for guarded, found in runs.items()}
    without, with_guard = statistics.median(medians[False]), statistics.median(medians[True])
    spread = max(medians[False]) - min(medians[False])
    result = {
        "steps": options.steps,
        "pairs": options.pairs,
        "function_calls_per_step_without": sorted(calls[False]),
        "function_calls_per_step_with": sorted(calls[True]),
        "median_step_ms_without": round(without * 1e3, 3),
        "median_step_ms_with": round(with_guard * 1e3, 3),
        "difference_ms": round((with_guard - without) * 1e3, 3),
        "spread_between_equal_runs_ms": round(spread * 1e3, 3),
        "medians_ms_without": [round(m * 1e3, 3) for m in medians[False]],
        "medians_ms_with": [round(m * 1e3, 3) for m in medians[True]],
        "first_step_ms_without": round(statistics.median(run[0] for run in runs[False]) * 1e3, 1),
        "first_step_ms_with": round(statistics.median(run[0] for run in runs[True]) * 1e3, 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, CPU torch {observed.TORCH}",
        "retrieved": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
