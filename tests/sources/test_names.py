"""What the names of real wheels say."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kernelguard.sources.names import built_for, read_file_name


@pytest.mark.parametrize(
    ("local", "torch", "cuda", "abi"),
    [
        ("cu12torch2.8cxx11abiTRUE", "2.8", "12", True),
        ("cu11torch2.10cxx11abiFALSE", "2.10", "11", False),
        ("cu122torch2.4cxx11abiFALSE", "2.4", "12.2", False),
        ("cu.13.0.torch.2.12", "2.12", "13.0", None),
        ("cu12.8torch2.10.0cxx11abiTRUE", "2.10", "12.8", True),
        ("cu130torch2.9", "2.9", "13.0", None),
        ("torch2.9cu130", "2.9", "13.0", None),
        ("pt2.9cu128", "2.9", "12.8", None),
    ],
)
def test_the_local_part_says_what_it_was_built_for(local: str, torch: str, cuda: str, abi: bool | None) -> None:
    made = built_for(Version(f"1.7.0+{local}"))
    assert made is not None
    assert (made.torch, made.cuda, made.cxx11_abi) == (Version(torch), Version(cuda), abi)


@pytest.mark.parametrize("version", ["1.7.0", "2.13.0+cpu", "2.13.0+cu130", "1.0+gabcdef"])
def test_other_local_parts_say_nothing_about_torch(version: str) -> None:
    assert built_for(Version(version)) is None


def test_the_release_of_a_container_is_not_a_torch() -> None:
    made = built_for(Version("1.6.0+cu13torch25.11cxx11abiTRUE"))
    assert made is not None
    assert made.torch is None


@pytest.mark.parametrize(
    ("name", "pythons", "machines", "glibc", "floor"),
    [
        (
            "causal_conv1d-1.7.0+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
            ("cp312",),
            ("x86_64",),
            None,
            "",
        ),
        ("torch-2.13.0-cp312-cp312-manylinux_2_28_aarch64.whl", ("cp312",), ("aarch64",), "2.28", ""),
        ("torch-2.13.0-cp313-cp313t-manylinux_2_28_x86_64.whl", ("cp313t",), ("x86_64",), "2.28", ""),
        ("fla_core-0.6.0-py3-none-any.whl", None, None, None, ""),
        (
            "tilelang-0.1.9-cp38-abi3-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
            None,
            ("x86_64",),
            "2.27",
            ">=3.8",
        ),
        ("sgl_kernel-0.3-cp310-abi3-manylinux2014_x86_64.whl", None, ("x86_64",), "2.17", ">=3.10"),
        ("xformers-0.0.35-py39-none-manylinux_2_28_x86_64.whl", None, ("x86_64",), "2.28", ">=3.9"),
        ("torch-2.13.0-cp312-cp312-win_amd64.whl", ("cp312",), ("win_amd64",), None, ""),
        ("x-1.0-cp312-cp312-musllinux_1_2_x86_64.whl", ("cp312",), ("musllinux_1_2_x86_64",), None, ""),
    ],
)
def test_tags(
    name: str, pythons: tuple[str, ...] | None, machines: tuple[str, ...] | None, glibc: str | None, floor: str
) -> None:
    read = read_file_name(name)
    assert read is not None
    assert (read.pythons, read.machines, str(read.python_floor)) == (pythons, machines, floor)
    assert read.glibc == (Version(glibc) if glibc else None)
    assert read.sdist is False


def test_an_sdist_and_what_is_neither() -> None:
    sdist = read_file_name("causal_conv1d-1.7.0.tar.gz")
    assert sdist is not None
    assert (sdist.sdist, sdist.distribution, str(sdist.version)) == (True, "causal-conv1d", "1.7.0")
    assert read_file_name("causal_conv1d-1.7.0-cp27-cp27mu-linux_x86_64.whl") is None
    assert read_file_name("index.html") is None
    assert read_file_name("nonsense-cp3.whl") is None
