"""Variants of hub kernels on machines that are not this one, held against the real `kernels` package."""

from __future__ import annotations

import itertools
import json
import subprocess
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.resolve.archs import runs_on
from kernelguard.resolve.variants import System, choose_variant, parse_variant
from programs import tool

H100 = System(
    backend="cuda",
    backend_version=Version("13.0"),
    machine="x86_64",
    torch=Version("2.13.0"),
    cxx11_abi=True,
    python=Version("3.12"),
)

_ASK = """
import json, sys
from packaging.version import Version
from kernels import variants as v
from kernels.archs import _cuda_arch_supports
from kernels.backends import parse_backend

def version(text):
    return None if text is None else Version(text)

def answer(case):
    parsed = []
    for name in case["names"]:
        try:
            parsed.append(v.parse_variant(name))
        except ValueError:
            pass
    accepted, trace = v._resolve_variant_for_system(
        parsed, parse_backend(case["backend"]), case["machine"], case["os"], version(case["torch"]), case["abi"],
        version(case["tvm"]), version(case["macos"]),
    )
    return [[a.variant_str for a in accepted],
            [t.variant.variant_str for t in trace if isinstance(t, v.VariantRejected)]]

asked = json.load(sys.stdin)
json.dump({
    "chosen": [answer(case) for case in asked["cases"]],
    "archs": [_cuda_arch_supports(arch, tuple(cap)) for arch, cap in asked["archs"]],
}, sys.stdout)
"""

FRAMEWORKS = [
    "torch212-cxx11",
    "torch213-cxx11",
    "torch213-cxx98",
    "torch213",
    "torch26-cxx98",
    "torch-stable-abi29",
    "torch-stable-abi210",
    "torch-stable-abi214",
    "tvm-ffi01",
    "tvm-ffi02",
]
BACKENDS = ["cu118", "cu126", "cu128", "cu130", "cu132", "cpu", "rocm71", "rocm72", "xpu20253", "metal", "cann85"]
PLACES = ["x86_64-linux", "aarch64-linux", "aarch64-darwin"]
NOARCH = ["torch-cuda", "torch-cpu", "torch-rocm", "torch-npu", "torch-universal", "torch-anything-goes"]
ODD = ["triton-cuda", "torch213-cu130-x86_64", "torch2-cu130-x86_64-linux", "torch213-cu-x86_64-linux", "jax-cuda", ""]
NAMES = ["-".join(parts) for parts in itertools.product(FRAMEWORKS, BACKENDS, PLACES)] + NOARCH + ODD
SYSTEM_BACKENDS = ["cu118", "cu126", "cu130", "cu132", "cpu", "rocm72", "xpu20253", "metal", "cann85"]


def grid() -> list[dict[str, Any]]:
    """Every 29th machine of the whole grid; 29 divides none of its sides, so every value of each side is in."""
    whole = [
        {
            "names": NAMES,
            "backend": backend,
            "machine": place.split("-")[0],
            "os": place.split("-")[1],
            "torch": torch,
            "abi": abi,
            "tvm": tvm,
            "macos": macos,
        }
        for backend, place, torch, abi, (tvm, macos) in itertools.product(
            SYSTEM_BACKENDS,
            PLACES,
            [None, "2.6", "2.12", "2.13"],
            [True, False, None],
            [(None, None), ("0.1", "26.1"), ("0.2", "15.0")],
        )
    ]
    return whole[::29]


def system_of(case: dict[str, Any]) -> System:
    variant = parse_variant(f"torch213-{case['backend']}-x86_64-linux")
    assert variant is not None
    return System(
        backend=variant.backend,
        backend_version=variant.backend_version,
        machine=case["machine"],
        os=case["os"],
        torch=Version(case["torch"]) if case["torch"] else None,
        cxx11_abi=case["abi"],
        tvm_ffi=Version(case["tvm"]) if case["tvm"] else None,
        macos=Version(case["macos"]) if case["macos"] else None,
    )


def ask_kernels(cases: list[dict[str, Any]], archs: list[Any]) -> dict[str, Any]:
    python = tool("kernels-0.17.2", "kernels==0.17.2")
    done = subprocess.run(
        [python, "-c", _ASK],
        input=json.dumps({"cases": cases, "archs": archs}),
        capture_output=True,
        text=True,
        check=True,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.online
def test_the_same_variants_are_accepted_and_the_same_one_is_chosen_as_by_kernels() -> None:
    cases = grid()
    archs = [
        (arch, cap)
        for arch in ("7.5", "8.0", "8.9", "9.0", "9.0a", "10.0", "10.0f", "10.3a", "12.0", "9.0+PTX", "8.0+PTX")
        for cap in ((7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
    ]
    theirs = ask_kernels(cases, archs)
    assert len(theirs["chosen"]) == len(cases) == 34
    for case, (accepted, rejected) in zip(cases, theirs["chosen"], strict=True):
        chosen, decisions = choose_variant(NAMES, system_of(case))
        mine = [d.name for d in decisions if d.fits]
        assert set(mine) == set(accepted), case
        assert {d.name for d in decisions if not d.fits} - set(rejected) <= set(ODD), case
        if accepted and not _is_tie(accepted):
            assert chosen == accepted[0], case
    assert [runs_on([arch], cap) for arch, cap in archs] == theirs["archs"]


def _is_tie(accepted: list[str]) -> bool:
    """tvm-ffi and noarch are of one rank in `kernels`, and the order of a set decides between them."""
    return accepted[0].startswith(("tvm-ffi", "torch-cuda", "torch-cpu", "torch-rocm", "torch-npu"))


def test_a_stable_abi_build_wins_over_an_exact_one_with_a_newer_cuda() -> None:
    chosen, _ = choose_variant(["torch213-cxx11-cu130-x86_64-linux", "torch-stable-abi210-cu126-x86_64-linux"], H100)
    assert chosen is None or chosen.startswith("torch213")
    chosen, _ = choose_variant(["torch213-cxx11-cu130-x86_64-linux", "torch-stable-abi210-cu130-x86_64-linux"], H100)
    assert chosen == "torch-stable-abi210-cu130-x86_64-linux"


def test_a_tie_does_not_depend_on_anything_but_the_names() -> None:
    tvm = System(backend="cuda", backend_version=Version("13.0"), machine="x86_64", tvm_ffi=Version("0.1"))
    for order in itertools.permutations(["tvm-ffi01-cu130-x86_64-linux", "torch-cuda"]):
        assert choose_variant(order, tvm)[0] == "torch-cuda"


def test_a_miss_names_both_sides() -> None:
    chosen, decisions = choose_variant(["torch212-cxx11-cu130-x86_64-linux", "torch-rocm", "what-is-this"], H100)
    assert chosen is None
    assert {d.name: d.reason for d in decisions} == {
        "torch212-cxx11-cu130-x86_64-linux": "built for torch 2.12, the set has 2.13",
        "torch-rocm": "it is for rocm, the machine's backend is cuda",
        "what-is-this": "'what-is-this' is no variant name",
    }


def test_free_threaded_python_has_its_own_reason() -> None:
    free = System(
        backend="cuda",
        backend_version=Version("13.0"),
        machine="x86_64",
        torch=Version("2.13"),
        cxx11_abi=True,
        python=Version("3.14"),
        free_threaded=True,
    )
    _, [decision] = choose_variant(["torch213-cu130-x86_64-linux"], free)
    assert "free-threaded Python 3.14" in decision.reason
