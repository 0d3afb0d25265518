"""Does the host keep up? Packing in tokens per second, the wait for a batch, and memory over a million samples.

    PYTHONPATH=train python benchmarks/host.py [--samples 1000000] [--json benchmarks/results/ladder-host.json]

Packing is what a worker does with samples that are tokenized: plan a window, build batches. Templates and tokenizing
are not in it. The wait is that of a loop which takes a step of 8192 tokens every `--step` seconds (a step of the 27B's
slice takes 0.35) from the trainer's own loader. Memory is the resident size of one process that reads every sample
through the trainer's own pipeline. Exit code 1 when packing is under a million tokens per second, the wait over 1 % of
the time, or memory grows by more than 32 MiB between the first tenth and the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelguard_train import configfile
from kernelguard_train.batches import make_batch
from kernelguard_train.chat import Sample
from kernelguard_train.config import Config
from kernelguard_train.packing import plan
from kernelguard_train.stream import Position, load_steps

CAPACITY, WINDOW, VOCABULARY = 8192, 2048, 248_320
LEAST_RATE, MOST_WAIT, MOST_GROWTH = 1e6, 0.01, 32


def configured(*overrides: str) -> Config:
    return configfile.load(None, ["model.path=none", "data.path=synthetic", "model.init=random", *overrides])


def packing(seconds: float) -> dict[str, Any]:
    """Tokens per second of one process; lengths as UltraChat's."""
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(np.log(1175), 0.33, WINDOW), 64, CAPACITY).astype(int)
    samples = [
        Sample(name=str(n), ids=draw.integers(0, VOCABULARY, length), trained=np.ones(length, dtype=bool))
        for n, length in enumerate(lengths)
    ]
    tokens, computed, begun = 0, 0, time.perf_counter()
    while time.perf_counter() - begun < seconds:
        for group in plan([len(sample) for sample in samples], CAPACITY, "packed", (0,)):
            batch = make_batch([samples[i] for i in group], CAPACITY, 0, "packed")
            tokens += batch.tokens
            computed += batch.size
    spent = time.perf_counter() - begun
    return {"tokens_per_s": tokens / spent, "density": tokens / computed, "window": WINDOW, "tokens": CAPACITY}


def waiting(step: float, steps: int) -> dict[str, Any]:
    """What a loop with steps of that length waits for the loader, once it runs."""
    config = configured(f"batch.tokens={CAPACITY}", f"batch.window={WINDOW}", f"train.steps={steps + 5}")
    waits = []
    loaded = load_steps(config, VOCABULARY, rank=0, world=1, start=Position(), device=torch.device("cpu"))
    for number in range(steps + 5):
        begun = time.perf_counter()
        next(loaded)
        if number >= 5:  # the first ones wait for the worker to start
            waits.append(time.perf_counter() - begun)
        time.sleep(step)
    return {"share": sum(waits) / (sum(waits) + step * steps), "step_s": step, "steps": steps, "longest_s": max(waits)}


def resident() -> float:
    """MiB of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(samples: int) -> dict[str, Any]:
    """Resident memory while that many samples go through the pipeline; short ones, or it would take an hour."""
    config = configured(
        "batch.tokens=8192", f"data.synthetic_samples={samples}", "data.synthetic_median=64", "data.workers=0"
    )
    seen, tokens, marks, begun = 0, 0, [], time.perf_counter()
    for item in load_steps(config, VOCABULARY, rank=0, world=1, start=Position(), device=torch.device("cpu")):
        seen += sum(batch.samples for batch in item.batches)
        tokens += sum(batch.tokens for batch in item.batches)
        if seen >= (len(marks) + 1) * samples / 20:
            marks.append((seen, round(resident(), 1)))
    growth = max(size for _, size in marks) - marks[1][1]
    return {"samples": seen, "tokens": tokens, "seconds": time.perf_counter() - begun, "growth_mib": growth,
            "resident_mib": marks}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="for packing")
    parser.add_argument("--step", type=float, default=0.35, help="seconds of one step of the waiting loop")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        "schema": 1, "kind": "host", "command": " ".join(["python", "benchmarks/host.py", *sys.argv[1:]]),
        "versions": {"python": sys.version.split()[0], "torch": torch.__version__, "numpy": np.__version__},
        "processors": os.cpu_count(), "packing": packing(options.seconds),
        "waiting": waiting(options.step, options.steps), "memory": memory(options.samples),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    good = found["packing"]["tokens_per_s"] >= LEAST_RATE and found["waiting"]["share"] <= MOST_WAIT
    return 0 if good and found["memory"]["growth_mib"] <= MOST_GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
