"""What makes the trainer fast changes neither values nor gradients: fused layers, the working copy, float32 sums."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional

from kernelguard_train import bindings, float8, fused, gated_delta, isolation, loss, model
from kernelguard_train.batches import Batch, packed_batch
from kernelguard_train.errors import ModelError
from kernelguard_train.ranks import Ranks
from kernelguard_train.sharding import make_mesh
from kernelguard_train.working import GradientSum, WorkingCopy


class Block(nn.Module):
    """A SwiGLU block as transformers writes it."""

    def __init__(self, size: int = 32, inner: int = 48) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)
        self.act_fn = nn.SiLU()
        self.config = type("Config", (), {"hidden_act": "silu"})()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lowered: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return lowered


class Small(nn.Module):
    """An embedding, a block with a bias beside it, and a norm: every kind of gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.block = Block()
        self.side = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        mixed: torch.Tensor = self.norm(x + self.block(x) + self.side(x))
        return mixed


def step(network: nn.Module, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    network.zero_grad()
    network(ids).pow(3).sum().backward()
    return {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}


def test_fused_layers_have_the_plain_layers_values_and_gradients() -> None:
    torch.manual_seed(0)
    network = Small()
    ids = torch.randint(0, 50, (1, 40))
    expected, output = step(network, ids), network(ids)
    assert fused.adopt([network], network.embedding, compiled=False, dynamic=False, fp8=False) == "1 linear, 1 SwiGLU"
    torch.testing.assert_close(network(ids), output)
    found = step(network, ids)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fused"])
def test_a_working_copy_sums_the_gradients_of_several_batches(fuse: bool) -> None:
    torch.manual_seed(0)
    network = Small()
    batches = [torch.randint(0, 50, (1, 40)) for _ in range(3)]
    expected = [step(network, ids) for ids in batches]
    network.zero_grad()
    if fuse:
        fused.adopt([network], network.embedding, compiled=False, dynamic=False, fp8=False)
    copy = WorkingCopy(network, torch.float32)
    for _ in range(2):  # the second time over what the first left
        with copy.active():
            for ids in batches:
                network(ids).pow(3).sum().backward()
        for name, parameter in network.named_parameters():
            total = sum(gradients[name] for gradients in expected)
            torch.testing.assert_close(parameter.grad, total, rtol=1e-4, atol=1e-2, msg=name)


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    """Thirty-two products of one size: added in bf16, the last ones would no longer move the sum."""
    weight = nn.Parameter(torch.zeros(8, 16))
    total = GradientSum(weight)
    left, right = torch.randn(64, 8, dtype=torch.bfloat16), torch.randn(64, 16, dtype=torch.bfloat16)
    one = left.float().T @ right.float()
    rounded = torch.zeros(8, 16, dtype=torch.bfloat16)
    for _ in range(300):
        total.add_product(left, right)
        rounded += left.T @ right
    assert total.total is not None
    torch.testing.assert_close(total.total, 300 * one, rtol=1e-5, atol=1e-3)
    assert float((rounded.float() - 300 * one).norm() / one.norm()) > 3, "the premise"


def test_parameters_are_the_masters_outside_and_the_copy_inside() -> None:
    network = Small()
    copy = WorkingCopy(network, torch.bfloat16)
    masters = list(network.parameters())
    with copy.active():
        assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
        network(torch.randint(0, 50, (1, 8))).sum().backward()
    assert list(network.parameters()) == masters
    assert {p.grad.dtype for p in masters if p.grad is not None} == {torch.float32}
    with torch.no_grad():
        masters[0].add_(1.0)
    with copy.active():
        torch.testing.assert_close(network.embedding.weight, masters[0].bfloat16())


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_the_loss_adds_its_weights_gradient_to_the_working_copy(scale: float) -> None:
    torch.manual_seed(0)
    head = nn.Linear(32, 70, bias=False)
    hidden, targets = torch.randn(50, 32), torch.randint(0, 70, (50,))
    expected = functional.cross_entropy(head(hidden), targets, reduction="sum") * scale
    expected.backward()
    wanted = head.weight.grad
    head.weight.grad = None
    module = nn.Module()
    module.head = loss.adopt(head, chunk=16, implementation="chunked", compiled=False)
    inputs = hidden.clone().requires_grad_()
    copy = WorkingCopy(module, torch.float32)
    with copy.active():
        found = module.head(inputs, targets, scale)
        found.backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(head.weight.grad, wanted)
    assert inputs.grad is not None
    logits = head(hidden).detach().softmax(-1) - functional.one_hot(targets, 70)
    torch.testing.assert_close(inputs.grad, scale * logits @ head.weight.detach())


def reference_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, *_: Any, eps: float, **__: Any) -> Any:
    """What fla's gated norm computes; its own needs a GPU."""
    normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (normed * weight * functional.silu(gate.float())).to(x.dtype)


def grouped(rule: Any) -> Any:
    """The torch reference for fewer key heads than value heads, as the fused kernels take them."""

    def call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        times = value.shape[2] // key.shape[2]
        return rule(query.repeat_interleave(times, 2), key.repeat_interleave(times, 2), value, **options)

    return call


def build(folder: Path, alone: Ranks, architecture: str = "qwen3_5", *overrides: str) -> model.Built:
    made = tiny.configured(tiny.write_config(folder, architecture), *overrides)
    return model.build(made, make_mesh(alone.device, alone.world, 0), alone.device)


