"""The model: packed equals unpacked, weights are read by parts, nothing falls back silently."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch.distributed.tensor import DTensor

from kernelguard_train import bindings, isolation, metrics, model, recompute
from kernelguard_train.batches import Batch, packed_batch, padded_batch
from kernelguard_train.config import Config
from kernelguard_train.errors import ModelError
from kernelguard_train.ranks import Ranks
from kernelguard_train.sharding import make_mesh

LIGER = """
import sys
import torch
from kernelguard_train import configfile, model
settings = ["model.init=random", "model.liger=on", "data.path=synthetic", "train.steps=1"]
config = configfile.load(None, [f"model.path={sys.argv[1]}", *settings])
text = model.text_config(config)
print(model._apply_liger(config, text, torch.device("cpu"))[0])
with torch.device("meta"):
    lm = __import__("transformers").AutoModelForCausalLM.from_config(text)
print(sorted({type(module).__name__ for module in lm.modules()}))
"""

RAGGED = (37, 1, 70, 5, 64)
"""Longer and shorter than a convolution and a chunk, one token alone; together with padding left."""


def built(config: Config, alone: Ranks) -> model.Built:
    return model.build(config, make_mesh(alone.device, alone.world, 0), alone.device)


def gradients(network: torch.nn.Module, batches: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    network.zero_grad()
    total = 0.0
    for batch in batches:
        loss = network(batch)
        loss.backward()
        total += float(loss.detach())
    found = {name: parameter.grad for name, parameter in network.named_parameters()}
    return total, {
        name: (grad.full_tensor() if isinstance(grad, DTensor) else grad).clone()
        for name, grad in found.items()
        if grad is not None
    }


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference between gradients of the same name.

    A tensor whose gradient is below 1e-5 of the whole one is what rounding left of larger numbers, and which way those
    round depends on the processor; it is held to that 1e-5 instead of to its own size.
    """
    assert a.keys() == b.keys()
    least = 1e-5 * float(torch.stack([gradient.norm() for gradient in b.values()]).norm())
    return max((float((a[name] - b[name]).norm()) / max(float(b[name].norm()), least, 1e-9), name) for name in a)


@pytest.fixture(scope="module", params=list(tiny.ARCHITECTURES))
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, alone: Ranks) -> model.Built:
    folder = tiny.write_config(tmp_path_factory.mktemp("tiny"), request.param)
    made = built(tiny.configured(folder, "parallel.one_rank=fsdp"), alone)
    tiny.remember(made.network)
    return made


def test_packed_equals_one_by_one_in_loss_and_every_gradient(network: model.Built) -> None:
    several = tiny.samples(RAGGED)
    together, packed = gradients(network.network, [packed_batch(several, 256, 0)])
    apart, single = gradients(network.network, [packed_batch([sample], 128, 0) for sample in several])
    assert together == pytest.approx(apart, rel=1e-6)
    error, name = worst(packed, single)
    assert error < 5e-5, name
    recurrent = {name for name in packed if name.endswith(("A_log", "dt_bias", "conv1d.weight"))}
    assert recurrent or network.text.model_type == "llama"
    assert all(float(grad.abs().max()) > 0 for grad in packed.values())


def test_padded_equals_one_by_one(network: model.Built) -> None:
    several = tiny.samples((37, 9, 70))
    together, padded = gradients(network.network, [padded_batch(several, 256, 0)])
    apart, single = gradients(network.network, [packed_batch([sample], 128, 0) for sample in several])
    assert together == pytest.approx(apart, rel=1e-6)
    error, name = worst(padded, single)
    assert error < 5e-5, name


def test_accumulated_batches_equal_a_larger_one(network: model.Built) -> None:
    several = tiny.samples((60, 61, 62, 63))
    large = gradients(network.network, [packed_batch(several, 256, 0)])
    small = gradients(network.network, [packed_batch(several[:1], 128, 0), packed_batch(several[1:], 256, 0)])
    assert large[0] == pytest.approx(small[0], rel=1e-6)
    assert worst(large[1], small[1])[0] < 5e-5


def test_a_batch_without_labels_has_zero_loss_and_zero_gradients(network: model.Built) -> None:
    loss, grads = gradients(network.network, [packed_batch([], 128, 0)])
    assert loss == 0
    assert grads, "gradients exist: every rank has to take part in reducing them"
    assert all(float(grad.abs().max()) == 0 for grad in grads.values())


