"""What four real processes do together; `test_four_ranks.py` starts this under torchrun and reads what it found.

`torchrun --nproc-per-node 4 four_ranks.py MODEL LARGE FOLDER`
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))

import tiny
import torch.distributed as dist

from kernelguard_train import model, ranks
from kernelguard_train.sharding import make_mesh


def memory(name: str) -> int:
    """Bytes that this process holds (VmRSS), or held at most (VmHWM)."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def main(model_folder: Path, large: Path, folder: Path) -> None:
    overrides = ["batch.tokens=128", "batch.per_step=4", "train.steps=2", "parallel.shard=2"]
    hybrid = tiny.configured(model_folder, f"train.output={folder}/hybrid", *overrides)
    own = ranks.start(hybrid)
    found: dict[str, Any] = {}
    mesh = make_mesh(own.device, own.world, 2)
    found["mesh"] = [list(mesh.shape), list(mesh.mesh_dim_names or ()), mesh["shard"].get_local_rank()]
    tiny.run(hybrid, own)

    # A larger model, read from its checkpoint: how much does each rank hold at most on the way?
    config = tiny.configured(large, "model.init=pretrained")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = memory("VmRSS")
    built = model.build(config, make_mesh(own.device, own.world, 0), own.device)
    found["growth"] = memory("VmHWM") - before
    found["whole"] = 4 * sum(p.numel() for p in built.network.parameters())
    found["own"] = 4 * sum(p.to_local().numel() for p in built.network.parameters())  # type: ignore[attr-defined]
    (folder / f"found-{own.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
