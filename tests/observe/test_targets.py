"""What a hand-written target says, and what is wrong with a nonsense one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.observe.targets import KEYS, known_gpus, target
from kernelguard.observe.values import GpuState


@pytest.mark.parametrize(
    ("name", "capability", "machine"),
    [
        ("h100", (9, 0), "x86_64"),
        ("h200", (9, 0), "x86_64"),
        ("a100", (8, 0), "x86_64"),
        ("b200", (10, 0), "x86_64"),
        ("b300", (10, 3), "x86_64"),
        ("gh200", (9, 0), "aarch64"),
        ("gb200", (10, 0), "aarch64"),
        ("l40s", (8, 9), "x86_64"),
        ("l4", (8, 9), "x86_64"),
        ("a10", (8, 6), "x86_64"),
        ("t4", (7, 5), "x86_64"),
        ("rtx4090", (8, 9), "x86_64"),
        ("rtx5090", (12, 0), "x86_64"),
        ("rtx6000-pro", (12, 0), "x86_64"),
        ("gb10", (12, 1), "aarch64"),
    ],
)
def test_names(name: str, capability: tuple[int, int], machine: str) -> None:
    found = target(name)
    assert [gpu.capability for gpu in found.gpus] == [capability]
    assert (found.machine, found.system, found.live) == (machine, "Linux", False)
    assert found.gpu_state is GpuState.USABLE
    assert found.origin == f"target {name}"
    # Nothing was said about software, so nothing is known about it.
    assert found.torch is None
    assert found.torch_is_cpu is None
    assert found.distributions is None


def test_every_row_has_a_source_and_no_name_stands_for_two_gpus() -> None:
    names = [name for gpu in known_gpus() for name in (gpu.name, *gpu.aliases)]
    assert len(names) == len(set(names))
    assert all(gpu.source.startswith("https://") and gpu.retrieved for gpu in known_gpus())


def test_cpu_has_no_gpu() -> None:
    found = target("cpu")
    assert found.gpus == ()
    assert found.gpu_state is GpuState.NONE


def test_all_keys() -> None:
    found = target(
        "gpu=H100, driver=580.95.05, cuda=13.0, python=3.12, platform=manylinux_2_28_x86_64, torch=2.12.1,"
        "triton=3.7.1, transformers=5.24.0"
    )
    assert found.driver == Version("580.95.05")
    assert (found.torch, found.torch_cuda, found.torch_is_cpu) == (Version("2.12.1"), Version("13.0"), False)
    assert (found.python, found.glibc, found.machine) == (Version("3.12"), Version("2.28"), "x86_64")
    assert (found.triton, found.transformers_version) == (Version("3.7.1"), Version("5.24.0"))


@pytest.mark.parametrize(
    ("spec", "cuda", "is_cpu"),
    [
        ("h100,torch=2.12.1+cu128", "12.8", False),
        ("h100,cuda=cu130", "13.0", False),
        ("h100,torch=2.12.1+cu130,cuda=13.0", "13.0", False),
        ("h100,torch=2.12.1+cpu", None, True),
    ],
)
def test_what_torch_is_built_for(spec: str, cuda: str | None, is_cpu: bool) -> None:
    found = target(spec)
    assert found.torch_cuda == (None if cuda is None else Version(cuda))
    assert found.torch_is_cpu is is_cpu
    assert (found.gpu_state is GpuState.CPU_TORCH) is is_cpu


def test_machine_can_be_said() -> None:
    assert target("h100,machine=arm64").machine == "aarch64"
    assert target("h100,platform=linux-aarch64").machine == "aarch64"


def test_a_target_without_a_gpu_knows_none() -> None:
    assert target("torch=2.12.1").gpu_state is GpuState.UNKNOWN


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("h1000", ["unknown GPU 'h1000' (did you mean 'h100'?)"]),
        ("", ["an empty part"]),
        ("h100,", ["an empty part"]),
        ("=", ["unknown key ''"]),
        ("h100,tourch=2.12", ["unknown key 'tourch' (did you mean 'torch'?)"]),
        ("h100,torch=banana", ["torch 'banana' is no version"]),
        ("h100,torch=", ["torch has no value"]),
        ("h100,a100", ["'a100' is no key=value"]),
        ("h100,gpu=a100", ["gpu is given twice"]),
        ("python=3", ["python '3'"]),
        ("python=2.7", ["python '2.7'"]),
        ("cuda=580", ["cuda '580' is no CUDA release"]),
        ("machine=sparc", ["unknown machine 'sparc'"]),
        ("platform=windows", ["platform 'windows'"]),
        ("h100,tourch=2,driver=x,foo=1", ["'tourch'", "driver 'x'", "'foo'"]),
        ("cpu,driver=580,cuda=12.8", ["driver=580", "cuda=12.8"]),
        ("gb200,machine=x86_64", ["gb200 comes with an aarch64 CPU"]),
        ("gb200,platform=linux-x86_64", ["gb200 comes with an aarch64 CPU"]),
        ("platform=linux-aarch64,machine=x86_64", ["contradicts"]),
        ("platform=manylinux_2_28_x86_64,glibc=2.17", ["glibc=2.17 is older"]),
        ("torch=2.12.1+cu128,cuda=13.0", ["built for CUDA 12.8"]),
        ("torch=2.12.1+cpu,cuda=13.0", ["is a CPU build"]),
    ],
)
def test_nonsense_names_every_problem(spec: str, words: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        target(spec)
    for word in words:
        assert word in caught.value.message
    assert caught.value.message.count(";") == len(words) - 1
    assert caught.value.hint is not None
    assert "h100" in caught.value.hint
    assert all(key in caught.value.hint for key in KEYS)


@given(st.text(alphabet="abhg0123456789=,.+-_ ", max_size=40) | st.text(max_size=30))
def test_any_text_is_a_target_or_an_input_error(spec: str) -> None:
    try:
        found = target(spec)
    except InputError as error:
        assert "\n" not in error.message  # noqa: PT017
    else:
        assert found.origin == f"target {spec}"