def test_isolation_passes_on_a_sound_model(network: model.Built, alone: Ranks) -> None:
    isolation.check(network.network, network.parts.embedding, tiny.VOCABULARY, alone.device)
    assert all(parameter.grad is None for parameter in network.network.parameters())


def drop(name: str) -> Callable[[Batch], dict[str, Any]]:
    """Model inputs that lack one boundary signal."""
    original = Batch.model_inputs

    def inputs(self: Batch) -> dict[str, Any]:
        return {key: value for key, value in original(self).items() if not key.startswith(name)}

    return inputs


@pytest.mark.parametrize(
    ("architecture", "forgotten"),
    [
        ("qwen3_5", "cu_seq_lens_q"),
        ("qwen3_5", "seq_idx"),
        ("qwen3_5", "position_ids"),
        ("qwen3_next", "cu_seq_lens_q"),
        ("llama", "position_ids"),
        ("bamba", "seq_idx"),
    ],
)
def test_isolation_catches_each_forgotten_signal(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch, architecture: str, forgotten: str
) -> None:
    made = built(tiny.configured(tiny.write_config(tmp_path, architecture)), alone)  # gates as initialised: they forget
    monkeypatch.setattr(Batch, "model_inputs", drop(forgotten))
    with pytest.raises(ModelError, match="packed samples are not kept apart"):
        isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)


def test_isolation_catches_a_leak_that_the_gates_all_but_forget(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test with a tolerance passes this model; its gates keep a millionth of the state from one token to the next."""
    made = built(tiny.configured(tiny.write_config(tmp_path, "qwen3_5")), alone)
    with torch.no_grad():
        for name, parameter in made.network.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(2.5)
    monkeypatch.setattr(Batch, "model_inputs", drop("cu_seq_lens_q"))
    with pytest.raises(ModelError, match="packed samples are not kept apart") as caught:
        isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)
    before, after, own = (float(number) for number in re.findall(r"[0-9.]+e[+-][0-9]+", str(caught.value)))
    assert 0 < max(before, after) < 1e-4 * own


def test_isolation_catches_the_fallback_that_ignores_boundaries(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = built(tiny.configured(tiny.write_config(tmp_path, "qwen3_5")), alone)
    module = transformers.models.qwen3_5.modeling_qwen3_5
    plain = module.torch_chunk_gated_delta_rule.__wrapped__
    monkeypatch.setattr(
        module,
        "torch_chunk_gated_delta_rule",
        lambda *a, **k: plain(*a, **{name: value for name, value in k.items() if name != "cu_seqlens"}),
    )
    with pytest.raises(ModelError, match="packed samples are not kept apart"):
        isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)


def test_three_dimensional_positions_would_leak(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why `Batch.position_ids` has two dimensions."""
    made = built(tiny.configured(tiny.write_config(tmp_path, "qwen3_5")), alone)
    original = Batch.model_inputs

    def inputs(self: Batch) -> dict[str, Any]:
        found = original(self)
        return {**found, "position_ids": found["position_ids"][None].expand(3, -1, -1)}

    monkeypatch.setattr(Batch, "model_inputs", inputs)
    with pytest.raises(ModelError, match="packed samples are not kept apart"):
        isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)


def test_units_are_gathered_and_let_go_as_they_should(network: model.Built) -> None:
    parts = network.parts
    ending = parts.ending[-1].weight if not parts.tied else None
    loss = network.network(packed_batch(tiny.samples((50,)), 128, 0))
    held = [name for name, p in network.network.named_parameters() if not isinstance(p, DTensor)]
    if parts.tied:
        assert {name.split(".")[2] for name in held} == {"embed_tokens", "norm"}, "one unit, for the whole step"
    else:
        assert ending is not parts.ending[-1].weight
        assert {name.split(".")[-2] for name in held} <= {"norm", "final_layernorm", "lm_head"}
        assert len(held) == 2, "the last unit stays gathered: the backward pass starts with it"
    loss.backward()
    assert all(isinstance(p, DTensor) for p in network.network.parameters())
    order = [*parts.layers] if parts.tied else [parts.embedding, *parts.layers]
    for unit, following in zip(order, order[1:], strict=False):  # noqa: RUF007
        ahead = unit._get_fsdp_state()._states_to_forward_prefetch  # type: ignore[operator]
        assert ahead == [following._get_fsdp_state()]  # type: ignore[operator]
        behind = following._get_fsdp_state()._states_to_backward_prefetch  # type: ignore[operator]
        assert behind == [unit._get_fsdp_state()]  # type: ignore[operator]


