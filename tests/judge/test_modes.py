"""Judging choices, on values alone: for each guard a case where only that one fact is wrong, and one that is normal."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.declare.modes import (
    AlwaysSlow,
    Attention,
    CacheSplit,
    CarriesState,
    Experts,
    FlashBoundary,
    HubLayer,
    HubLayers,
    HubLoad,
    HubOption,
    KernelsWindow,
    LigerSupport,
    ModeFact,
    Mxfp4,
    SampleMask,
)
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
from kernelguard.judge.attention import attention_module
from kernelguard.judge.modes import judge_modes
from kernelguard.judge.values import Finding, Status
from kernelguard.observe.values import Distribution, Environment, Gpu, ImportFact, ImportOutcome

WINDOW = KernelsWindow(minimum=Version("0.18.2"), maximum=Version("0.19.0"))
OPEN = KernelsWindow(minimum=Version("0.10.2"), maximum=None)
DECODING = Intent(phase=Phase.DECODING)


def declared(*facts: ModeFact, paths: tuple[FastPath, ...] = ()) -> Declaration:
    part = SubModel(path="", model_type="m", raw={})
    config = ModelConfig(source="test", model_type="m", architectures=(), parts=(part,), raw={})
    tree = TransformersTree(root=Path("/t"), version=Version("5.24.0"), origin="path")
    return Declaration(config=config, transformers=tree, fast_paths=paths, modes=facts)


def machine(*, gpus: tuple[tuple[int, int], ...] = ((9, 0),), **versions: str) -> Environment:
    """A machine whose distributions are exactly `versions` (underscores stand for dashes)."""
    found = {name.replace("_", "-"): version for name, version in versions.items()}
    return Environment(
        origin="test",
        live=True,
        torch=Version("2.13.0"),
        triton=Version("3.7.0"),
        gpus=tuple(Gpu(name="gpu", capability=capability) for capability in gpus),
        distributions={n: Distribution(name=n, version=v, location="/site") for n, v in found.items()},
    )


TARGET = Environment(origin="target", live=False)


def codes(fact: ModeFact, intent: Intent, environment: Environment, **rest: Any) -> dict[str, Status]:
    return {f.code: f.status for f in judge_modes(declared(fact, **rest), intent, environment)}


def reasons(fact: ModeFact, intent: Intent, environment: Environment) -> str:
    return " ".join(f"{f.reason} {f.fix}" for f in judge_modes(declared(fact), intent, environment))


# ---------------------------------------------------------------- hub layers


def layer(name: str, *options: HubOption, mapped: bool = True, package: str = "") -> HubLayer:
    return HubLayer(
        layer=name, name=name, model_type="m", file="f.py", line=1, mapped=mapped, options=options, package=package
    )


def option(**changes: Any) -> HubOption:
    return replace(HubOption(device="cuda", training=True, repository="org/norms"), **changes)


NORM = layer("RMSNorm", option())
ROTARY = layer("rotary_pos_emb", option(training=False, repository="org/rotary"))
SPARK = layer("Net", option(minimum_capability=(12, 1), maximum_capability=(12, 1)))
UNMAPPED = layer("ZeroCentered", mapped=False)
FUNCTION = layer("chunk", mapped=False, package="fla")
ASKED = Intent(use_kernels=True)


def hub(*layers: HubLayer, obeys_switch: bool = True) -> HubLayers:
    return HubLayers(layers=layers, window=WINDOW, obeys_switch=obeys_switch)


def test_a_norm_that_no_one_asked_for_is_normal() -> None:
    for environment in (machine(), machine(kernels="0.17.2"), machine(kernels="0.18.2"), TARGET):
        assert codes(hub(NORM, ROTARY, SPARK, UNMAPPED), Intent(), environment) == {}


@pytest.mark.parametrize(
    ("version", "expected"),
    [(None, True), ("0.18.1", True), ("0.18.2", False), ("0.18.9", False), ("0.19.0", True), ("local build", False)],
)
def test_kernels_outside_its_window(version: str | None, *, expected: bool) -> None:
    environment = machine(kernels=version) if version else machine()
    found = codes(hub(NORM), ASKED, environment)
    assert (found.get("kernels-unusable") is Status.FAIL) == expected
    if not expected:
        assert found == {"hub-layers-not-verified": Status.UNKNOWN}


def test_unknown_packages_are_not_called_absent() -> None:
    assert codes(hub(NORM), ASKED, TARGET) == {"hub-layers-not-verified": Status.UNKNOWN}


@pytest.mark.parametrize(
    ("variables", "obeys", "expected"),
    [
        ({"USE_HUB_KERNELS": "0"}, True, True),
        ({"USE_HUB_KERNELS": "off"}, True, True),
        ({"USE_HUB_KERNELS": "yes"}, True, False),
        ({"USE_HUB_KERNELS": "0"}, False, False),
        ({"DISABLE_KERNEL_MAPPING": "1"}, True, True),
        ({"DISABLE_KERNEL_MAPPING": "0"}, True, False),
    ],
)
def test_switches(variables: dict[str, str], *, obeys: bool, expected: bool) -> None:
    environment = replace(machine(kernels="0.18.2"), variables=variables)
    found = codes(hub(NORM, obeys_switch=obeys), ASKED, environment)
    assert (found.get("hub-switched-off") is Status.FAIL) == expected


def test_layers_without_an_entry_here() -> None:
    environment = machine(kernels="0.18.2")
    found = codes(hub(NORM, SPARK, UNMAPPED, ROTARY), ASKED, environment)
    assert found == {
        "hub-layers-partly": Status.WARN,
        "hub-layers-inference-only": Status.PASS,
        "hub-layers-not-verified": Status.UNKNOWN,
    }
    said = reasons(hub(NORM, SPARK, UNMAPPED, ROTARY), ASKED, environment)
    assert "Net: its kernel is for capability 12.1" in said
    assert "ZeroCentered: the hub mapping has no entry" in said
    # On that GPU it may be replaced; without a GPU that is open.
    for other in (machine(kernels="0.18.2", gpus=((12, 1),)), machine(kernels="0.18.2", gpus=())):
        assert "Net: its kernel" not in reasons(hub(NORM, SPARK), ASKED, other)


def test_nothing_is_replaced_at_all() -> None:
    environment = machine(kernels="0.18.2")
    assert codes(hub(ROTARY, UNMAPPED), ASKED, environment) == {"hub-layers-none": Status.FAIL}
    assert "hub-layers-none" not in codes(hub(ROTARY, UNMAPPED), replace(ASKED, phase=Phase.DECODING), environment)


def test_a_function_with_a_package_loses_nothing() -> None:
    assert "hub-layers-partly" not in codes(hub(NORM, FUNCTION), ASKED, machine(kernels="0.18.2"))


def test_rocm_has_entries_of_its_own() -> None:
    environment = replace(machine(kernels="0.18.2"), torch=Version("2.13.0+rocm7.2"))
    assert codes(hub(NORM), ASKED, environment) == {"hub-layers-none": Status.FAIL}


# ---------------------------------------------------------------- hub loads

LOAD = HubLoad(
    repository="org/rwkv",
    name="rwkv_cuda_kernel",
    model_type="rwkv",
    file="models/rwkv/modeling_rwkv.py",
    line=52,
    window=WINDOW,
    needs_ninja=True,
    level="info",
    in_training=True,
    effect="PyTorch code runs",
)


def test_hub_loads() -> None:
    assert codes(LOAD, Intent(), machine(kernels="0.18.2")) == {"hub-kernel-not-tried": Status.FAIL}
    assert codes(LOAD, Intent(), machine(kernels="0.17.2", ninja="1.11")) == {"hub-kernel-lost": Status.FAIL}
    assert codes(LOAD, Intent(), machine(ninja="1.11")) == {"hub-kernel-lost": Status.FAIL}
    assert codes(LOAD, Intent(), machine(kernels="0.18.2", ninja="1.11")) == {"hub-kernel-not-verified": Status.UNKNOWN}
    assert codes(LOAD, Intent(), TARGET) == {"hub-kernel-not-verified": Status.UNKNOWN}
    assert codes(replace(LOAD, needs_ninja=False), Intent(), machine(kernels="0.18.2")) == {
        "hub-kernel-not-verified": Status.UNKNOWN
    }
    assert codes(replace(LOAD, in_training=False), Intent(), machine()) == {}


# ---------------------------------------------------------------- attention

ATTENTION = Attention(
    path="",
    model_type="m",
    model_class="MForCausalLM",
    file="f.py",
    line=3,
    sdpa=True,
    flash=True,
    flex=True,
    compatible=(),
    own=("MAttention",),
    configured=None,
    surely_built=True,
    window=WINDOW,
    hub_flash=(("flash_attention_2", "org/flash-attn2"),),
)
FLASH = Intent(attn_implementation="flash_attention_2")


def test_packed_samples_need_a_mask_that_was_told_of_them() -> None:
    mask = SampleMask(path="", model_type="m", file="f.py", line=3)
    packed = Intent(packed=True, signals=("position_ids",))
    leak = {"attention-boundary-never-passed": Status.FAIL}
    assert codes(mask, packed, machine()) == leak
    assert codes(mask, replace(packed, attn_implementation="flex_attention"), machine()) == leak
    own = replace(mask, is_library_mask=False)
    assert codes(own, packed, machine()) == {"attention-mask-not-read": Status.UNKNOWN}
    assert codes(mask, Intent(), machine()) == {}
    assert codes(mask, replace(packed, phase=Phase.DECODING), machine()) == {}
    # Flash attention makes no such mask; whether the request comes from the run or from the configuration.
    assert codes(mask, replace(packed, attn_implementation="kernels-community/vllm-flash-attn3"), machine()) == {}
    configured = declared(mask, replace(ATTENTION, configured="flash_attention_2"))
    found = {f.code for f in judge_modes(configured, packed, machine(flash_attn="2.8.3"))}
    assert "attention-boundary-never-passed" not in found


def test_flash_attention_does_not_learn_from_positions_that_a_layer_keeps() -> None:
    kept = FlashBoundary(path="", model_type="m", attention="MAttention", file="f.py", line=3, hands_on=True)
    leak = {"attention-boundary-never-passed": Status.FAIL}
    run = Intent(packed=True, signals=("position_ids",), attn_implementation="org/flash-kernel")

    def found(fact: FlashBoundary, intent: Intent) -> dict[str, Status]:
        every = codes(fact, intent, machine())
        return {code: status for code, status in every.items() if code in {*leak, "packing-unknown"}}

    assert found(kept, run) == leak
    assert "send cu_seq_lens_q" in reasons(kept, run, machine())
    told = replace(run, signals=("position_ids", "cu_seq_lens_q"))
    # GraniteMoE in 4.57 hands on what it does not name, and never gets them.
    assert found(kept, told) == {"packing-unknown": Status.UNKNOWN}
    assert found(replace(kept, hands_on=False), told) == leak
    for other in (replace(run, attn_implementation=None), replace(run, packed=False), replace(run, signals=None)):
        assert found(kept, other) == {}
    configured = declared(kept, replace(ATTENTION, configured="flash_attention_2"))
    by_itself = {f.code for f in judge_modes(configured, replace(run, attn_implementation=None), machine())}
    assert "attention-boundary-never-passed" in by_itself


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"sdpa": False}, {"attention-eager": Status.WARN}),
        ({"sdpa": False, "own": ()}, {}),
        ({"sdpa": None}, {"attention-flag-unread": Status.UNKNOWN}),
        ({"sdpa": False, "configured": "eager"}, {}),
    ],
)
def test_attention_by_default(changes: dict[str, Any], expected: dict[str, Status]) -> None:
    assert codes(replace(ATTENTION, **changes), Intent(), machine()) == expected


def test_the_fix_names_what_the_class_does_support() -> None:
    slow = replace(ATTENTION, sdpa=False, compatible=("org/flash3",))
    assert "attn_implementation=org/flash3" in reasons(slow, Intent(), machine())
    assert "supports no other" in reasons(replace(slow, compatible=(), flash=False, flex=False), Intent(), machine())


@pytest.mark.parametrize(
    ("asked", "changes", "expected"),
    [
        ("eager", {"sdpa": False}, {}),
        ("sdpa", {}, {}),
        ("sdpa", {"sdpa": False}, {"attention-unsupported": Status.FAIL}),
        ("sdpa", {"sdpa": False, "own": ()}, {"attention-unsupported": Status.FAIL}),
        ("sdpa", {"sdpa": False, "surely_built": False}, {"attention-flag-unread": Status.UNKNOWN}),
        ("flex_attention", {}, {}),
        ("flex_attention", {"flex": False}, {"attention-unsupported": Status.FAIL}),
        ("flash_attention_2", {"flash": False}, {"attention-unsupported": Status.FAIL}),
        ("flash_attention_2", {}, {"attention-not-installed": Status.FAIL}),
        ("org/kernel", {}, {"attention-hub-unusable": Status.FAIL}),
        ("org/flash-kernel", {"flash": False}, {"attention-unsupported": Status.FAIL}),
        ("something", {}, {"attention-not-known": Status.UNKNOWN}),
        ("varlen", {}, {}),
        ("varlen", {"sdpa": False}, {"attention-unsupported": Status.FAIL}),
        (
            "flash_attention_2",
            {"compatible": ("org/flash3", "flash_attention_4")},
            {"attention-changed": Status.WARN, "attention-hub-unusable": Status.FAIL},
        ),
        ("flash_attention_4", {"compatible": ("flash_attention_4",)}, {"attention-not-installed": Status.FAIL}),
    ],
)
def test_attention_on_request(asked: str, changes: dict[str, Any], expected: dict[str, Status]) -> None:
    fact = replace(ATTENTION, **changes)
    assert codes(fact, Intent(attn_implementation=asked), machine()) == expected
    # The configuration can ask as well.
    assert codes(replace(fact, configured=asked), Intent(), machine()) == expected


def test_torchs_own_varlen_attention_needs_a_torch_that_has_it() -> None:
    asked = Intent(attn_implementation="varlen")
    assert codes(ATTENTION, asked, replace(machine(), torch=Version("2.10.0"))) == {}
    old = replace(machine(), torch=Version("2.9.1"))
    assert codes(ATTENTION, asked, old) == {"attention-unsupported": Status.FAIL}
    assert "pip install 'torch>=2.10'" in reasons(ATTENTION, asked, old)


def test_flash_attention_by_what_is_installed() -> None:
    assert codes(ATTENTION, FLASH, TARGET) == {"attention-not-verified": Status.UNKNOWN}
    assert codes(ATTENTION, FLASH, machine(kernels="0.18.2")) == {"attention-from-hub": Status.UNKNOWN}
    listed = machine(flash_attn="2.8.3")
    assert codes(ATTENTION, FLASH, listed) == {"attention-not-imported": Status.UNKNOWN}
    good = ImportFact(module="flash_attn", outcome=ImportOutcome.OK)
    bad = replace(good, outcome=ImportOutcome.RAISED, error_type="ImportError", error="undefined symbol: _ZN3c10")
    assert attention_module(FLASH) == "flash_attn"
    assert attention_module(Intent()) is None
    assert judge_modes(declared(ATTENTION), FLASH, listed, (good,)) == ()
    broken = judge_modes(declared(ATTENTION), FLASH, listed, (bad,))
    assert [f.code for f in broken] == ["attention-broken"]
    assert "undefined symbol: _ZN3c10" in broken[0].reason


def test_every_part_is_judged_and_the_package_only_once() -> None:
    vision = replace(ATTENTION, path="vision_config", model_class="MVision", flash=False)
    audio = replace(ATTENTION, path="audio_config", model_class="MAudio")
    found = judge_modes(declared(ATTENTION, vision, audio), FLASH, machine())
    assert [(f.code, "vision_config" in f.reason) for f in found] == [
        ("attention-not-installed", False),
        ("attention-unsupported", True),
    ]
    # What the top configuration asks for is handed on to the nested ones.
    top = replace(ATTENTION, configured="flex_attention")
    nested = replace(vision, flex=False)
    assert [f.code for f in judge_modes(declared(top, nested), Intent(), machine())] == ["attention-unsupported"]


# ---------------------------------------------------------------- experts

EXPERTS = Experts(
    model_type="m",
    experts_class="MExperts",
    file="f.py",
    line=9,
    selectable=True,
    decorated=True,
    checks_capability=True,
    configured=None,
)
OLD_TORCH = replace(machine(), torch=Version("2.8.0+cu128"))
OWN = {"selectable": False, "decorated": False}


@pytest.mark.parametrize(
    ("changes", "intent", "environment", "expected"),
    [
        ({}, Intent(), machine(), {}),
        ({}, Intent(), TARGET, {}),
        ({}, Intent(), machine(gpus=()), {}),
        ({}, Intent(), machine(gpus=((8, 0),)), {}),
        ({}, Intent(), machine(gpus=((7, 5),)), {"grouped-mm-fallback": Status.FAIL}),
        ({}, Intent(), machine(gpus=((9, 0), (7, 5))), {"grouped-mm-fallback": Status.FAIL}),
        ({}, Intent(), OLD_TORCH, {}),
        (
            {},
            Intent(),
            replace(OLD_TORCH, gpus=(Gpu(name="A100", capability=(8, 0)),)),
            {"grouped-mm-fallback": Status.FAIL},
        ),
        ({}, Intent(compile=True), machine(), {}),
        ({}, Intent(dtype="float32"), machine(), {}),
        ({}, Intent(compile=True, dtype="float32"), machine(), {"grouped-mm-fallback": Status.FAIL}),
        ({}, Intent(experts_implementation="eager"), machine(gpus=((7, 5),)), {}),
        ({}, Intent(experts_implementation="batched_mm"), machine(gpus=((7, 5),)), {}),
        ({}, Intent(experts_implementation="deepgemm"), machine(), {"experts-not-verified": Status.UNKNOWN}),
        ({"configured": "sonicmoe"}, Intent(), machine(), {"experts-not-verified": Status.UNKNOWN}),
        (OWN, Intent(), machine(), {"experts-eager": Status.WARN}),
        (OWN, Intent(experts_implementation="eager"), machine(), {}),
        (OWN, Intent(experts_implementation="grouped_mm"), machine(), {"experts-unsupported": Status.FAIL}),
        ({"decorated": False}, Intent(), machine(gpus=((7, 5),)), {}),
    ],
)
def test_experts(
    changes: dict[str, Any], intent: Intent, environment: Environment, expected: dict[str, Status]
) -> None:
    assert codes(replace(EXPERTS, **changes), intent, environment) == expected


def test_where_the_capability_is_not_asked_torch_raises() -> None:
    said = reasons(replace(EXPERTS, checks_capability=False), Intent(), machine(gpus=((7, 5),)))
    assert "raises in the first step" in said
    assert "without a word" in reasons(EXPERTS, Intent(), machine(gpus=((7, 5),)))


# ---------------------------------------------------------------- mxfp4

MXFP4 = Mxfp4(
    path="",
    model_type="gpt_oss",
    dequantize=False,
    minimum_capability=(7, 5),
    minimum_triton=Version("3.4.0"),
    window=WINDOW,
)
GOOD = machine(kernels="0.18.2", triton="3.7.0")


@pytest.mark.parametrize(
    ("intent", "environment", "word"),
    [
        (DECODING, GOOD, ""),
        (DECODING, TARGET, ""),
        (DECODING, machine(triton="3.7.0"), "kernels package is not installed"),
        (DECODING, machine(triton="3.7.0", kernels="0.17.2"), "kernels 0.17.2 is outside"),
        (DECODING, replace(GOOD, triton=Version("3.3.1")), "triton 3.3.1"),
        (DECODING, replace(machine(kernels="0.18.2"), triton=None), "triton is not installed"),
        (DECODING, machine(kernels="0.18.2", triton="3.7.0", gpus=((7, 0),)), "capability 7.0"),
        (replace(DECODING, use_kernels=True), GOOD, "use_kernels=True"),
        (Intent(), GOOD, "cannot be trained"),
    ],
)
def test_mxfp4(intent: Intent, environment: Environment, word: str) -> None:
    found = judge_modes(declared(MXFP4), intent, environment)
    assert [f.status for f in found] == ([Status.WARN] if word else [])
    assert all(word in f.reason for f in found)
    assert judge_modes(declared(replace(MXFP4, dequantize=True)), intent, environment) == ()


# ---------------------------------------------------------------- liger

LIGER = LigerSupport(
    model_type="qwen3_5",
    releases=tuple((Version(v), known) for v, known in (("0.6.0", False), ("0.6.4", False), ("0.8.0", True))),
    minimum=Version("0.3.0"),
)
NEVER = replace(LIGER, model_type="kimi", releases=tuple((v, False) for v, _ in LIGER.releases))


@pytest.mark.parametrize(
    ("fact", "version", "expected"),
    [
        (LIGER, "0.8.0", {}),
        (LIGER, "0.9.0", {}),
        (LIGER, "0.6.2", {"liger-unsupported": Status.FAIL}),
        (LIGER, "0.6.4", {"liger-unsupported": Status.FAIL}),
        (LIGER, "0.7.0", {"liger-unknown": Status.UNKNOWN}),
        (LIGER, "0.2.0", {"liger-not-installed": Status.FAIL}),
        (LIGER, None, {"liger-not-installed": Status.FAIL}),
        (LIGER, "built by hand", {"liger-unknown": Status.UNKNOWN}),
        (NEVER, "0.8.0", {"liger-unsupported": Status.FAIL}),
        (NEVER, "0.9.0", {"liger-unknown": Status.UNKNOWN}),
    ],
)
def test_liger(fact: LigerSupport, version: str | None, expected: dict[str, Status]) -> None:
    environment = machine(liger_kernel=version) if version else machine()
    assert codes(fact, Intent(liger=True), environment) == expected
    assert codes(fact, Intent(), environment) == {}


def test_liger_on_a_target() -> None:
    """Which release a target will have is the resolver's to say; only a type that none knows is worth a word."""
    assert codes(LIGER, Intent(liger=True), TARGET) == {}
    assert codes(NEVER, Intent(liger=True), TARGET) == {"liger-unknown": Status.UNKNOWN}
    assert "liger-kernel>=0.8.0" in reasons(LIGER, Intent(liger=True), machine(liger_kernel="0.6.4"))


