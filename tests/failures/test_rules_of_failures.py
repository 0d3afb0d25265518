"""Public failures that are a question of rules alone, each under its id in the catalogue of failures."""

from __future__ import annotations

from datetime import date
from typing import Any

import pytest

from kernelguard.declare.values import Intent
from kernelguard.judge.bounds import Truth
from kernelguard.judge.rules import Facts, apply_rules, evaluate
from kernelguard.judge.values import Status
from kernelguard.observe.targets import target
from rule_facts import RULES, UNKNOWN, facts

ALL = tuple(RULES.values())
GDN, CONV = "chunk_gated_delta_rule", "causal_conv1d_fn"
QWEN = (CONV, GDN)
TRAINED_ON = {"symbols": QWEN, "grouped_values": True}


def codes(status: Status | None = None, **changes: Any) -> set[str]:
    """The codes of the rules that apply to a machine."""
    return {f.code for f in apply_rules(ALL, facts(**changes))[0] if status in {None, f.status}}


def fixes(**changes: Any) -> str:
    return "\n".join(f.fix for f in apply_rules(ALL, facts(**changes))[0])


def test_a_good_machine_has_no_finding_at_all() -> None:
    pkgs = {"fla-core": "0.6.0", "flash-linear-attention": "0.6.0", "causal-conv1d": "1.7.0", "tilelang": "0.1.12"}
    for gpu in ("8.0", "8.9", "9.0", "10.0", "12.0"):
        for triton in ("3.8.0", "3.9.0"):
            for packed in (False, True):
                assert codes(**TRAINED_ON, pkgs=pkgs, gpu=gpu, triton=triton, packed=packed) == set()


def test_h12_fla_core_alone_is_enough() -> None:
    assert codes(**TRAINED_ON, pkgs={"fla-core": "0.6.0", "causal-conv1d": "1.7.0"}, gpu="9.0") == set()


# ---------------------------------------------------------------- c: wrong or failing at run time


@pytest.mark.parametrize("triton", ["3.4.0", "3.5.0", "3.7.0"])
@pytest.mark.parametrize("fla", ["0.4.1", "0.6.0"])
def test_c01_hopper_with_triton_34_to_370_fails(triton: str, fla: str) -> None:
    machine = {**TRAINED_ON, "grouped_values": False, "gpu": "9.0", "triton": triton, "pkgs": {"fla-core": fla}}
    found = codes(Status.FAIL, **machine)
    assert found == {"fla-hopper-dqkwg" if fla == "0.4.1" else "fla-hopper-dqkwg-raise2"}
    assert "'triton>=3.7.1'" in fixes(**machine)
    assert "'torch>=2.12.1'" in fixes(**machine)  # torch pins triton, so one alone cannot be installed


_ELSEWHERE = [{"gpu": "10.0"}, {"gpu": "8.0"}, {"triton": "3.7.1"}, {"triton": "3.3.1"}, {"phase": "decoding"}]


@pytest.mark.parametrize("change", [*_ELSEWHERE, {"symbols": CONV}], ids=str)
def test_c01_not_elsewhere(change: dict[str, Any]) -> None:
    machine = {**TRAINED_ON, "gpu": "9.0", "triton": "3.5.0", "pkgs": {"fla-core": "0.4.1"}, **change}
    assert not {code for code in codes(**machine) if code.startswith("fla-hopper-dqkwg")}


def test_c02_tilelang_does_not_help_where_its_kernel_refuses() -> None:
    pkgs = {"fla-core": "0.5.1", "tilelang": "0.1.12"}
    grouped = codes(symbols=GDN, grouped_values=True, gpu="9.0", triton="3.7.1", pkgs=pkgs)
    assert grouped == {"fla-hopper-dqkwg-raise"}
    assert codes(symbols=GDN, grouped_values=False, gpu="9.0", triton="3.7.1", pkgs=pkgs) == set()
    assert codes(symbols=GDN, grouped_values=True, transformers="5.22.0", gpu="9.0", pkgs=pkgs) == set()


def test_c02_whether_an_nvcc_is_there_decides_about_tilelang() -> None:
    machine = {"symbols": GDN, "gpu": "9.0", "triton": "3.6.0", "pkgs": {"fla-core": "0.6.0", "tilelang": "0.1.12"}}
    rule = RULES["fla-hopper-dqkwg-raise2"]
    assert evaluate(rule, facts(**machine, nvcc=True)).outcome is Truth.FALSE
    assert evaluate(rule, facts(**machine, nvcc=UNKNOWN)).unknown_facts == ("nvcc",)


