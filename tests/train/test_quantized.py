"""Float8 through torchao: emulated on a CPU, where it is as inexact as on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import test_model
import tiny
import torch

from kernelguard_train import quantized
from kernelguard_train.batches import packed_batch
from kernelguard_train.config import Config
from kernelguard_train.errors import ModelError
from kernelguard_train.ranks import Ranks

pytest.importorskip("torchao")


def test_float8_layers_compute_nearly_the_same_and_nothing_else_changes(tmp_path: Path, alone: Ranks) -> None:
    folder = tiny.write_config(tmp_path, "qwen3_5")
    batch = packed_batch(tiny.samples(test_model.RAGGED), 256, 0)
    plain = test_model.built(tiny.configured(folder), alone)
    made = test_model.built(tiny.configured(folder, 'model.torchao_float8=["mlp"]'), alone)
    assert "torchao float8, emulated: 12 linear layers in mlp" in made.notes
    kinds = {name.split(".")[4] for name, m in made.network.named_modules() if type(m).__name__ == "Float8Linear"}
    assert kinds == {"mlp"}
    expected, found = (test_model.gradients(one.network, [batch]) for one in (plain, made))
    assert found[0] == pytest.approx(expected[0], rel=5e-3)
    assert found[0] != expected[0], "the premise: something computes in float8"
    error = {
        name: float((found[1][name] - grad).norm() / grad.norm())
        for name, grad in expected[1].items()
        if ".mlp." in name
    }
    assert len(error) == 12
    # e4m3 keeps three bits of a fraction (2^-4 of rounding), e5m2 two (2^-3), and products average them.
    assert 1e-3 < max(error.values()) < 2**-3


def test_a_float8_run_trains_saves_and_goes_on(model_folder: Path, tmp_path: Path, alone: Ranks) -> None:
    def config(steps: int, *overrides: str) -> Config:
        return tiny.configured(model_folder, f"train.output={tmp_path}", f"train.steps={steps}", *overrides)

    float8 = ['model.torchao_float8=["mlp"]', "optim.decay=constant", "optim.warmup=0"]
    tiny.run(config(2, *float8), alone)
    losses = [line["loss"] for line in tiny.run(config(4, *float8, "checkpoint.export=true"), alone)]
    assert losses[3] < losses[0] - 0.2
    exported = tmp_path / "model"
    plain = tiny.configured(exported, "model.init=pretrained", f"train.output={tmp_path / 'plain'}", "train.steps=1")
    (line,) = tiny.run(plain, alone)
    assert line["loss"] < losses[3] + 0.2, "the exported weights are the trained ones, whatever computed them"


def test_what_cannot_be_converted_is_an_error(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.write_config(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"no layer has a submodule mpl with linear layers.*they have self_attn, mlp"):
        test_model.built(tiny.configured(folder, 'model.torchao_float8=["mpl"]'), alone)
    with pytest.raises(ModelError, match=r"torchao_float8 needs model\.fused = off"):
        test_model.built(tiny.configured(folder, 'model.torchao_float8=["mlp"]', "model.fused=on"), alone)
    odd = tiny.write_config(tmp_path / "odd", "llama", intermediate_size=100)
    with pytest.raises(ModelError, match="no layer has a submodule mlp with linear layers of multiples of 16"):
        test_model.built(tiny.configured(odd, 'model.torchao_float8=["mlp"]'), alone)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device=None: "NVIDIA A100")
    with pytest.raises(ModelError, match="NVIDIA A100 has no float8 products"):
        quantized.convert([torch.nn.Identity()], ["mlp"], torch.device("cuda", 0))
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ModelError, match=r"torchao cannot be imported: .*pip install torchao"):
        test_model.built(tiny.configured(folder, 'model.torchao_float8=["mlp"]'), alone)
