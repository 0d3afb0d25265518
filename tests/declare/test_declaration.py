"""Declarations of real configurations: nested parts, settings that switch kernels off, and what a run gets to see."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from kernelguard.declare import Reader, declare, find_tree, parse_config, read_config
from kernelguard.declare.values import Declaration, FastPath, Phase, Requirement, TransformersTree
from kernelguard.errors import InputError, UndeterminedError
from observed import VERSIONS, transformers_base

pytestmark = pytest.mark.observed


@cache
def tree(version: str) -> TransformersTree:
    return find_tree(transformers_base(version).site / "transformers")


def read(version: str, **raw: Any) -> Declaration:
    return declare(parse_config(raw, source="config.json"), tree(version))


def path_of(found: Declaration, symbol: str) -> FastPath:
    return next(path for path in found.fast_paths if path.symbol == symbol)


def test_the_example_model() -> None:
    found = declare(read_config("examples/qwen3.8-27b"), tree("5.24.0"))
    assert not found.unknowns
    assert {path.import_path: path.layers for path in found.fast_paths} == {
        "causal_conv1d.causal_conv1d_fn": 48,
        "causal_conv1d.causal_conv1d_update": 48,
        "fla.ops.gated_delta_rule.chunk_gated_delta_rule": 48,
        "fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule": 48,
    }
    assert {path.model_type for path in found.fast_paths} == {"qwen3_5_text"}
    assert [(kind.name, kind.count) for kind in found.layer_kinds] == [("linear_attention", 48), ("full_attention", 16)]
    assert path_of(found, "causal_conv1d_update").phases == (Phase.DECODING,)
    assert path_of(found, "chunk_gated_delta_rule").boundaries[0].signals == ("cu_seq_lens_q",)


def test_any_text_model_may_stand_in_a_composite_one() -> None:
    text = {"model_type": "qwen3_next", "num_hidden_layers": 8}
    found = read("5.24.0", model_type="llava", text_config=text)
    assert path_of(found, "chunk_gated_delta_rule").layers == 6
    assert path_of(found, "causal_conv1d_fn").boundaries[0].signals == ("seq_idx",)


@pytest.mark.parametrize("version", ["5.5.4", "5.24.0"])
def test_a_missing_nested_config_gets_its_default_type(version: str) -> None:
    found = read(version, model_type="lfm2_vl")
    assert ("text_config", "lfm2") in [(part.path, part.model_type) for part in found.config.parts]
    assert {path.symbol for path in found.fast_paths} == {"causal_conv1d_fn", "causal_conv1d_update"}


def test_a_nested_type_that_is_not_known_is_unknown() -> None:
    found = read("5.24.0", model_type="llava", text_config={"model_type": "nothing_new"})
    assert found.unknowns == ("This transformers does not know the model_type 'nothing_new' of text_config.",)


def test_a_type_that_a_newer_release_has() -> None:
    with pytest.raises(InputError) as caught:
        read("4.57.6", model_type="qwen3_5")
    assert "5.2.0" in (caught.value.hint or "")
    with pytest.raises(InputError) as caught:
        read("5.24.0", model_type="qwen3_nxt")
    assert caught.value.hint == "the closest that it knows is qwen3_next"


def test_remote_code() -> None:
    auto_map = {"AutoModel": "modeling_x.X"}
    with pytest.raises(UndeterminedError, match=r"modeling_x\.X"):
        read("5.24.0", model_type="x_new", auto_map=auto_map)
    # transformers prefers its own class, and so does the answer
    assert read("5.24.0", model_type="mamba2", auto_map=auto_map).config.remote_code == ()


@pytest.mark.parametrize("model_type", ["inkling_vision", "inkling_audio", "qwen3_5_vision", "llama"])
def test_code_next_door_is_not_this_models(model_type: str) -> None:
    found = read("5.24.0", model_type=model_type)
    assert not found.fast_paths
    assert not found.unknowns


@pytest.mark.parametrize(
    ("version", "levels"),
    [
        ("5.16.1", [(None, "first call")]),
        ("5.17.0", [("warning_once", "first call")]),
        ("5.24.0", [("error", "packed call"), ("warning_once", "first call")]),
    ],
)
def test_notices_of_the_decorator(version: str, levels: list[tuple[str | None, str]]) -> None:
    found = path_of(read(version, model_type="qwen3_next"), "chunk_gated_delta_rule")
    assert [(notice.level, notice.when) for notice in found.notices] == levels
    for notice in found.notices:
        assert notice.level is None or "`flash-linear-attention`" in notice.text


def test_notices_and_gates_of_the_mamba_family() -> None:
    found = path_of(read("5.5.4", model_type="bamba"), "causal_conv1d_fn")
    assert [(notice.level, notice.when) for notice in found.notices] == [
        ("warning_once", "build"),
        ("error", "packed call"),
    ]
    gate = found.gate
    assert gate is not None
    assert (gate.decides, gate.needs_cuda_tensors, gate.blocked_by_compile, gate.module_global) == (
        True,
        True,
        True,
        True,
    )
    assert found.hub_first
    assert (found.availability_check, found.availability_needs_gpu) == ("is_causal_conv1d_available", True)
    assert found.fallback == "BambaMixer.torch_forward (PyTorch, same file)"


def test_a_gate_that_only_warns() -> None:
    found = path_of(read("5.5.4", model_type="qwen3_5_text"), "chunk_gated_delta_rule")
    assert found.gate is not None
    assert not found.gate.decides
    assert found.fallback == "torch_chunk_gated_delta_rule (PyTorch, same file)"


def test_a_helper_that_does_not_exist() -> None:
    found = read("5.5.4", model_type="falcon_mamba")
    scan = path_of(found, "selective_scan_fn")
    assert (scan.package, scan.availability_check) == ("mamba_ssm", "is_falcon_mamba_ssm_available")
    assert scan.availability_missing
    assert not path_of(found, "causal_conv1d_fn").availability_missing


@pytest.mark.parametrize(
    ("setting", "requirement", "off"), [(True, Requirement.HARD, ""), (False, None, "use_mamba_kernels=False")]
)
def test_a_setting_that_switches_kernels_off(setting: bool, requirement: Requirement | None, off: str) -> None:
    found = path_of(read("4.57.6", model_type="jamba", use_mamba_kernels=setting), "selective_scan_fn")
    assert found.disabled_by == off
    assert requirement is None or found.requirement is requirement


def test_kernels_that_a_configuration_chooses() -> None:
    assert path_of(read("5.24.0", model_type="mamba"), "pscan").disabled_by == "use_mambapy=False"
    native = path_of(read("5.24.0", model_type="xlstm"), "mLSTMBlock")
    assert native.disabled_by == "chunkwise_kernel=chunkwise--native_autograd"
    assert path_of(read("5.24.0", model_type="dinat"), "natten2dqkrpb").requirement is Requirement.HARD
    assert path_of(read("5.5.4", model_type="t5"), "FusedRMSNorm").optional
    assert any("compiles a CUDA extension" in text for text in read("4.57.6", model_type="rwkv").unknowns)


def test_a_kernel_that_is_wanted_but_never_called() -> None:
    found = path_of(read("5.5.4", model_type="jamba"), "mamba_inner_fn")
    assert found.gate is not None
    assert "mamba_inner_fn" in found.gate.members
    assert found.detail.startswith("Never called")
    assert path_of(read("5.24.0", model_type="jamba"), "mamba_inner_fn").phases == (Phase.TRAINING,)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_reader_says_what_a_single_call_says(version: str) -> None:
    reader = Reader(tree(version))
    assert len(reader.model_types()) > 500
    for model_type in ("mamba", "qwen3_next", "mamba"):
        config = parse_config({"model_type": model_type}, source="config.json")
        if model_type in reader.model_types():
            assert reader.declare(config) == declare(config, tree(version))


def test_a_missing_nested_configuration_gets_what_its_class_is_given() -> None:
    """The default text model of nemo_speechlm is no plain nemotron_h: 23 Mamba layers, not the one of its default."""
    found = read("5.24.0", model_type="nemo_speechlm")
    assert {path.layers for path in found.fast_paths} == {23}
    assert not found.unknowns
    given = read("5.24.0", model_type="nemo_speechlm", text_config={"model_type": "nemotron_h"})
    assert {path.layers for path in given.fast_paths} == {1}