def test_every_linear_attention_function_is_bound(network: model.Built) -> None:
    expected = {
        "qwen3_5": {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"},
        "qwen3_next": {"causal_conv1d_fn", "torch_chunk_gated_delta_rule"},
        "llama": set(),
        "bamba": {"causal_conv1d_fn", "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"},
    }
    kind = network.text.model_type.removesuffix("_text")
    assert {bound.name.rpartition(".")[2] for bound in network.bound} == expected[kind]


def test_a_missing_fused_kernel_is_an_error_with_its_cause(tmp_path: Path, alone: Ranks) -> None:
    config = tiny.configured(tiny.write_config(tmp_path, "qwen3_5"), "model.kernels=fused")
    with pytest.raises(ModelError, match=r"the fused kernel fla.*No module named 'fla'.*model.kernels=reference"):
        built(config, alone)


def test_the_reference_gets_no_fused_gated_delta_layers_on_a_gpu_either(tmp_path: Path, alone: Ranks) -> None:
    """They hand it fewer key heads than value heads: it raised in the first step, on a GPU alone."""
    folder = tiny.write_config(tmp_path, "qwen3_5")
    made = built(tiny.configured(folder), alone)
    gpu = torch.device("cuda")
    reference = tiny.configured(folder, "model.kernels=reference")
    assert model._fuse(reference, made.network.lm, made.parts, gpu) == []
    assert not model._fused_kernels(reference, gpu)
    assert model._fused_kernels(tiny.configured(folder), gpu)
    assert model._fused_kernels(tiny.configured(folder, "model.kernels=fused"), torch.device("cpu"))


@pytest.mark.parametrize("rung", ["full", "selective"])
def test_recomputing_changes_no_gradient(tmp_path: Path, alone: Ranks, rung: recompute.Rung) -> None:
    made = built(tiny.configured(tiny.write_config(tmp_path, "qwen3_5")), alone)
    batch = packed_batch(tiny.samples(RAGGED), 256, 0)
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    found = {}
    stored = {}
    for which in ("none", rung):
        recompute.apply(made.parts.layers, which)  # type: ignore[arg-type]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            loss = made.network(batch)
        stored[which] = sum(kept)
        loss.backward()
        found[which] = gradients(made.network, [batch])
    assert found["none"][0] == found[rung][0]
    assert worst(found["none"][1], found[rung][1])[0] == 0
    assert stored[rung] < 0.7 * stored["none"]


def test_the_ladder_spends_the_budget_and_no_more() -> None:
    cost = {("a", "full"): 1, ("a", "selective"): 4, ("a", "none"): 10, ("b", "full"): 1, ("b", "selective"): 3, ("b", "none"): 5}  # fmt: skip  # noqa: E501
    kinds = ["a", "b"] * 4
    for budget in range(60):
        rungs = recompute.ladder(kinds, cost, budget)  # type: ignore[arg-type]
        spent = sum(cost[kind, rung] - cost[kind, "full"] for kind, rung in zip(kinds, rungs, strict=True))
        assert spent <= budget
    assert recompute.ladder(kinds, cost, 0) == ["full"] * 8  # type: ignore[arg-type]
    assert recompute.ladder(kinds, cost, 52) == ["none"] * 8  # type: ignore[arg-type]
    assert recompute.ladder(kinds, cost, 20) == ["selective"] * 8  # type: ignore[arg-type]


def test_ranks_that_measure_different_memory_recompute_the_same_layers() -> None:
    cost = {("a", rung): size for rung, size in zip(("none", "selective", "full"), (10, 4, 1), strict=True)}
    dearer = {key: size + 2 for key, size in cost.items() if key[1] != "full"} | {("a", "full"): 1}
    together = [[*cost.values(), -30], [*dearer.values(), -60]]

    def worst(_own: list[int]) -> list[int]:
        return [max(pair) for pair in zip(*together, strict=True)]

    first, second = (recompute.decide(["a"] * 6, c, b, worst) for c, b in ((cost, 30), (dearer, 60)))  # type: ignore[arg-type]
    assert first == second == recompute.ladder(["a"] * 6, dearer, 30)  # type: ignore[arg-type]
    alone = recompute.decide(["a"] * 6, cost, 30, lambda numbers: numbers)  # type: ignore[arg-type]
    assert alone != first, "the premise: the other rank's measure matters"
    assert recompute.decide(["a"], cost, -5, lambda numbers: numbers) == ["full"]  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at gathered weights
def test_compiled_submodules_compute_the_same(tmp_path: Path, alone: Ranks) -> None:
    folder = tiny.write_config(tmp_path, "llama")
    batch = packed_batch(tiny.samples(RAGGED), 256, 0)
    plain = gradients(built(tiny.configured(folder), alone).network, [batch])
    config = tiny.configured(folder, 'model.compile=["mlp"]', "model.compile_backend=aot_eager")
    compiled = gradients(built(config, alone).network, [batch])
    assert plain[0] == pytest.approx(compiled[0], rel=1e-6)
    assert worst(plain[1], compiled[1])[0] < 1e-5
    with pytest.raises(ModelError, match="no layer has a submodule mpl; they have self_attn, mlp"):
        built(replace(config, model=replace(config.model, compile=("mpl",))), alone)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=list(tiny.ARCHITECTURES))
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint that transformers wrote, in several files."""
    config = transformers.AutoConfig.from_pretrained(tiny.write_config(tmp_path / "config", request.param))
    torch.manual_seed(1)
    lm = transformers.AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(tmp_path / "saved", max_shard_size="100KB")
    return tmp_path / "saved"


def test_weights_are_those_that_transformers_loads(saved: Path, alone: Ranks) -> None:
    made = built(tiny.configured(saved, "model.init=pretrained"), alone)
    expected = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).state_dict()
    found = made.network.lm.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected[name]), name
    rotary = dict(made.network.lm.named_buffers())
    reference = transformers.AutoModelForCausalLM.from_pretrained(saved)
    for name, buffer in reference.named_buffers():
        assert torch.equal(rotary[name], buffer), name


def test_the_text_model_of_a_vision_language_checkpoint_is_loaded(tmp_path: Path, alone: Ranks) -> None:
    text = {k: v for k, v in tiny.ARCHITECTURES["qwen3_5"].items() if k not in ("architectures", "model_type")}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    whole = transformers.Qwen3_5ForConditionalGeneration(config)
    whole.save_pretrained(tmp_path)
    made = built(tiny.configured(tmp_path, "model.init=pretrained"), alone)
    assert made.text.model_type == "qwen3_5_text"
    expected = whole.model.language_model.state_dict()
    for name, tensor in made.network.lm.model.state_dict().items():
        assert torch.equal(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor, expected[name]), name
    assert not any("visual" in name for name, _ in made.network.named_parameters())
    with pytest.raises(ModelError, match="is a vision-language model"):
        model.text_config(tiny.configured(tmp_path, "model.text_only=false"))


def test_parameters_are_float32_and_computed_in_bfloat16(tmp_path: Path, alone: Ranks) -> None:
    made = built(tiny.configured(tiny.write_config(tmp_path, "qwen3_5"), "model.compute_dtype=bfloat16"), alone)
    seen: list[torch.dtype] = []
    made.parts.layers[0].mlp.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))
    with made.network.computing():
        made.network(packed_batch(tiny.samples((50,)), 128, 0)).backward()
    assert {parameter.dtype for parameter in made.network.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in made.network.parameters() if p.grad is not None} == {torch.float32}
    assert seen == [torch.bfloat16]


def test_random_weights_depend_on_the_seed_alone(tmp_path: Path, alone: Ranks) -> None:
    folder = tiny.write_config(tmp_path, "llama")

    def drawn(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.seed())  # whatever was drawn before must not matter
        made = built(tiny.configured(folder, f"train.seed={seed}"), alone)
        return torch.cat([p.detach().flatten() for p in made.network.parameters()])

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))


def _damaged(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda t: t.pop("model.norm.weight"), r"lacks model\.norm\.weight"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"is \[3\] in .*; the model needs \[64\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), "is I8: train from an unquant"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path, alone: Ranks, change: Any, expected: str) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny.write_config(tmp_path / "config", "llama"))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "saved")
    folder = _damaged(tmp_path / "saved", change)
    with pytest.raises(ModelError, match=expected):
        built(tiny.configured(folder, "model.init=pretrained"), alone)


def test_a_folder_without_weights_is_refused(tmp_path: Path, alone: Ranks) -> None:
    folder = tiny.write_config(tmp_path, "llama")
    with pytest.raises(ModelError, match=r"holds no safetensors file \(model.init=random"):
        built(tiny.configured(folder, "model.init=pretrained"), alone)
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        built(tiny.configured(folder, "model.init=pretrained"), alone)


def test_a_slice_keeps_the_first_layers(tmp_path: Path) -> None:
    folder = tiny.write_config(tmp_path, "qwen3_5")
    text = model.text_config(tiny.configured(folder, "model.layers=2"))
    assert text.num_hidden_layers == len(text.layer_types) == 2
    with pytest.raises(ModelError, match=r"model\.layers = 9, but the model has 4"):
        model.text_config(tiny.configured(folder, "model.layers=9"))
    (folder / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(ModelError, match="not a causal language model"):
        model.text_config(tiny.configured(folder))


# --- references ------------------------------------------------------------------------------------------------------


def test_segments_follow_either_signal() -> None:
    seq_idx = torch.tensor([[0, 0, 1, 2, 2, 2]], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    assert bindings._segments(None, seq_idx, 6) == bindings._segments(cu_seqlens, None, 6) == [(0, 2), (2, 3), (3, 6)]
    assert bindings._segments(None, None, 6) == [(0, 6)]


# --- fused kernels, with stand-ins that have the real ones' signatures and layouts ------------------------------------


def _stand_ins(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Importable modules with these functions; a name of dots is written with double underscores."""
    for name, content in modules.items():
        path = name.replace("__", ".")
        module = types.ModuleType(path)
        module.__dict__.update(content)
        for end in range(path.count(".")):
            parent = path.rsplit(".", path.count(".") - end)[0]
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, types.ModuleType(parent)))
            if parent == "fla":
                monkeypatch.setattr(sys.modules[parent], "__version__", "0.6.0", raising=False)
        monkeypatch.setitem(sys.modules, path, module)


