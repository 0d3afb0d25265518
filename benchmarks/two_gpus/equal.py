"""Do two ranks compute the loss and the gradients that one computes, for the same batches of one step?

    equal.sh [cuda|cpu]          everything, one JSON object on stdout
    torchrun --nproc-per-node N equal.py run --dtype float32 --device cuda --model DIR --work DIR
    python equal.py compare WORK  what `run` left there of one rank, of one rank again, and of two

Two optimizer steps of four batches go through the trainer itself. Kept are the losses of both steps (the second shows
the update) and every gradient of the first, as it is before clipping: its norm, and all its values, or of a large one
every k-th. float32 runs on the reference kernels and sdpa, bfloat16 on what the trainer chooses.

A difference is relative: |a - b| / |a|, of losses as numbers and of gradients as vectors. It may be

    4 x the difference of one rank from itself, run twice  +  what rounding allows

float32: n 2^-24, the bound for adding n numbers (the step's trained tokens) in another order. bfloat16: 2^-8, since
its gradient is rounded once for each of the four batches, by at most 2^-9, and the norms of four gradients that
do not cancel sum to at most twice the norm of their sum; for losses 2^-9, one rounding of the hidden states.
Exit codes: 0 equal, 1 not.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("float32", "bfloat16")
BATCHES = 4
VALUES = 1 << 20
"""Values that are kept of a gradient."""


def run(options: argparse.Namespace) -> None:
    """Two steps on this number of ranks; rank 0 writes losses and gradients."""
    import torch.distributed as dist  # noqa: PLC0415
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    from kernelguard_train import configfile, ranks, train  # noqa: PLC0415 - needs PYTHONPATH=train
    from kernelguard_train.report import Report  # noqa: PLC0415

    plain = ["model.kernels=reference", "model.attention=sdpa"] if options.dtype == "float32" else []
    output = options.work / f"{options.name}-{options.dtype}-run"
    config = configfile.load(None, [
        f"model.path={options.model}", "model.init=random", f"model.compute_dtype={options.dtype}",
        f"train.device={options.device}", f"train.output={output}", "train.steps=2",
        f"data.path={ROOT / 'train/kernelguard_train/demo/chats.jsonl'}", "train.epochs=99",
        # Up to 3072 rows torch's CUDA embedding adds up its gradient in bfloat16, 32 rows at a time: many roundings.
        f"batch.tokens={4096 if options.device == 'cuda' else 512}", "batch.window=240", f"batch.per_step={BATCHES}",
        "optim.lr=1e-3", "optim.warmup=0", "checkpoint.every=0", "checkpoint.at_end=false", "checkpoint.export=false",
        "model.recompute=none", *plain,
    ])  # fmt: skip
    own = ranks.start(config)
    kept: dict[str, Any] = {}
    build, measure = train.build, train.gradient_norm

    def building(*arguments: Any, **named: Any) -> Any:
        built = build(*arguments, **named)
        kept["network"] = built.network
        return built

    def measuring(*arguments: Any, **named: Any) -> Any:
        if "gradients" not in kept:
            kept["gradients"] = {}
            for name, parameter in kept["network"].named_parameters():
                gradient = parameter.grad
                if gradient is None:
                    continue
                whole = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().float()
                flat = whole.flatten()
                kept["gradients"][name] = (float(whole.norm()), flat[:: -(-flat.numel() // VALUES)].cpu().clone())
        return measure(*arguments, **named)

    train.build, train.gradient_norm = building, measuring
    with Report(config, first=own.first) as report, ranks.StopRequest() as stop:
        train.train(config, own, report, stop)
    if own.first:
        lines = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
        found = {
            "losses": [line["loss"] for line in lines],
            "norm": lines[0]["norm"],
            "trained": round(lines[0]["trained_tokens_per_s"] * lines[0]["step_s"] * own.world),
            "gradients": kept["gradients"],
            "world": own.world,
            "device": torch.cuda.get_device_name() if own.device.type == "cuda" else "cpu",
        }
        torch.save(found, options.work / f"{options.name}-{options.dtype}.pt")
    dist.destroy_process_group()


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The relative difference of two vectors."""
    return float((a - b).norm() / a.norm().clamp_min(1e-30))


def compared(one: dict[str, Any], again: dict[str, Any], two: dict[str, Any], dtype: str) -> dict[str, Any]:
    """One rank against two, with what one rank differs from itself."""
    rounding = one["trained"] * 2.0**-24 if dtype == "float32" else 2.0**-8
    names = list(one["gradients"])
    rows = []
    for name in names:
        (norm, values), (_, values_again), (norm_two, values_two) = (
            found["gradients"][name] for found in (one, again, two)
        )
        tolerance = 4 * apart(values, values_again) + rounding
        difference = max(apart(values, values_two), abs(norm - norm_two) / max(norm, 1e-30))
        rows.append({"name": name, "norm": norm, "difference": difference, "tolerance": tolerance})
    rows.sort(key=lambda row: row["tolerance"] / max(row["difference"], 1e-30))
    relative = [abs(a - b) / abs(a) for a, b in zip(one["losses"], two["losses"], strict=True)]
    noise = [abs(a - b) / abs(a) for a, b in zip(one["losses"], again["losses"], strict=True)]
    allowed = one["trained"] * 2.0**-24 if dtype == "float32" else 2.0**-9
    losses = [d <= 4 * n + allowed for d, n in zip(relative, noise, strict=True)]
    missing = sorted(set(names) ^ set(two["gradients"]))
    return {
        "ranks": [one["world"], two["world"]],
        "losses_one": one["losses"],
        "losses_two": two["losses"],
        "loss_difference": max(relative),
        "loss_tolerance": 4 * max(noise) + allowed,
        "gradients": len(names),
        "gradients_missing": missing,
        "gradients_equal_bit_for_bit": sum(row["difference"] == 0 for row in rows),
        "worst": rows[:5],
        "trained_tokens": [one["trained"], two["trained"]],
        "passed": all(losses) and not missing and all(row["difference"] <= row["tolerance"] for row in rows)
        and one["trained"] == two["trained"] and one["world"] != two["world"],
    }  # fmt: skip


def compare(work: Path) -> int:
    """Prints the comparison of everything in a folder."""
    result: dict[str, Any] = {"schema": 1, "kind": "ranks-equal"}
    for dtype in DTYPES:
        one, again, two = (torch.load(work / f"{name}-{dtype}.pt") for name in ("one", "again", "two"))
        result["device"] = one["device"]
        result[dtype] = compared(one, again, two, dtype)
    passed = all(result[dtype]["passed"] for dtype in DTYPES)
    result["status"] = "pass" if passed else "fail"
    print(json.dumps(result, indent=1))
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    running = actions.add_parser("run")
    running.add_argument("--dtype", choices=DTYPES, required=True)
    running.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    running.add_argument("--name", required=True, help="one, again or two")
    running.add_argument("--model", type=Path, required=True)
    running.add_argument("--work", type=Path, required=True)
    comparing = actions.add_parser("compare")
    comparing.add_argument("work", type=Path)
    options = parser.parse_args()
    if options.action == "compare":
        return compare(options.work)
    run(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
