"""What do the data cost each rank, by number of ranks: tokenising its share of a window, and having the whole window?

    PYTHONPATH=train python benchmarks/data.py [--ranks 1,2,4] [--rows 2048] [--json FILE]

Conversations of about 1240 tokens, made of the bundled chats, are read from a file by real processes with gloo, one
window of `--rows` rows. Reported are seconds of one core, the most that any rank spent: tokenising and masking its rows
(in training a process of its own does that, ahead), exchanging (copying included, waiting not), merging and planning.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernelguard_train import configfile, exchange, packing, stream
from kernelguard_train.demo import make

TURNS = 12
"""Bundled questions and answers that make one conversation."""


def write_chats(path: Path, rows: int) -> None:
    """Conversations of many turns."""
    bundled = [json.loads(line)["messages"] for line in make.CHATS.read_text(encoding="utf-8").splitlines()]
    with path.open("w", encoding="utf-8") as handle:
        for row in range(rows):
            turns = [turn for i in range(TURNS) for turn in bundled[(row * 7 + i * 11) % len(bundled)]]
            handle.write(json.dumps({"messages": turns}) + "\n")


def timed(action: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and the seconds of a core that this process spent on it."""
    before = time.process_time()
    result = action()
    return result, time.process_time() - before


def measure(folder: Path, rows: int) -> None:
    """One rank's part; rank 0 writes what the slowest rank spent."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = configfile.load(
        None, [f"model.path={folder}", f"data.path={folder / 'chats.jsonl'}", f"batch.window={rows}"]
    )
    shares = iter(stream.Shares(config, make.TOKENS, rank, world, stream.Position()))
    own, tokenising = timed(lambda: next(shares))
    dist.barrier()
    everyone, exchanging = timed(lambda: exchange.over_ranks(own) if world > 1 else exchange.alone(own))

    def plan() -> exchange.Window:
        window = exchange.merge(everyone)
        packing.plan([len(sample) for sample in window.samples], config.batch.tokens, "packed", (0,))
        return window

    window, planning = timed(plan)
    spent = torch.tensor([tokenising, exchanging, planning])
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    if rank == 0:
        found = {
            "ranks": world,
            "rows": window.rows,
            "tokens": sum(len(sample) for sample in window.samples),
            "megabytes_exchanged": sum(share.body.nbytes for share in everyone) / 1e6,
            **dict(zip(("tokenise_s", "exchange_s", "merge_and_plan_s"), spent.tolist(), strict=True)),
        }
        (folder / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        measure(options.folder, options.rows)
        return
    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make.main(folder)
        write_chats(folder / "chats.jsonl", options.rows)
        for ranks in options.ranks.split(","):
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
            command += [__file__, "--folder", name, "--rows", str(options.rows)]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            subprocess.run(command, check=True, env=environment)
            found = json.loads((folder / "found.json").read_text())
            results.append(found)
            print(
                ", ".join(
                    f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
                    for key, value in found.items()
                )
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