def _fla_delta_rule(reference: Callable[..., Any]) -> Callable[..., Any]:
    def chunk_gated_delta_rule(  # noqa: PLR0917 - fla's own order
        q: Any, k: Any, v: Any, g: Any, beta: Any, scale: float | None = None, initial_state: Any = None,
        output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Any = None, cu_seqlens_cpu: Any = None,
    ) -> Any:  # fmt: skip
        assert scale is None
        assert use_qk_l2norm_in_kernel
        assert not output_final_state
        assert cu_seqlens_cpu is not None, "the copy on the CPU arrives, so that fla need not wait for the GPU"
        return reference(q, k, v, g=g, beta=beta, cu_seqlens=cu_seqlens, initial_state=initial_state,
                         use_qk_l2norm_in_kernel=True)  # fmt: skip

    return chunk_gated_delta_rule


def _fla_convolution(reference: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d(  # noqa: PLR0917 - fla's own order
        x: Any, weight: Any, bias: Any = None, residual: Any = None, initial_state: Any = None,
        output_final_state: bool = False, activation: Any = None, backend: str = "triton", cu_seqlens: Any = None,
        cu_seqlens_cpu: Any = None,
    ) -> Any:  # fmt: skip
        assert residual is initial_state is None
        assert not output_final_state
        assert backend == "triton"
        assert x.is_contiguous(), "time before channels, as fla wants it"
        assert torch.equal(cu_seqlens, cu_seqlens_cpu)
        lengths = cu_seqlens.diff()
        seq_idx = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None]
        y = reference(x.transpose(1, 2), weight, bias, activation=activation, seq_idx=seq_idx)
        return y.transpose(1, 2), None

    return causal_conv1d


