"""Which set is found for which machine, what stands in the way where there is none, and what newer would have cost."""

from __future__ import annotations

import dataclasses

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.observe.targets import target
from kernelguard.resolve import Market, Options, RuleAnswer, fleet, matrix, resolve
from kernelguard.resolve.conflicts import conflicts
from kernelguard.resolve.values import Accepted, Candidate, Kind, Known, Rejected, RejectionCode, Resolution
from resolve.cases import HYBRID, MAMBA, TRANSFORMERS, answer, needs, shipped_rules


def chosen(resolution: Resolution) -> dict[str, str]:
    return {pin.distribution: str(pin.version) for pin in resolution.pins}


def rejections(resolution: Resolution, distribution: str, code: RejectionCode) -> list[Rejected]:
    return [
        no
        for no in resolution.trace
        if isinstance(no, Rejected) and no.distribution == distribution and no.code is code
    ]


def test_hopper_gets_the_newest_torch_whose_triton_is_right_and_that_has_a_convolution() -> None:
    found = answer("h100")
    assert found.complete
    assert found.torch is not None
    assert (str(found.torch.version), str(found.torch.cuda), str(found.triton)) == ("2.12.1", "13.0", "3.7.1")
    assert chosen(found) == {
        "causal-conv1d": "1.6.2.post1+cu.13.0.torch.2.12",
        "flash-linear-attention": "0.6.0",
        "fla-core": "0.6.0",
    }
    assert found.admits_launch


def test_what_the_newest_torch_would_have_cost_is_said() -> None:
    costs = answer("h100").costs
    assert costs[0].torch == "torch 2.15.0+cu132"
    assert set(costs[0].lost) == {"causal_conv1d"}
    assert "built for torch 2.12, the set has torch 2.15" in costs[0].lost["causal_conv1d"]
    assert [c.torch.split("+")[0] for c in costs] == ["torch 2.15.0", "torch 2.14.1", "torch 2.14.0", "torch 2.13.0"]


@pytest.mark.parametrize("version", ["2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0"])
def test_hopper_with_a_triton_of_wrong_gradients_is_refused_and_the_way_out_named(version: str) -> None:
    found = answer(f"h100,torch={version}")
    assert [need.package for need in found.missing] == ["fla"]
    wrong = rejections(found, "flash-linear-attention", RejectionCode.RULE)
    assert any(no.rule == "fla-hopper-dqkwg" and "triton" in no.reason for no in wrong)
    assert found.fixes == ("torch=2.12.1,cuda=13.0 in the target serves all",)


def test_hopper_with_tilelang_and_nvcc_may_keep_an_older_triton() -> None:
    environment = dataclasses.replace(target("h100,torch=2.10.0"), cuda_toolkit=Version("12.8"))
    found = resolve(needs=needs(), environment=environment, transformers=TRANSFORMERS, rules=shipped_rules())
    assert found.complete
    assert chosen(found)["tilelang"] == "0.1.15"
    [nvcc] = [
        no.code for no in answer("h100,torch=2.10.0").trace if isinstance(no, Rejected) and "0.1.15" in no.candidate
    ]
    assert nvcc is RejectionCode.NVCC


def test_other_gpus_do_not_mind_that_triton() -> None:
    assert answer("a100,torch=2.10.0").complete


def test_a_mixed_fleet_has_to_please_every_gpu() -> None:
    assert [need.package for need in answer("a100,torch=2.10.0", "h100,torch=2.10.0").missing] == ["fla"]
    both = answer("v100", "h200")
    # Volta is gone after torch 2.10, and Hopper needs triton >= 3.7.1 or < 3.4: torch 2.7.1 is what is left.
    assert both.torch is not None
    assert (both.complete, str(both.torch.version)) == (True, "2.7.1")
    assert any("V100 is 7.0" in no.reason for no in rejections(both, "torch", RejectionCode.GPU))


def test_targets_of_different_machines_cannot_share_a_set() -> None:
    with pytest.raises(InputError, match="machine: aarch64, x86_64"):
        fleet([target("h100"), target("gh200")])


def test_a_fleet_has_the_oldest_driver_and_no_glibc_where_one_is_not_said() -> None:
    merged = fleet([target("h100,driver=580,glibc=2.35"), target("a100,driver=535.1")])
    assert merged.driver == Version("535.1")
    assert merged.glibc is None
    assert len(merged.gpus) == 2


@pytest.mark.parametrize(
    ("driver", "label"), [("580", "torch 2.12.1+cu130"), ("550", "torch 2.12.1+cu126"), ("470", "torch 2.7.1+cu118")]
)
def test_the_driver_decides_the_cuda(driver: str, label: str) -> None:
    found = answer(f"h100,driver={driver}")
    assert found.torch is not None
    assert found.torch.label == label
    assert found.complete


