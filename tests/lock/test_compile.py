"""Reading what pip-tools and uv write, and choosing the one file that pip would take."""

from __future__ import annotations

import pytest
from packaging.version import Version

from kernelguard.lock.choose import choose_file, platform_tags, supported_tags
from kernelguard.lock.compile import Platform, parse_compiled, uv_platform
from kernelguard.sources.index import IndexFile

LINUX = Platform(python=Version("3.12"), machine="x86_64", glibc=Version("2.31"))


def test_compiled_lines_are_read() -> None:
    text = (
        "torch==2.13.0+cpu \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "causal-conv1d @ https://host/c%2Bcu.whl \\\n    --hash=sha256:cc\n"
        "\n# The following packages are considered to be unsafe in a requirements file:\n"
        "Set_Up.Tools==84.2.1\n--index-url https://x\n"
    )
    conv, setuptools, torch = parse_compiled(text)
    assert (torch.name, torch.version, torch.hashes) == ("torch", "2.13.0+cpu", frozenset({"aa", "bb"}))
    assert (conv.url, conv.version, conv.hashes) == ("https://host/c%2Bcu.whl", "", frozenset({"cc"}))
    assert (setuptools.name, setuptools.hashes) == ("set-up-tools", frozenset())


@pytest.mark.parametrize(
    ("glibc", "name"),
    [
        ("2.17", "x86_64-manylinux2014"),
        ("2.27", "x86_64-manylinux2014"),
        ("2.28", "x86_64-manylinux_2_28"),
        ("2.30", "x86_64-manylinux_2_28"),
        ("2.39", "x86_64-manylinux_2_39"),
        ("2.99", "x86_64-manylinux_2_40"),
    ],
)
def test_uv_is_told_a_platform_that_is_not_newer(glibc: str, name: str) -> None:
    assert uv_platform(Platform(python=Version("3.12"), machine="x86_64", glibc=Version(glibc))) == name


def file(name: str, digest: str = "") -> IndexFile:
    return IndexFile(filename=name, url=f"https://host/{name}", sha256=digest)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["a-1.0-py3-none-any.whl", "a-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"], 1),
        (["a-1.0-cp312-cp312-manylinux_2_28_x86_64.whl", "a-1.0-cp312-cp312-manylinux_2_17_x86_64.whl"], 0),
        (["a-1.0-cp312-cp312-manylinux_2_34_x86_64.whl", "a-1.0-cp312-cp312-manylinux2014_x86_64.whl"], 1),
        (["a-1.0-cp312-cp312-linux_x86_64.whl"], 0),
        (["a-1.0-cp38-abi3-manylinux_2_28_x86_64.whl", "a-1.0-py3-none-any.whl"], 0),
        (["a-1.0-cp312-cp312-manylinux_2_28_aarch64.whl"], None),
        (["a-1.0-cp311-cp311-manylinux_2_28_x86_64.whl"], None),
        (["a-1.0-cp312-cp312-musllinux_1_2_x86_64.whl"], None),
        (["a-1.1-py3-none-any.whl", "b-1.0-py3-none-any.whl", "a-1.0.tar.gz", "junk"], None),
        (["a-1.0+local-py3-none-any.whl"], None),
    ],
)
def test_the_file_that_pip_would_take(names: list[str], chosen: int | None) -> None:
    tags = supported_tags(LINUX)
    found = choose_file([file(n) for n in names], name="a", version="1.0", hashes=frozenset(), tags=tags)
    assert (found.filename if found else None) == (names[chosen] if chosen is not None else None)


def test_only_a_file_with_one_of_the_hashes() -> None:
    files = [file("a-1.0-cp312-cp312-linux_x86_64.whl", "aa"), file("a-1.0-py3-none-any.whl", "bb")]
    found = choose_file(files, name="a", version="1.0", hashes=frozenset({"bb"}), tags=supported_tags(LINUX))
    assert found is not None
    assert found.sha256 == "bb"


def test_platform_tags_stop_at_the_glibc_of_the_target() -> None:
    tags = platform_tags(LINUX)
    assert tags[0] == "manylinux_2_31_x86_64"
    assert {"manylinux2014_x86_64", "manylinux1_x86_64", "linux_x86_64"} <= set(tags)
