"""How much does plain torch's own error vary? What the two factors of `workers/probes/measure.py` rest on.

    python benchmarks/tolerance.py [--out FILE]          (a CPU torch is enough; about a minute)

A kernel is held against the error that plain torch has on the same inputs (the formula, its products in that dtype).
That error is one draw of many: with every input moved by an eighth of what rounding to the dtype costs, other numbers
round up and others down, while the right result stays the same. `spread` is the largest error of such draws beside the
smallest: a kernel that is exactly as good as plain torch can be so many times worse by chance alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from kernelguard.workers import probe as worker

SEEDS = 3
DRAWS = 8
LINEAR = {"k_heads": 4, "v_heads": 4, "k_dim": 32, "v_dim": 32}
SSD = {"heads": 4, "head_dim": 16, "groups": 2, "state": 16, "chunk": 64, "width": 4, "hidden": 64}
CASES: dict[str, dict[str, Any]] = {
    "gated_delta_rule": LINEAR,
    "kda": LINEAR,
    "causal_conv1d": {"channels": 64, "width": 4, "activation": "silu", "bias": True},
    "gated_rms_norm": {"size": 64, "heads": [4]},
    "chunk_scan": SSD,
    "split_conv1d_scan": SSD,
    "sdpa": {"q_heads": 4, "kv_heads": 2, "head_dim": 32},
    "grouped_mm": {"experts": 4, "hidden": 64, "intermediate": 32},
    "linear_cross_entropy": {"hidden": 64, "vocabulary": 200},
    "swiglu": {"size": 128},
}


def draws(
    measure: Any, probe: Any, case: dict[str, Any], dtype: str, seed: int
) -> dict[tuple[str, bool], list[tuple[float, float]]]:
    """By tensor: the errors, whole and in the worst row, of several draws of the yardstick on the same inputs."""
    # Its own yardstick is one draw here, whatever the size.
    measure.DRAWS = 1
    sample = measure.Sample(probe, case, dtype, "cpu", seed)
    draw = measure.Draw(case, dtype, "cpu", seed)
    low = None if dtype == "float32" else draw.dtype
    precision = importlib.import_module("kernelguard_workers.references.precision").Precision(low)
    given = sample.inputs
    found: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for _ in range(DRAWS):
        sample.inputs = {name: sample._moved(x, draw) for name, x in given.items()}  # noqa: SLF001 - its own jitter
        plain = sample._reference(torch.float32, precision, draw)  # noqa: SLF001
        for key, pair in sample.errors(plain).items():
            found.setdefault((" ".join(key), sample.truth[key].numel() <= measure.FEW), []).append(pair)
    return found


def main() -> int:
    """Print, or write, one row for each operation and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    worker.load_siblings()
    package = "kernelguard_workers"
    probes = importlib.import_module(f"{package}.probes").load(f"{package}.probes")
    measure = importlib.import_module(f"{package}.probes.measure")
    rows = []
    for op, shape in CASES.items():
        for dtype in ("bfloat16", "float16", "float32"):
            case = {"lengths": [1, 63, 65], "shape": shape, "packed": op not in {"gated_rms_norm", "swiglu"}}
            spreads: dict[str, tuple[float, float]] = {}
            small: set[str] = set()
            for seed in range(SEEDS):
                for (name, few), pairs in draws(measure, probes[op], case, dtype, seed).items():
                    small |= {name} if few else set()
                    both = tuple(
                        max(max(p[i], measure.ROUNDING[dtype]) for p in pairs)
                        / min(max(p[i], measure.ROUNDING[dtype]) for p in pairs)
                        for i in (0, 1)
                    )
                    before = spreads.get(name, (1.0, 1.0))
                    spreads[name] = (max(before[0], both[0]), max(before[1], both[1]))
            for few in (False, True):
                some = {n: pair for n, pair in spreads.items() if (n in small) is few}
                if not some:
                    continue
                whole = max(some, key=lambda name: some[name][0])
                worst = max(some, key=lambda name: some[name][1])
                rows.append(
                    {
                        "op": op,
                        "dtype": dtype,
                        "few_numbers": few,
                        "tensors": len(some),
                        "spread": round(some[whole][0], 2),
                        "spread_of": whole,
                        "worst_row_spread": round(some[worst][1], 2),
                        "worst_row_spread_of": worst,
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    document = {"torch": str(torch.__version__), "seeds": SEEDS, "draws": DRAWS, "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