def _dao_convolution(reference: Callable[..., Any]) -> Callable[..., Any]:
    def causal_conv1d_fn(  # noqa: PLR0917 - causal-conv1d's own order
        x: Any, weight: Any, bias: Any = None, seq_idx: Any = None, initial_states: Any = None,
        return_final_states: bool = False, final_states_out: Any = None, activation: Any = None,
    ) -> Any:  # fmt: skip
        assert x.stride(1) == 1, "channels last, or seq_idx is refused"
        assert seq_idx.dtype == torch.int32
        assert initial_states is final_states_out is None
        assert not return_final_states
        return reference(x, weight, bias, activation=activation, seq_idx=seq_idx)

    return causal_conv1d_fn


@pytest.mark.parametrize("convolution", ["fla", "causal_conv1d"])
@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_next"])
def test_fused_kernels_get_what_they_want(
    tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch, architecture: str, convolution: str
) -> None:
    folder = tiny.write_config(tmp_path, architecture)
    batch = packed_batch(tiny.samples(RAGGED), 256, 0)
    expected = gradients(built(tiny.configured(folder), alone).network, [batch])
    modeling = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    rule = bindings.segmented_delta_rule(modeling.torch_chunk_gated_delta_rule.__wrapped__)
    convolve = bindings.segmented_convolution(modeling.causal_conv1d_fn.__wrapped__)
    _stand_ins(
        monkeypatch,
        fla__ops__gated_delta_rule={"chunk_gated_delta_rule": _fla_delta_rule(rule)},
        fla__modules__causal_conv1d={"causal_conv1d": _fla_convolution(convolve)},
        causal_conv1d={"causal_conv1d_fn": _dao_convolution(convolve)},
    )
    made = built(tiny.configured(folder, "model.kernels=fused", f"model.convolution={convolution}"), alone)
    assert [bound.to.split(".")[0] for bound in made.bound] == [convolution, "fla"]
    isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)
    found = gradients(made.network, [batch])
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert worst(found[1], expected[1])[0] < 1e-5


