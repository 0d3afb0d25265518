"""CPU torch, triton, fla and transformers from a real CPU lock: built, verified inside, and looked at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command import Command
from engine.base import PYTHON
from engine.test_build import inside, leftovers
from engine.world import EXAMPLE
from kernelguard.image.engine import Engine
from kernelguard.lock import load_lock

pytestmark = [pytest.mark.online, pytest.mark.thorough]
TAG = "kg-test-real:v1"


def test_a_real_lock_becomes_a_candidate(engine: Engine, base: str, tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(Path(__file__).resolve().parents[2] / ".cache" / "image")}
    path = tmp_path / "kernelguard.lock"
    target = f"cpu,torch=2.13.0,triton=3.7.1,python={PYTHON.removeprefix('python')}"
    locked = Command("lock", EXAMPLE, "--target", target, "--transformers", "5.24.0", "-o", path, env=cache)
    assert locked.code == 0, locked.err
    assert {"torch", "triton", "fla-core", "transformers"} <= {pin.name for pin in load_lock(path).pins}

    built = Command("build", path, "-t", TAG, "--base", base, "--require-level", "import", "--json", env=cache)
    assert built.code == 0, built.err
    made = json.loads(built.out)
    assert (made["image"], made["level"], made["state"]) == (f"{TAG}-candidate", "import", "candidate")
    assert engine.image(TAG) is None
    # The largest layer is the environment; its size is told.
    assert max(made["layers"], key=lambda layer: layer["size"])["made_by"].startswith("COPY")
    assert "step " in built.err, "progress as it happened"

    verdict = json.loads((tmp_path / "kernelguard.verdict.json").read_text())
    assert verdict["image"]["content_sha256"] == made["content_sha256"]
    codes = {(row["fast_path"], row["code"]) for row in verdict["findings"]}
    assert (None, "lock-holds") in codes, "the image has exactly the lock's bytes"
    assert ("chunk_gated_delta_rule", "bound") in codes, "fla and triton import, and the model takes them"
    assert ("causal_conv1d_fn", "not-installed") in codes, "a CUDA extension, which the lock says is left out"

    # The same question, asked again of the finished image, answers as a run without that extension does.
    again = Command("verify", path, "--image", made["image"], "--level", "import", "-o", tmp_path / "v.json", env=cache)
    assert again.code == 1, again.err
    assert json.loads((tmp_path / "v.json").read_text())["image"]["content_sha256"] == made["content_sha256"]
    assert "causal-conv1d" in " ".join(again.out.split())
    higher = Command("promote", made["image"], "--verdict", tmp_path / "v.json", "--lock", path, env=cache)
    assert higher.code == 3, higher.err
    assert engine.image(TAG) is None

    unchanged = Command("build", path, "-t", TAG, "--base", base, "--require-level", "import", env=cache)
    assert "nothing to do" in unchanged.out
    looked = Command("check", "--image", made["image"], "--shm-size", "16384", env=cache)
    assert looked.code == 0, looked.out
    assert inside(made["image"], "python", "-c", "import torch, triton, fla; print(torch.__version__)") == "2.13.0+cpu"
    engine.remove(made["image"])
    assert leftovers(engine) == []