def test_an_older_driver_is_named_with_both_sides() -> None:
    reasons = {no.reason for no in rejections(answer("h100,driver=550"), "torch", RejectionCode.DRIVER)}
    assert "CUDA 13.0 needs driver 580 or newer, the target has 550" in reasons


def test_glibc_of_an_old_distribution_rules_out_the_official_wheels() -> None:
    found = answer("a100,glibc=2.31,torch=2.10.0")
    no = rejections(found, "causal-conv1d", RejectionCode.GLIBC)[0]
    assert "needs glibc 2.35 or newer, the target has 2.31" in no.reason
    assert chosen(found)["causal-conv1d"] == "1.6.2.post1+cu.12.8.torch.2.10"


def test_without_a_glibc_the_floor_is_stated() -> None:
    assert any("needs glibc 2.28 or newer" in note for note in answer("h100").notes)


def test_a_grace_machine_gets_an_aarch64_wheel() -> None:
    found = answer("gh200")
    [conv] = [pin for pin in found.pins if pin.distribution == "causal-conv1d"]
    assert (found.complete, conv.machines) == (True, ("aarch64",))


def test_the_old_abi_is_told_from_the_new_one() -> None:
    abi = {}
    for cuda in ("12.4", "12.6"):
        found = answer(f"a100,torch=2.6.0,cuda={cuda}")
        [conv] = [pin for pin in found.pins if pin.distribution == "causal-conv1d"]
        assert conv.built_for is not None
        abi[cuda] = conv.built_for.cxx11_abi
    assert abi == {"12.4": False, "12.6": True}
    reason = rejections(found, "causal-conv1d", RejectionCode.ABI)[0].reason
    assert reason == "built with the old C++ ABI, torch 2.6.0+cu126 has the new one"


def test_a_source_build_never_happens_by_accident() -> None:
    found = answer("h100,torch=2.15.0")
    assert not found.complete
    no = rejections(found, "causal-conv1d", RejectionCode.SOURCE_BUILD)[0]
    assert (no.torch, no.candidate) == ("torch 2.15.0+cu132", "causal-conv1d 1.7.0")
    assert "--allow-source-build serves all with torch 2.15.0 for CUDA 13.2" in found.fixes


def test_a_source_build_that_is_allowed_is_still_the_last_resort() -> None:
    # With a free torch there is a set of wheels, so nothing is built although it might be.
    assert all(pin.kind is Kind.WHEEL for pin in answer("h100", options=Options(allow_source_build=True)).pins)
    found = answer("h100,torch=2.15.0", options=Options(allow_source_build=True))
    [build] = found.builds
    assert (build.distribution, str(build.nvcc), build.cxx, build.archs) == ("causal-conv1d", "13.2", 20, ("9.0",))
    assert "its own setup.py" in build.archs_note


def test_a_source_build_that_passes_an_old_cxx_standard_is_refused_by_a_new_torch() -> None:
    options = Options(allow_source_build=True)
    new = answer("h100,torch=2.15.0", symbols=MAMBA, options=options)
    reason = rejections(new, "mamba-ssm", RejectionCode.CXX)[0].reason
    assert reason == "its setup.py passes -std=c++17, the headers of torch 2.15.0+cu132 need C++20"
    old = answer("h100,torch=2.13.0", symbols=MAMBA, options=options)
    assert {b.distribution: b.cxx for b in old.builds} == {"causal-conv1d": 17, "mamba-ssm": 17}


def test_a_wheel_of_another_torch_only_by_explicit_flag_and_then_to_be_verified() -> None:
    assert not answer("a100,torch=2.13.0").complete
    found = answer("a100,torch=2.13.0", options=Options(cross_torch=True))
    [conv] = [d for d in found.trace if isinstance(d, Accepted) and d.candidate.distribution == "causal-conv1d"]
    assert conv.verify == (
        "built for torch 2.12, used with torch 2.13.0+cu130: forward and backward have to be verified",
    )
    # The window is bounded.
    assert not answer("a100,torch=2.15.0", options=Options(cross_torch=True)).complete


def test_several_providers_are_a_choice_that_is_stated() -> None:
    conv, fla = answer("h100").choices
    assert conv.provider.distribution == "causal-conv1d"
    assert any("fla-core" in other and "only with the shim fla-conv" in other for other in conv.others)
    assert any(other.startswith("fla-core: ") for other in fla.others)


def test_flas_own_convolution_counts_only_behind_its_shim() -> None:
    without = answer("h100,torch=2.15.0")
    assert rejections(without, "fla-core", RejectionCode.SHIM)
    found = answer("h100", options=Options(shims=frozenset({"fla-conv"})))
    assert found.torch is not None
    assert (found.complete, str(found.torch.version)) == (True, "2.15.0")
    assert set(chosen(found)) == {"fla-core", "flash-linear-attention"}
    assert any(other.startswith("causal-conv1d: ") for other in found.choices[0].others)