# ---------------------------------------------------------------- the rest

SPLIT = CacheSplit(symbol="fused", model_type="mamba2", owner="Mixer", file="f.py", line=4)


def path(layers: int | None) -> FastPath:
    return FastPath(
        symbol="fused",
        package="mamba_ssm",
        distribution="mamba-ssm",
        import_module="mamba_ssm",
        mechanism="decorator",
        requirement=Requirement.AUTOMATIC,
        phases=(Phase.TRAINING,),
        model_type="mamba2",
        file="f.py",
        line=1,
        binding=BindingSite(kind=BindingKind.CLOSURE, module="m", name="fused"),
        layers=layers,
        fallback="steps",
    )


def test_a_cache_in_training_costs_the_fused_kernel() -> None:
    caching = Intent(use_cache=True)
    assert codes(SPLIT, caching, machine(), paths=(path(2),)) == {"cache-skips-kernel": Status.FAIL}
    assert codes(SPLIT, caching, machine(), paths=(path(0),)) == {}
    assert codes(SPLIT, Intent(), machine(), paths=(path(2),)) == {}
    assert codes(SPLIT, replace(caching, phase=Phase.DECODING), machine(), paths=(path(2),)) == {}


def test_state_that_no_boundary_reaches_is_a_no_for_packed_training_alone() -> None:
    carries = CarriesState(model_type="m", what="Loop: a state", source="read in 5.24.0")
    packed = Intent(packed=True, signals=("position_ids", "seq_idx"))
    assert codes(carries, packed, machine()) == {"packing-unsupported": Status.FAIL}
    assert codes(carries, Intent(), machine()) == {}
    assert codes(carries, replace(packed, phase=Phase.DECODING), machine()) == {}