@pytest.mark.parametrize(("gpu", "fla"), [("10.0", "0.5.0"), ("10.3", "0.5.1")])
def test_c04_blackwell_with_triton_370_fails(gpu: str, fla: str) -> None:
    machine = {**TRAINED_ON, "gpu": gpu, "triton": "3.7.0", "cuda": "13.0", "pkgs": {"fla-core": fla}}
    assert "fla-blackwell-fwdh-race" in codes(Status.FAIL, **machine)
    assert "fla-blackwell-913" in codes(Status.WARN, **machine)


def test_c05_b200_with_an_old_fla_aborts() -> None:
    machine = {"symbols": GDN, "gpu": "10.0", "triton": "3.4.0"}
    assert "fla-blackwell-hoist-tmem" in codes(Status.FAIL, **machine, pkgs={"fla-core": "0.4.0"})
    assert "fla-blackwell-hoist-tmem" not in codes(**machine, pkgs={"fla-core": "0.4.1"})


def test_c06_b300_with_a_source_build_for_cuda_13_fails_and_the_wheel_for_cuda_12_does_not() -> None:
    b300 = {"symbols": CONV, "gpu": "10.3", "pkgs": {"causal-conv1d": "1.6.1"}}
    assert "cc1d-sm103-cubin" in codes(Status.FAIL, **b300, cuda="13.0", via={"causal-conv1d": "source"})
    assert codes(**b300, cuda="12.9", via={"causal-conv1d": "release-wheel"}) == set()
    assert codes(**b300, cuda="13.0") == {"cc1d-cu13-wheel-sm103"}  # installed somehow: suspected, not certain


@pytest.mark.parametrize("gpu", ["7.0", "6.0"])
def test_c08_a_gpu_below_what_torch_was_built_for(gpu: str) -> None:
    assert codes(Status.FAIL, cuda="13.0", gpu=gpu) == {"torch-cuda13-old-gpu"}
    assert codes(cuda="12.6", gpu=gpu) == set()


def test_c09_flash_attn_on_gb10_can_only_be_warned_about() -> None:
    machine = {"attention": "flash_attention_2", "gpu": "12.1", "pkgs": {"flash-attn": "2.8.3"}}
    assert codes(**machine) == codes(Status.WARN, **machine) == {"fa2-sm121"}


def test_c10_triton_on_gb10() -> None:
    assert codes(Status.FAIL, symbols=GDN, gpu="12.1", ptxas="12.8") == {"triton-sm121a"}
    assert codes(symbols=GDN, gpu="12.1", ptxas="13.0") == set()
    assert codes(symbols=(), gpu="12.1", ptxas="12.8") == set()


def test_c12_packed_mamba2_with_the_stride_fix() -> None:
    machine = {"symbols": "mamba_split_conv1d_scan_combined", "pkgs": {"mamba-ssm": "2.2.6.post3"}}
    assert codes(**machine, packed=True) == {"mamba-seq-idx-layout"}
    assert codes(**machine, packed=False) == set()


def test_c14_head_dim_backward_limit_is_one_of_version_gpu_and_direction() -> None:
    machine = {"attention": "flash_attention_2", "head_dim": ("256",), "gpu": "8.6", "pkgs": {"flash-attn": "2.5.2"}}
    assert codes(**machine) == {"fa2-head-dim-backward"}
    assert codes(**{**machine, "phase": "decoding"}) == set()
    assert codes(**{**machine, "gpu": "8.0"}) == set()
    assert codes(**{**machine, "pkgs": {"flash-attn": "2.8.3"}}) == set()


def test_c16_triton_320_warns_on_hopper_only() -> None:
    machine = {"symbols": GDN, "triton": "3.2.0", "pkgs": {"fla-core": "0.3.2"}, "transformers": "5.17.0"}
    assert codes(**machine, gpu="9.0") == codes(Status.WARN, **machine, gpu="9.0") == {"triton-320-hopper-abort"}
    assert codes(**machine, gpu="8.0") == set()


@pytest.mark.parametrize("version", ["2.0.4", "2.1.0", "2.2.2"])
def test_c17_mamba_backward_overrun(version: str) -> None:
    machine = {"symbols": "mamba_split_conv1d_scan_combined", "pkgs": {"mamba-ssm": version}}
    assert codes(Status.FAIL, **machine) == {"mamba-chunk-scan-overrun"}
    assert codes(symbols="mamba_split_conv1d_scan_combined", pkgs={"mamba-ssm": "2.2.4"}) == set()


