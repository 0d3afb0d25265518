"""Where the loader of this machine would look, and what it finds there."""

from __future__ import annotations

from pathlib import Path

from packaging.version import Version

from kernelguard.observe.elf import ElfFacts
from kernelguard.observe.loader import libraries_found, newest_libstdcxx
from kernelguard.observe.values import Environment

NAME = "libcudart.so.99"


def _environment(tmp: Path, **variables: str) -> Environment:
    return Environment(origin="x", live=True, executable=str(tmp / "conda/bin/python"), variables=variables)


def _put(folder: Path, name: str = NAME, content: bytes = b"") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def _extension(tmp: Path, *search_path: str) -> ElfFacts:
    return ElfFacts(
        path=str(tmp / "package/x.so"),
        machine="x86_64",
        needed=(NAME,),
        search_path=search_path,
        glibc=None,
        libstdcxx=None,
        torch_symbols=(),
        gpu_code=(),
    )


def test_the_run_path_comes_first_then_the_variable_then_the_interpreters_own(tmp_path: Path) -> None:
    assert libraries_found(_environment(tmp_path), NAME) == ()
    own = _put(tmp_path / "conda/lib")
    variable = _put(tmp_path / "variable")
    beside = _put(tmp_path / "package/libs")
    environment = _environment(tmp_path, LD_LIBRARY_PATH=f":{variable.parent}")
    assert libraries_found(_environment(tmp_path), NAME) == (own,)
    assert libraries_found(environment, NAME) == (variable, own)
    assert libraries_found(environment, NAME, _extension(tmp_path, "$ORIGIN/libs")) == (beside, variable, own)
    assert libraries_found(environment, NAME, _extension(tmp_path, "${ORIGIN}/libs"))[0] == beside


def test_the_newest_libstdcxx_of_all_counts(tmp_path: Path) -> None:
    machine = newest_libstdcxx(_environment(tmp_path))
    assert machine is not None
    assert Version("3.4.19") < machine < Version("3.4.99")
    _put(tmp_path / "conda/lib", "libstdc++.so.6", b"\0GLIBCXX_3.4\0GLIBCXX_3.4.9\0GLIBCXX_3.4.99\0GLIBCXX_TUNABLES\0")
    assert newest_libstdcxx(_environment(tmp_path)) == Version("3.4.99")