def gradients(made: model.Built, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
    made.network.zero_grad()
    with made.network.computing():
        value = made.network(batch)
        value.backward()
    return float(value.detach()), {n: p.grad.clone() for n, p in made.network.named_parameters() if p.grad is not None}


def test_the_gated_delta_layer_is_the_models_own(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(tmp_path, alone)
    tiny.remember(made.network)
    batch = packed_batch(tiny.samples((40, 70, 10)), 128, 0)
    value, expected = gradients(made, batch)
    layers = [m for layer in made.parts.layers for m in layer.modules() if gated_delta.suits(m)]
    assert layers, "the premise"
    import transformers.models.qwen3_5.modeling_qwen3_5 as home

    name = "chunk_gated_delta_rule" if hasattr(home, "chunk_gated_delta_rule") else bindings.DELTA_RULE[0]
    monkeypatch.setattr(home, name, grouped(getattr(home, name)))
    for layer in layers:
        gated_delta.bind(layer, reference_norm)
    again, found = gradients(made, batch)
    assert again == pytest.approx(value, rel=1e-5)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=1e-3, atol=1e-4, msg=parameter)
    isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)


def test_an_fla_that_takes_key_heads_for_value_heads_is_refused(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = build(tmp_path, alone)

    def adopted(version: str) -> str:
        fla = types.ModuleType("fla")
        fla.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "fla", fla)
        with pytest.raises(ModelError) as caught:
            gated_delta.adopt(made.parts.layers, compiled=False, dynamic=False, own_convolution=False, project=None)
        return str(caught.value)

    assert "flash-linear-attention 0.4.2 takes the number of key heads for that of value heads" in adopted("0.4.2")
    with pytest.raises(ModelError, match=r"0\.5\.0 or later is needed"):
        gated_delta.check_heads(made.network.modules())
    assert "cannot be told; 0.5.0 or later does" in adopted("of somebody's own")
    assert "model.fused = on needs flash-linear-attention" in adopted("0.5.0"), "it has no gated norm here"


def test_the_rotation_is_the_models_own() -> None:
    import transformers.models.qwen3_5.modeling_qwen3_5 as home

    q, k = torch.randn(1, 4, 10, 32), torch.randn(1, 2, 10, 32)
    angles = torch.randn(1, 10, 16)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    for found, expected in zip(
        gated_delta.rotate(q, k, cos, sin), home.apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("architecture", list(tiny.ARCHITECTURES))
def test_one_rank_without_fsdp_and_fused_is_one_with_it_and_plain(
    tmp_path: Path, alone: Ranks, architecture: str
) -> None:
    batch = packed_batch(tiny.samples((40, 70, 10)), 128, 0)
    value, expected = gradients(build(tmp_path, alone, architecture, "parallel.one_rank=fsdp"), batch)
    fast = build(tmp_path, alone, architecture, "model.fused=on")
    again, found = gradients(fast, batch)
    assert again == pytest.approx(value, rel=1e-5)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        whole: Any = gradient
        torch.testing.assert_close(found[parameter], whole.full_tensor(), rtol=1e-3, atol=1e-4, msg=parameter)
    isolation.check(fast.network, fast.parts.embedding, tiny.VOCABULARY, alone.device)


def test_float8_products_are_close_and_weight_gradients_stay_wide() -> None:
    torch.manual_seed(0)
    plain, narrow = nn.Sequential(nn.Linear(512, 512, bias=False)), nn.Sequential(nn.Linear(512, 512, bias=False))
    narrow.load_state_dict(plain.state_dict())
    embedding = nn.Embedding(2, 2)
    assert fused.adopt([narrow], embedding, compiled=False, dynamic=False, fp8=True) == "1 linear, 0 SwiGLU in float8"
    x = torch.randn(64, 512)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    (plain(a) * torch.arange(512)).sum().backward()
    (narrow(b) * torch.arange(512)).sum().backward()

    def error(found: Any, expected: Any) -> float:
        return float((found - expected).detach().norm() / expected.detach().norm())

    assert 1e-3 < error(narrow(x), plain(x)) < 0.05, "rounded to float8, and no more than that"
    assert 1e-3 < error(b.grad, a.grad) < 0.2
    assert error(narrow[0].weight.grad, plain[0].weight.grad) < 1e-6
    assert float8.suits(plain[0].weight)
    assert not float8.suits(nn.Linear(512, 48).weight)


def test_float8_casts_of_a_weight_follow_its_changes() -> None:
    quantizer = float8.Quantizer(compiled=False)
    weight = nn.Parameter(torch.randn(512, 512))
    first = quantizer.weight(weight)
    assert quantizer.weight(weight)[0] is first[0], "made once"
    with torch.no_grad():
        weight.mul_(3.0)
    second = quantizer.weight(weight)
    torch.testing.assert_close(second[0].float() * second[2], weight.detach(), rtol=0.07, atol=0.02)
    torch.testing.assert_close(second[1].float(), second[0].float().T)


def test_float8_needs_fused_layers(tmp_path: Path, alone: Ranks) -> None:
    with pytest.raises(model.ModelError, match=r"fp8 needs model\.fused"):
        build(tmp_path, alone, "llama", "model.fp8=true")
