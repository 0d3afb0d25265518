"""What four real processes do together; `test_four_ranks.py` starts this under torchrun and reads what it found.

`torchrun --nproc-per-node 4 four_ranks.py MODEL LARGE FOLDER`
"""

from __future__ import annotations

import json
import re
import sys
import threading
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "train"))

import tiny
import torch
import torch.distributed as dist
import transformers

from kernelguard_train import model, ranks
from kernelguard_train.sharding import make_mesh


class Peak(threading.Thread):
    """The most memory of its own that this process had while the block ran, in bytes beyond what it had before.

    Pages of a mapped file are left out: ranks share them, the kernel takes them back at will, and how many of them it
    maps for one that is touched is its own affair.
    """

    def __enter__(self) -> Self:
        self.before = self.most = own_memory()
        self.over = threading.Event()
        self.start()
        return self

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.most = max(self.most, own_memory())

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()
        self.growth = max(self.most, own_memory()) - self.before


def own_memory() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
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
    with torch.device("meta"):  # what Python imports for it is no part of what loading holds
        transformers.AutoModelForCausalLM.from_config(model.text_config(config))
    with Peak() as peak:
        built = model.build(config, make_mesh(own.device, own.world, 0), own.device)
    found["growth"] = peak.growth
    found["whole"] = 4 * sum(p.numel() for p in built.network.parameters())
    found["own"] = 4 * sum(p.to_local().numel() for p in built.network.parameters())  # type: ignore[attr-defined]
    (folder / f"found-{own.rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