def test_a_cpu_target_gets_the_triton_that_it_fixes() -> None:
    assert answer("cpu,torch=2.13.0").triton is None
    assert str(answer("cpu,torch=2.13.0,triton=3.7.1").triton) == "3.7.1"


def test_a_cpu_target_never_admits_a_launch() -> None:
    found = answer("cpu,torch=2.13.0")
    assert found.torch is not None
    assert (found.torch.label, found.complete, found.admits_launch) == ("torch 2.13.0+cpu", True, False)
    assert "causal-conv1d" not in chosen(found)
    assert any("left out: it is a CUDA extension" in note for note in found.notes)


@pytest.mark.parametrize(
    ("spec", "text", "hint"),
    [
        (
            "h100,torch=2.12,cuda=11.8",
            "CUDA 11.8 contradicts torch 2.12: .* 12.6, 13.0, 13.2",
            "with torch 2.4.0 to 2.7.1",
        ),
        ("h100,cuda=12.0", "CUDA 12.0 contradicts any known torch", "leave cuda out"),
        ("h100,torch=2.16.0", "torch 2.16.0 is not known; known are 2.4.0 to 2.15.0", "nearest: torch=2.15.0"),
        ("h100,torch=2.12.7", "torch 2.12.7 is not known", "nearest: torch=2.12.1"),
    ],
)
def test_a_target_that_contradicts_what_is_published_is_an_input_error(spec: str, text: str, hint: str) -> None:
    with pytest.raises(InputError, match=text) as raised:
        answer(spec)
    assert hint in (raised.value.hint or "")


def test_a_torch_series_means_any_of_its_releases() -> None:
    found = answer("h100,torch=2.12")
    assert found.torch is not None
    assert str(found.torch.version) == "2.12.1"


def test_unknown_archs_are_never_taken_for_a_yes() -> None:
    # The cu126 builds of torch 2.12 may or may not hold code for Volta; no known build of it does.
    found = answer("v100")
    assert found.torch is not None
    assert str(found.torch.version) == "2.10.0"
    assert any("is not known" in no.reason for no in rejections(found, "torch", RejectionCode.GPU))


def test_where_no_single_change_is_enough_the_nearest_set_is_named() -> None:
    [text] = answer("h100,torch=2.13.0,python=3.9").fixes
    assert text.startswith(
        "no single change is enough; nearest: torch=2.12.1,cuda=13.0,python=3.12 with driver 580 and"
    )


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"yanked": "broken"}, RejectionCode.YANKED),
        ({"version": Version("9.0rc1")}, RejectionCode.PRE_RELEASE),
        ({"machines": ("aarch64",)}, RejectionCode.PLATFORM),
        ({"pythons": ("cp39",)}, RejectionCode.PYTHON),
        ({"glibc": Version("2.99")}, RejectionCode.GLIBC),
        ({"requires": (Requirement("triton>=99"),)}, RejectionCode.REQUIRES),
        ({"requires": (Requirement("transformers<5"),)}, RejectionCode.REQUIRES),
        ({"requires": (Requirement("torch==2.4.*"),)}, RejectionCode.REQUIRES),
    ],
)
def test_one_wrong_fact_is_enough(change: dict[str, object], code: RejectionCode) -> None:
    """A newer release that would win, but for that one fact."""
    good = Candidate(
        distribution="liger-kernel",
        version=Version("9.0"),
        kind=Kind.WHEEL,
        source="test",
        known=Known.SEEN,
        machines=("x86_64",),
        pythons=("cp312",),
        glibc=Version("2.17"),
    )

    def ask(candidate: Candidate) -> Resolution:
        return answer(
            "h100,glibc=2.35",
            symbols={"LigerRMSNorm": "liger_kernel"},
            market=Market(known=matrix(), candidates=(candidate,)),
        )

    assert chosen(ask(good)) == {"liger-kernel": "9.0"}
    found = ask(dataclasses.replace(good, **change))
    assert chosen(found) == {"liger-kernel": "0.8.5"}
    assert rejections(found, "liger-kernel", code)


def test_look_alikes_are_never_chosen() -> None:
    placeholder = Candidate(
        distribution="flash-attn-3", version=Version("0.0.0"), kind=Kind.WHEEL, source="package index", known=Known.SEEN
    )
    own = Candidate(
        distribution="kernelguard", version=Version("0.3.2"), kind=Kind.WHEEL, source="package index", known=Known.SEEN
    )
    found = answer(
        "h100,torch=2.15.0",
        symbols={"flash_attn_func": "flash_attn_3", "x": "kernelguard"},
        market=Market(known=matrix(), candidates=(placeholder, own)),
    )
    assert chosen(found) == {}
    assert rejections(found, "flash-attn-3", RejectionCode.LOOK_ALIKE)
    assert rejections(found, "kernelguard", RejectionCode.LOOK_ALIKE)


