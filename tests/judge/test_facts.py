"""From the values of declare and observe to facts: what is known, what is known to be absent, what is unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.declare.values import (
    BindingKind,
    BindingSite,
    Declaration,
    FastPath,
    Intent,
    ModelConfig,
    Phase,
    Requirement,
    SubModel,
    TransformersTree,
)
from kernelguard.judge.rules import Facts
from kernelguard.observe.targets import target
from kernelguard.observe.values import Distribution, Environment, Gpu, GpuState

LIVE = Environment(
    origin="/env/bin/python",
    live=True,
    machine="x86_64",
    torch=Version("2.13.0+cu130"),
    torch_cuda=Version("13.0"),
    torch_is_cpu=False,
    triton=Version("3.7.1"),
    gpus=(Gpu(name="NVIDIA H100", capability=(9, 0)),),
    gpu_state=GpuState.USABLE,
    distributions={},
)


def installed(**versions: str) -> dict[str, Distribution]:
    names = {name.replace("_", "-"): version for name, version in versions.items()}
    return {n: Distribution(name=n, version=v, location="/site") for n, v in names.items()}


def path(symbol: str, **changes: Any) -> FastPath:
    made = FastPath(
        symbol=symbol,
        package="fla",
        distribution="flash-linear-attention",
        import_module="fla.ops",
        mechanism="decorator",
        requirement=Requirement.AUTOMATIC,
        phases=(Phase.TRAINING,),
        model_type="qwen3_5_text",
        file="models/qwen3_5/modeling_qwen3_5.py",
        line=1,
        binding=BindingSite(kind=BindingKind.CLOSURE, module="m", name=symbol),
        layers=2,
        fallback="torch",
    )
    return replace(made, **changes)


def declaration(*paths: FastPath, **raw: Any) -> Declaration:
    text = SubModel(path="text_config", model_type="qwen3_5_text", raw=raw)
    top = SubModel(path="", model_type="qwen3_5", raw={"text_config": raw})
    config = ModelConfig(source="c", model_type="qwen3_5", architectures=(), parts=(top, text), raw=top.raw)
    tree = TransformersTree(root=Path("/t"), version=Version("5.24.0"), origin="path")
    return Declaration(config=config, transformers=tree, fast_paths=paths)


def of(environment: Environment = LIVE, declared: Declaration | None = None, **intent: Any) -> Facts:
    return Facts.of(environment=environment, declaration=declared, intent=Intent(**intent))


def test_what_a_bare_target_leaves_open_is_unknown() -> None:
    facts = of(target("h100"), declaration())
    assert facts.gpus == ((9, 0),)
    assert not {"torch", "cuda", "triton", "ptxas", "driver", "glibc"} & facts.versions.keys()
    assert facts.distributions is None
    assert facts.variables is None
    assert facts.versions["transformers"] == Version("5.24.0")
    assert facts.flags["executed"] is False


def test_the_cpu_target_is_known_to_have_no_gpu_and_a_live_machine_without_one_is_not() -> None:
    assert of(target("cpu")).gpus == ()
    for state in GpuState:
        assert of(replace(LIVE, gpus=(), gpu_state=state)).gpus is None


def test_a_gpu_seen_working_is_a_fact_of_its_own() -> None:
    assert of().flags["gpu_seen_working"] is True
    assert of(replace(LIVE, live=False)).flags["gpu_seen_working"] is True  # captured on another machine
    assert of(replace(LIVE, gpu_state=GpuState.BROKEN)).flags["gpu_seen_working"] is False
    assert of(target("h100")).flags["gpu_seen_working"] is False  # a description proves nothing


def test_cpu_torch_has_no_cuda_and_an_unknown_build_has_an_unknown_one() -> None:
    assert of(replace(LIVE, torch_cuda=None, torch_is_cpu=True)).versions["cuda"] is None
    assert "cuda" not in of(replace(LIVE, torch_cuda=None, torch_is_cpu=None)).versions


def test_triton_that_is_not_installed_is_absent() -> None:
    without = replace(LIVE, triton=None)
    assert of(without).versions["triton"] is None
    named = replace(without, distributions=installed(pytorch_triton="3.5.0+git1"))
    assert of(named).versions["triton"] == Version("3.5.0+git1")
    unreadable = replace(without, distributions=installed(triton="N/A"))
    assert "triton" not in of(unreadable).versions
    assert "triton" not in of(replace(without, distributions=None)).versions


def test_no_torch_at_all() -> None:
    facts = of(replace(LIVE, torch=None, torch_cuda=None, torch_is_cpu=None))
    assert facts.versions["torch"] is None
    assert facts.versions["cuda"] is None
    hidden = replace(LIVE, torch=None, torch_cuda=None, torch_is_cpu=None, distributions=installed(torch="N/A"))
    assert "torch" not in of(hidden).versions


def test_nvcc_is_known_to_be_there_or_unknown() -> None:
    assert "nvcc" not in of().flags
    assert of(replace(LIVE, cuda_toolkit=Version("12.8"))).flags["nvcc"] is True


def test_symbols_are_those_that_this_run_uses() -> None:
    declared = declaration(
        path("used"),
        path("not_counted", layers=None),
        path("in_no_layer", layers=0),
        path("switched_off", disabled_by="use_mamba_kernels=False"),
        path("step", phases=(Phase.DECODING,)),
        path("hub", requirement=Requirement.OPT_IN),
        path("must", requirement=Requirement.HARD),
    )
    assert of(LIVE, declared).symbols == ("used", "not_counted", "must")
    assert of(LIVE, declared, phase=Phase.DECODING).symbols == ("step",)
    assert of(LIVE, declared, use_kernels=True).symbols == ("used", "not_counted", "hub", "must")
    assert of(LIVE, None).symbols is None


@pytest.mark.parametrize(
    ("raw", "grouped"),
    [
        ({"linear_num_key_heads": 16, "linear_num_value_heads": 48}, True),
        ({"linear_num_key_heads": 16, "linear_num_value_heads": 16}, False),
        ({"linear_num_key_heads": 16}, None),
        ({}, None),
    ],
)
def test_grouped_values(raw: dict[str, int], grouped: bool | None) -> None:
    assert of(LIVE, declaration(**raw)).flags.get("grouped_values") is grouped


@pytest.mark.parametrize(
    ("raw", "dims"),
    [
        ({"head_dim": 256}, ("256",)),
        ({"hidden_size": 512, "num_attention_heads": 4}, ("128",)),
        ({"hidden_size": 512, "num_attention_heads": 4, "qk_rope_head_dim": 64}, None),
        ({"hidden_size": 512, "num_attention_heads": 0}, None),
        ({"hidden_size": "wide", "num_attention_heads": 4}, None),
        ({}, None),
    ],
)
def test_head_dim(raw: dict[str, Any], dims: tuple[str, ...] | None) -> None:
    assert of(LIVE, declaration(**raw)).choices.get("head_dim") == dims


def test_words_of_the_model_and_the_run() -> None:
    facts = of(
        LIVE, declaration(quantization_config={"quant_method": "mxfp4"}), attn_implementation="flash_attention_2"
    )
    assert facts.choices["model_types"] == ("qwen3_5", "qwen3_5_text")
    assert facts.choices["quantization"] == ("mxfp4",)
    assert facts.choices["attention"] == ("flash_attention_2",)
    assert of().choices["attention"] == ()
    assert "quantization" not in of().choices


def test_whether_the_code_was_really_imported_can_be_said() -> None:
    made = Facts.of(environment=LIVE, declaration=None, intent=Intent(), executed=False, via={"causal-conv1d": "sdist"})
    assert made.flags["executed"] is False
    assert made.via == {"causal-conv1d": "sdist"}
    assert of().flags["executed"] is True