def test_always_slow_is_a_remark() -> None:
    slow = AlwaysSlow(model_type="m", what="Loop: a loop", source="read in 5.24.0")
    found: tuple[Finding, ...] = judge_modes(declared(slow), Intent(), machine())
    assert [(f.code, f.status, f.evidence) for f in found] == [("always-slow", Status.WARN, ("read in 5.24.0",))]


def test_a_window_without_an_end() -> None:
    fact = replace(hub(NORM), window=OPEN)
    assert "kernels-unusable" not in codes(fact, ASKED, machine(kernels="0.99"))
    assert codes(fact, ASKED, machine(kernels="0.9.0"))["kernels-unusable"] is Status.FAIL


def test_a_wrong_gradient_is_a_fail_only_where_it_trains() -> None:
    wrong = option(repository="org/rotary", wrong_gradient="it is the identity")
    environment = machine(kernels="0.18.2")
    assert codes(hub(NORM, layer("rotary", wrong)), ASKED, environment)["hub-wrong-gradient"] is Status.FAIL
    for fine in (
        (hub(NORM, layer("rotary", wrong)), replace(ASKED, phase=Phase.DECODING), environment),
        (hub(NORM, layer("rotary", replace(wrong, training=False))), ASKED, environment),
        (hub(NORM, layer("rotary", replace(wrong, device="xpu"))), ASKED, environment),
        (hub(NORM, layer("rotary", replace(wrong, minimum_capability=(12, 1)))), ASKED, environment),
        (hub(NORM, layer("rotary", wrong)), Intent(), environment),
    ):
        assert "hub-wrong-gradient" not in codes(*fine)


def test_a_mapping_that_was_not_read_concerns_only_those_who_ask() -> None:
    fact = replace(hub(UNMAPPED), unread=("the table has another shape",))
    environment = machine(kernels="0.18.2")
    assert codes(fact, Intent(), environment) == {}
    assert codes(fact, ASKED, environment) == {"hub-mapping-unread": Status.UNKNOWN}
