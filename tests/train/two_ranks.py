"""What two real processes do together; `test_two_ranks.py` starts this under torchrun and reads what it found.

`torchrun --nproc-per-node 2 two_ranks.py MODEL FOLDER`
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))

import tiny
import torch
import torch.distributed as dist
import transformers

from kernelguard_train import model, ranks, train
from kernelguard_train.errors import TrainError
from kernelguard_train.sharding import make_mesh

SMALL = ["batch.tokens=128", "batch.per_step=4", "train.steps=4"]


def failing(action: Callable[[], Any]) -> str:
    """The error that this rank ends with."""
    try:
        action()
    except TrainError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def main(model_folder: Path, folder: Path) -> None:
    first = tiny.configured(model_folder, f"train.output={folder}/together", *SMALL)
    own = ranks.start(first)
    found: dict[str, Any] = {}

    def config(name: str, *overrides: str) -> Any:
        return tiny.configured(model_folder, f"train.output={folder}/{name}", *SMALL, *overrides)

    # No rank holds the whole model.
    made = model.build(first, make_mesh(own.device, own.world, 0), own.device)
    found["own_numbers"] = sum(p.to_local().numel() for p in made.network.parameters())  # type: ignore[attr-defined]
    found["all_numbers"] = sum(p.numel() for p in made.network.parameters())

    tiny.run(config("together", "checkpoint.export=true"), own)
    # Each rank reads its own rows of what was exported.
    exported = folder / "together" / "model"
    loaded = model.build(tiny.configured(exported, "model.init=pretrained"), make_mesh(own.device, 2, 0), own.device)
    expected = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    found["loaded_wrong"] = [
        name
        for name, parameter in loaded.network.lm.named_parameters()
        if not torch.equal(parameter.full_tensor(), expected[name])  # type: ignore[attr-defined]
    ]
    found["loaded"] = len(expected)

    tiny.run(config("hsdp", "parallel.shard=1", "model.recompute=full"), own)
    tiny.run(config("kept", "parallel.reshard=false", "parallel.prefetch=2"), own)
    tiny.run(config("pairs", "parallel.layers_per_unit=3"), own)
    for architecture in ("llama", "qwen3_next", "bamba"):
        tiny.run(tiny.synthetic(folder / f"models-{own.rank}", architecture, folder / architecture), own)
    # A run of one process was stopped here; two go on.
    tiny.run(config("from_one"), own)

    # A SIGTERM that only the second rank gets.
    stopping = config("stopped")
    original = train.gradient_norm
    calls: list[int] = []

    def measure_and_stop(*arguments: Any) -> Any:
        calls.append(1)
        if own.rank == 1 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*arguments)

    train.gradient_norm = measure_and_stop
    found["stopped"] = failing(lambda: tiny.run(stopping, own))
    train.gradient_norm = original

    # A loss that is not a number on one rank alone.
    forward = model.Network.forward

    def poisoned(self: Any, batch: Any, scale: float = 1.0) -> torch.Tensor:
        calls.append(1)
        return forward(self, batch, scale) * (float("nan") if own.rank == 1 and len(calls) == 5 else 1.0)

    calls.clear()
    model.Network.forward = poisoned  # type: ignore[method-assign]
    tiny.run(config("poisoned", "checkpoint.every=0"), own)
    model.Network.forward = forward  # type: ignore[method-assign]

    # Bad input: all ranks end, each with the same error.
    bad = folder / "bad.jsonl"
    if own.first:
        bad.write_text(tiny.CHATS.read_text() + "{broken\n")
    dist.barrier()
    found["bad_row"] = failing(lambda: tiny.run(config("bad", f"data.path={bad}", "batch.window=512"), own))
    found["indivisible"] = failing(lambda: tiny.run(config("odd", "batch.per_step=3"), own))
    found["mesh"] = failing(lambda: tiny.run(config("odd", "parallel.shard=3"), own))

    # A source that the second rank reads differently: it ends early, or stands elsewhere.
    steps = train.load_steps

    def shortened(*arguments: Any, **named: Any) -> Any:
        whole = steps(*arguments, **named)
        return itertools.islice(whole, 1) if own.rank == 1 else whole

    def moved(*arguments: Any, **named: Any) -> Any:
        for step in steps(*arguments, **named):
            yield replace(step, after=replace(step.after, row=step.after.row + own.rank))

    for name, changed in (("shortened", shortened), ("moved", moved)):
        train.load_steps = changed
        found[name] = failing(lambda name=name: tiny.run(config(name), own))  # type: ignore[misc]
    train.load_steps = steps

    # A disk that is full for the second rank alone: its writes beyond 100 KB fail.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def full() -> None:
        if own.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        tiny.run(config("full", "checkpoint.every=2"), own)

    found["full"] = failing(full)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    (folder / f"found-{own.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