def test_c18_mamba_220() -> None:
    for version, known_bad in (("2.1.0", False), ("2.2.0", True), ("2.2.1", False)):
        found = codes(symbols="mamba_chunk_scan_combined", pkgs={"mamba-ssm": version})
        assert ("mamba-220-gradients" in found) is known_bad


def test_c20_falcon_mamba_with_a_plain_kernel() -> None:
    machine = {"model_types": ("falcon_mamba",), "symbols": "mamba_inner_fn"}
    assert codes(Status.FAIL, **machine, pkgs={"mamba-ssm": "2.2.2"}) == {"falcon-mamba-plain-inner"}
    assert codes(**{**machine, "model_types": ("mamba",)}, pkgs={"mamba-ssm": "2.2.2"}) == set()
    assert codes(**machine, pkgs={"mamba-ssm": "2.2.4"}) == set()


def test_c21_turing_with_flash_attention_2() -> None:
    machine = {"attention": "flash_attention_2", "gpu": "7.5", "pkgs": {"flash-attn": "2.7.4.post1"}}
    assert codes(Status.FAIL, **machine) == {"fa2-pre-ampere"}
    assert codes(**{**machine, "attention": "sdpa"}) == set()


def test_c22_liger_and_the_partial_rotary_embedding() -> None:
    pkgs = {"liger-kernel": "0.7.0"}
    assert codes(Status.WARN, liger=True, pkgs=pkgs) == {"liger-qwen35-rope"}
    assert codes(liger=False, pkgs=pkgs) == set()
    assert codes(liger=True, pkgs={"liger-kernel": "0.8.0"}) == set()


# ---------------------------------------------------------------- b: builds that do not fit


def test_b06_old_glibc_is_only_certain_for_the_official_wheel() -> None:
    machine = {"glibc": "2.31", "pkgs": {"flash-attn": "2.8.2"}}
    assert codes(**machine, via={"flash-attn": "release-wheel"}) == {"glibc-232"}
    assert codes(**machine, via={"flash-attn": "source"}) == set()
    assert evaluate(RULES["glibc-232"], facts(**machine)).unknown_facts == ("how flash-attn is installed",)


def test_b08_flash_attn_sdist_on_cuda_13() -> None:
    machine = {"cuda": "13.0", "via": {"flash-attn": "sdist"}}
    assert codes(**machine, pkgs={"flash-attn": "2.8.3"}) == {"fa-cu13-guess"}
    assert codes(**machine, pkgs={"flash-attn": "2.8.3.post1"}) == set()


def test_b18_a_vendor_torch_crashes_nothing_and_is_placed_by_its_order() -> None:
    machine = {"symbols": GDN, "torch": "2.5.0a0+nv24.10", "pkgs": {"fla-core": "0.6.0"}, "cuda": "12.6"}
    assert codes(**machine) == {"fla-old-torch"}
    assert codes(**{**machine, "torch": "2.10.0a0+nv25.11"}) == set()


@pytest.mark.parametrize(
    ("mamba", "conv", "fits"),
    [
        ("1.2.0.post1", "1.1.1", True),
        ("1.2.2", "1.5.2", False),
        ("2.2.4", "1.5.1", False),
        ("2.2.4", "1.5.0.post8", True),
        ("2.3.1", "1.6.1", True),
        ("2.3.1", "1.4.0", False),
    ],
)
def test_b24_b26_pairs_of_mamba_ssm_and_causal_conv1d(mamba: str, conv: str, fits: bool) -> None:
    found = codes(Status.FAIL, symbols="mamba_inner_fn", pkgs={"mamba-ssm": mamba, "causal-conv1d": conv})
    assert (found == set()) is fits


# ---------------------------------------------------------------- d, f, h


@pytest.mark.parametrize(("version", "leaks"), [("5.2.0", True), ("5.8.1", True), ("5.9.0", False), ("5.17.0", False)])
def test_d02_packing_before_59(version: str, leaks: bool) -> None:
    pkgs = {"fla-core": "0.6.0", "causal-conv1d": "1.7.0"}
    assert ("transformers-gdn-packing" in codes(symbols=QWEN, pkgs=pkgs, transformers=version, packed=True)) is leaks
    assert "transformers-gdn-packing" not in codes(symbols=QWEN, pkgs=pkgs, transformers=version, packed=False)


@pytest.mark.parametrize(("driver", "refused"), [("570.86.15", True), ("580.65.06", False)])
def test_f02_cuda_13_on_an_old_driver(driver: str, refused: bool) -> None:
    found = codes(Status.FAIL, cuda="13.0", driver=driver)
    assert found == ({"cuda13-driver"} if refused else set())
    assert codes(cuda="12.8", driver=driver) == set()