def test_automatic_convolution_falls_to_fla_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _stand_ins(monkeypatch, fla__modules__conv={"causal_conv1d": lambda x: x})
    _, label = bindings._fused_convolution("auto")
    assert label == "fla.modules.conv.causal_conv1d"
    with pytest.raises(ModelError, match=r"the fused kernel causal_conv1d\.causal_conv1d_fn cannot be had"):
        bindings._fused_convolution("causal_conv1d")


def test_varlen_attention_trains_like_sdpa(tmp_path: Path, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole model on the registered attention; torch's kernel itself needs a GPU and is stood in for."""
    import test_attention
    import torch.nn.attention.varlen as torch_varlen

    monkeypatch.setattr(torch_varlen, "varlen_attn", test_attention.torch_2_12)
    for architecture in ("qwen3_5", "llama"):
        folder = tiny.write_config(tmp_path / architecture, architecture)
        batch = packed_batch(tiny.samples(RAGGED), 256, 0)
        expected = gradients(built(tiny.configured(folder), alone).network, [batch])
        made = built(tiny.configured(folder, "model.attention=varlen"), alone)
        isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)
        found = gradients(made.network, [batch])
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        error, name = worst(found[1], expected[1])
        assert error < 5e-5, name


def test_the_published_27b_is_read_and_cut_from_its_config_alone() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "qwen3.8-27b" / "config.json"
    text = model.text_config(tiny.configured(path, "model.layers=8"))
    assert text.model_type == "qwen3_5_text"
    assert text.layer_types == (["linear_attention"] * 3 + ["full_attention"]) * 2
    with torch.device("meta"):
        lm = transformers.AutoModelForCausalLM.from_config(text)
    # Eight of the yardstick's layers and its output layer, the embedding left out.
    parameters = sum(metrics.matmul_parameters(lm, text))
    assert parameters == sum(p.numel() for p in lm.parameters()) - 248_320 * 5_120
    assert 4.3e9 < parameters < 4.6e9
    assert metrics.attention_width(lm.model.layers, text) == 2 * 24 * 256


def test_the_isolation_check_has_the_size_of_the_runs_batches(network: model.Built, alone: Ranks) -> None:
    """Kernels are compiled and tuned for a size; for one that the run never has again that is lost time."""
    seen: list[int] = []
    embedding = network.parts.embedding
    hook = embedding.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].numel()))
    isolation.check(network.network, embedding, tiny.VOCABULARY, alone.device, 384)
    isolation.check(network.network, embedding, tiny.VOCABULARY, alone.device)
    hook.remove()
    assert seen == [384, isolation.LEAST]


@pytest.mark.parametrize(("architecture", "swiglu"), [("llama", True), ("qwen3_next", False)])
def test_liger_leaves_experts_to_the_grouped_products(architecture: str, swiglu: bool, tmp_path: Path) -> None:
    """Its own tune 16 or 32 candidates each at the first step. In a process of its own: it replaces classes."""
    folder = tiny.write_config(tmp_path / "model", architecture)
    done = subprocess.run([sys.executable, "-c", LIGER, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    note, classes = done.stdout.splitlines()[-2:]
    assert f"rms_norm=True, swiglu={swiglu}" in note
    assert "LigerRMSNorm" in classes
    assert "LigerExperts" not in classes
    assert ("LigerSwiGLUMLP" in classes) is swiglu
