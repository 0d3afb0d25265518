"""What do two GPUs of one host give over one, and what do prefetching, the units' size and resharding change?

    PYTHONPATH=...:train python benchmarks/two_gpus/scaling.py --json OUT [--only base,one] [--limit 90] [SETTING...]

Each variant is a run of the bundled trainer with one setting changed: `base` is FSDP2 over two ranks as configured by
default. `one` has no FSDP (parallel.one_rank) and `one-fsdp` has it with one rank, so that what FSDP's copies cost and
what communication costs can be told apart. Steps are of equal size per GPU; the update is part of each. The last step
of `base` is recorded, and its trace stays beside OUT: `kernelguard profile` says how much communication is in the open.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SLICE = ROOT / "train/examples/qwen3.5-27b-slice.toml"
STEPS = 7
VARIANTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "base": (2, (f"report.profile={STEPS}",)),
    "one": (1, ()),
    "one-fsdp": (1, ("parallel.one_rank=fsdp",)),
    "no-prefetch": (2, ("parallel.prefetch=0",)),
    "prefetch-2": (2, ("parallel.prefetch=2",)),
    "no-reshard": (2, ("parallel.reshard=false",)),
    "two-layers-per-unit": (2, ("parallel.layers_per_unit=2",)),
}
KEPT = ("gpus", "steps", "step_s", "step_p50_s", "step_p95_s", "tokens_per_s", "computed_tokens_per_s", "mfu",
        "peak_gib", "density", "torch", "gpu")  # fmt: skip


def command(ranks: int, settings: list[str]) -> list[str]:
    """The trainer's, under torchrun where there are several ranks."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*launcher, "kernelguard_train", str(SLICE), f"train.steps={STEPS}", "data.synthetic_samples=20000",
            "batch.tokens=16384", *settings]  # fmt: skip


def measure(name: str, work: Path, more: list[str], limit: float) -> dict[str, Any]:
    """One run: its summary, or why there is none."""
    ranks, settings = VARIANTS[name]
    output, log = work / name, work / f"{name}.log"
    row: dict[str, Any] = {"variant": name, "ranks": ranks, "settings": list(settings)}
    begun = time.monotonic()
    with log.open("w") as handle:
        arguments = command(ranks, [*settings, *more, f"train.output={output}"])
        process = subprocess.Popen(arguments, stdout=handle, stderr=handle, env=os.environ | {"OMP_NUM_THREADS": "1"})
        try:
            code: int | None = process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            code = None
            process.wait()
    row["seconds"] = round(time.monotonic() - begun, 1)
    summary = output / "summary.json"
    if code == 0 and summary.exists():
        found = json.loads(summary.read_text())
        row |= {key: found[key] for key in KEPT if key in found}
        row["losses"] = [json.loads(line)["loss"] for line in (output / "steps.jsonl").read_text().splitlines()]
    else:
        row["problem"] = f"{'ran past the limit' if code is None else f'exit code {code}'}: {log.read_text()[-1500:]}"
    return row


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its rate per GPU over that of one GPU without FSDP, and over `base`."""
    rates = {row["variant"]: row["tokens_per_s"] for row in rows if "tokens_per_s" in row}
    for row in rows:
        for key, other in (("to_one", "one"), ("to_one_fsdp", "one-fsdp"), ("to_base", "base")):
            if row["variant"] in rates and other in rates:
                row[key] = round(rates[row["variant"]] / rates[other], 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--only", default=",".join(VARIANTS))
    parser.add_argument("--limit", type=float, default=90.0, help="seconds that one run may take")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further run starts")
    parser.add_argument("settings", nargs="*", help="more settings of every run: model.layers=4")
    options = parser.parse_args()
    names = options.only.split(",")
    unknown = set(names) - set(VARIANTS)
    if unknown:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(VARIANTS)}")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import ladder  # noqa: PLC0415 - after the arguments are known to be good

    result: dict[str, Any] = {
        "schema": 1, "kind": "two-gpu-scaling", "command": " ".join(command(2, list(options.settings))[3:]),
        "versions": ladder.versions("", ""), "variants": [],
    }  # fmt: skip
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        for name in names:
            if time.monotonic() - begun > options.budget:
                result.setdefault("left_out", []).append(name)
                continue
            row = measure(name, Path(folder), list(options.settings), options.limit)
            result["variants"].append(row)
            compare(result["variants"])
            for trace in (Path(folder) / name).glob("*.trace.json.gz"):
                shutil.copy(trace, options.json.with_name(f"{options.json.stem}-{trace.name}"))
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
            print(json.dumps({k: v for k, v in row.items() if k != "losses"}), flush=True)
            text = json.dumps(result, indent=1).replace(f"{ROOT}/", "")
            options.json.write_text(text + "\n", encoding="utf-8")
    return 0 if all("problem" not in row for row in result["variants"]) else 1


if __name__ == "__main__":
    sys.exit(main())