def test_f02_a_gpu_that_was_seen_working_needs_no_driver_rule() -> None:
    assert codes(cuda="13.0", driver="570.86.15", gpu_seen_working=True) == set()


def test_a01_h10_a_target_with_516_ignores_fla_and_a_live_one_is_judged_by_its_binding() -> None:
    assert codes(symbols=GDN, transformers="5.16.1", executed=False) == {"transformers-nested-fla"}
    assert codes(symbols=GDN, transformers="5.16.1", executed=True) == set()
    assert "fla" not in fixes(symbols=GDN, transformers="5.16.1", executed=False)  # installing fla is no help


def test_h03_two_distributions_own_flash_attn() -> None:
    machine = {"attention": "flash_attention_2", "pkgs": {"flash-attn": "2.8.3", "sgl-kernel": "0.3.0"}}
    assert codes(**machine) == codes(Status.WARN, **machine) == {"fa-two-owners"}


def test_h08_a_version_that_is_none_does_not_crash() -> None:
    machine = {"symbols": GDN, "gpu": "9.0", "triton": "3.5.0", "pkgs": {"flash-linear-attention": "N/A"}}
    findings, still_open = apply_rules(ALL, facts(**machine))
    assert not [f for f in findings if f.status is Status.FAIL]
    assert "fla-hopper-dqkwg" in {rule.rule_id for rule in still_open}


def test_h14_no_visible_gpu_is_no_denial() -> None:
    machine = {**TRAINED_ON, "grouped_values": False, "gpu": UNKNOWN, "triton": "3.5.0", "pkgs": {"fla-core": "0.4.1"}}
    findings, still_open = apply_rules(ALL, facts(**machine))
    assert findings == ()
    assert "fla-hopper-dqkwg" in {rule.rule_id for rule in still_open}


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.id)
def test_h15_no_denial_outlives_the_latest_releases_for_ever(rule: Any) -> None:
    """With every version far in the future and years gone by, nothing may fail any more."""
    far = "9999.0"
    names = "fla-core flash-linear-attention causal-conv1d mamba-ssm flash-attn kernels tilelang apache-tvm-ffi"
    pkgs = dict.fromkeys([*names.split(), "liger-kernel", "sgl-kernel", "kernelguard"], far)
    tools = dict.fromkeys(("torch", "cuda", "triton", "ptxas", "glibc", "transformers", "driver"), far)
    mamba = ("mamba_inner_fn", "mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined")
    run = {
        "symbols": (GDN, CONV, "chunk_gla", "chunk_delta_rule", "chunk_kda", *mamba),
        "attention": "flash_attention_2",
    }
    flags = dict.fromkeys(("packed", "use_kernels", "liger", "grouped_values"), True)
    for gpu in ("5.0", "7.0", "8.6", "9.0", "10.0", "10.3", "12.0", "12.1"):
        for via in ("sdist", "source", "release-wheel"):
            later = facts(**tools, **run, **flags, pkgs=pkgs, gpu=gpu, via=dict.fromkeys(pkgs, via))
            findings, _ = apply_rules([rule], later, today=date(2036, 1, 1))
            assert not [f for f in findings if f.status is Status.FAIL]


def test_a_bare_target_only_leaves_rules_open() -> None:
    made = Facts.of(environment=target("h100"), declaration=None, intent=Intent())
    findings, still_open = apply_rules(ALL, made)
    assert findings == ()
    assert {"fla-hopper-dqkwg", "fla-hopper-dqkwg-raise2"} <= {rule.rule_id for rule in still_open}
    assert not {rule.rule_id for rule in still_open if rule.rule_id.startswith(("fla-blackwell", "torch-no-blackwell"))}


def test_a_full_target_decides_the_gpu_and_driver_rules() -> None:
    made = Facts.of(environment=target("b200,torch=2.7.0,cuda=12.6"), declaration=None, intent=Intent())
    assert {f.code for f in apply_rules(ALL, made)[0]} == {"torch-no-blackwell"}
    old = Facts.of(environment=target("h100,cuda=13.0,driver=550.54.15"), declaration=None, intent=Intent())
    assert {f.code for f in apply_rules(ALL, old)[0]} == {"cuda13-driver"}


def test_the_unrelated_kernelguard_is_told_about() -> None:
    assert codes(Status.WARN, pkgs={"kernelguard": "0.3.2"}) == {"kernelguard-name-taken"}
    assert codes(pkgs={"kernelguard-preflight": "0.1.0"}) == set()
    for rule in ALL:
        assert "pip install kernelguard " not in rule.fix + " "
