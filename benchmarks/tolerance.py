"""How much does plain torch's own error vary? What the two factors of `workers/probes/measure.py` rest on.

    python benchmarks/tolerance.py [--out FILE]          (a CPU torch is enough; about a minute)

For each operation and dtype, over several seeds: the error of the yardstick (the formula in plain torch, its products
in that dtype) against fp64, over the whole tensor and in the worst row. `spread` is the largest of them beside the
smallest: a kernel that is as good as plain torch can be so far off by chance alone.
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

SEEDS = 12
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
            found: dict[str, list[tuple[float, float]]] = {}
            for seed in range(SEEDS):
                sample = measure.Sample(probes[op], case, dtype, "cpu", seed)
                for key, truth in sample.truth.items():
                    found.setdefault(" ".join(key), []).append(measure.distance(sample.plain[key], truth))
            floor = measure.ROUNDING[dtype]
            # Below the floor both count as the floor, as they do when a kernel is judged.
            spreads = {
                name: (
                    max(max(e, floor) for e, _ in pairs) / min(max(e, floor) for e, _ in pairs),
                    max(max(w, floor) for _, w in pairs) / min(max(w, floor) for _, w in pairs),
                )
                for name, pairs in found.items()
            }
            whole, worst = (max(spreads, key=lambda n, i=i: spreads[n][i]) for i in (0, 1))
            rows.append(
                {
                    "op": op,
                    "dtype": dtype,
                    "tensors": len(found),
                    "error": round(max(e for pairs in found.values() for e, _ in pairs), 6),
                    "spread": round(spreads[whole][0], 2),
                    "spread_of": whole,
                    "worst_row_spread": round(spreads[worst][1], 2),
                    "worst_row_spread_of": worst,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    document = {"torch": str(torch.__version__), "seeds": SEEDS, "rows": rows}
    if options.out is not None:
        options.out.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