def test_members_that_exclude_each_other_are_not_put_together() -> None:
    mamba = next(c for c in matrix().packages["mamba-ssm"].candidates if str(c.version).startswith("2.3.2.post1"))
    assert any(str(r) == "tilelang==0.1.8" for r in mamba.requires)
    tilelang = next(c for c in matrix().packages["tilelang"].candidates if str(c.version) == "0.1.9")
    [text] = conflicts([mamba, tilelang])
    assert "requires tilelang==0.1.8, the set has tilelang 0.1.9" in text
    newer = dataclasses.replace(
        tilelang, distribution="flash-attn-4", requires=(Requirement("apache-tvm-ffi>=0.1.11,<0.2"),)
    )
    [text] = conflicts([mamba, newer])
    assert "apache-tvm-ffi" in text
    assert "no version is both" in text
    assert not list(conflicts([tilelang, newer]))


def test_every_rejection_names_the_other_side() -> None:
    for no in answer("h100", symbols=MAMBA).trace:
        if isinstance(no, Rejected):
            assert len(no.reason.split()) >= 4, no
            assert no.candidate
            assert no.distribution


def test_rules_are_asked_about_one_gpu_at_a_time_and_about_the_whole_set() -> None:
    asked: list[tuple[int, frozenset[str]]] = []

    def remember(environment, via):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, ARG001
        asked.append((len(environment.gpus), frozenset(environment.distributions)))
        return RuleAnswer()

    resolve(
        needs=needs(), environment=fleet([target("h100"), target("b200")]), transformers=TRANSFORMERS, rules=remember
    )
    assert {gpus for gpus, _ in asked} == {1}
    assert any({"causal-conv1d", "fla-core", "torch", "triton"} <= names for _, names in asked)


def test_an_open_rule_is_a_note_not_a_silent_yes() -> None:
    def unsure(_environment, _via):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return RuleAnswer(unknown=(("some-rule", "would fail if glibc is <2.32"),))

    found = resolve(needs=needs(), environment=target("h100"), transformers=TRANSFORMERS, rules=unsure)
    assert [str(c) for c in found.cautions] == ["some-rule: cannot tell, would fail if glibc is <2.32"]


def test_what_nobody_said_is_noted() -> None:
    notes = " ".join(answer("h100").notes)
    assert "no Python version; 3.12 is assumed" in notes
    assert "needs NVIDIA driver 580 or newer" in notes
    assert "is assumed" not in " ".join(answer("h100,python=3.11").notes)


def test_a_need_that_nobody_knows_is_missing_not_dropped() -> None:
    found = answer("h100", symbols={**HYBRID, "f": "no_such_package"})
    assert [need.package for need in found.missing] == ["no_such_package"]
    assert "no_such_package: nothing is known that has it" in found.notes
    # The rest still gets its newest set.
    assert found.torch == answer("h100").torch


def test_what_transformers_itself_needs_counts_too() -> None:
    found = answer("a100,torch=2.5.1,python=3.11")
    assert found.torch is None
    reasons = {no.reason for no in rejections(found, "torch", RejectionCode.REQUIRES)}
    assert "transformers 5.24.0 requires torch>=2.6, this is 2.5.1" in reasons
    assert answer("h100,python=3.10").torch is None
    assert "python=3.13 in the target serves all, with torch 2.12.1" in answer("h100,python=3.10").fixes


def test_a_set_whose_members_exclude_each_other_is_passed_over() -> None:
    symbols = {"chunk_gated_delta_rule": "fla", "mamba_chunk_scan_combined": "mamba_ssm"}
    environment = dataclasses.replace(target("h100,torch=2.10.0"), cuda_toolkit=Version("12.8"))
    found = resolve(
        needs=needs(symbols), environment=environment, transformers=TRANSFORMERS, rules=shipped_rules(symbols)
    )
    # The newest mamba-ssm wants tilelang 0.1.8, with which fla would be wrong; an older one wants none.
    assert found.complete
    assert chosen(found)["tilelang"] == "0.1.15"
    assert chosen(found)["mamba-ssm"].startswith("2.3.1+")
    assert any(
        isinstance(no, Rejected) and no.code is RejectionCode.REQUIRES and "tilelang==0.1.8" in no.reason
        for no in found.trace
    )


def test_where_no_wheel_fits_at_all_a_source_build_is_still_offered() -> None:
    found = answer("h100,python=3.15")
    assert [need.package for need in found.missing] == ["causal_conv1d"]
    assert found.torch is not None
    assert str(found.torch.version) == "2.15.0"
    assert rejections(found, "causal-conv1d", RejectionCode.SOURCE_BUILD)
    assert "--allow-source-build serves all with torch 2.15.0 for CUDA 13.2" in found.fixes
