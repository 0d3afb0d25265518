"""Facts of little shared objects that are compiled here, and of the real torch."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from kernelguard.errors import UndeterminedError
from kernelguard.observe.elf import GpuCode, extension_modules, missing_symbols, read_elf, torch_libraries
from observed import torch_base

_OLD_ABI = "_ZN3c105ErrorC2ENS_14SourceLocationESs"
_NEW_ABI = "_ZN3c106detail14torchCheckFailEPKcS2_jRKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"
_THERE = "_ZN3c106detail23torchInternalAssertFailEPKcS2_jS2_S2_"


def _compile(folder: Path, source: str, *options: str, name: str = "ext.so") -> Path:
    (folder / "source.c").write_text(source)
    path = folder / name
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(folder / "source.c"), *options], check=True)
    return path


def _wants(*symbols: str, weak: str = "") -> str:
    lines = [f"extern void {symbol}(void); void *keep_{i} = (void *){symbol};" for i, symbol in enumerate(symbols)]
    if weak:
        lines.append(f"extern void {weak}(void) __attribute__((weak)); void *keep_weak = (void *){weak};")
    return "\n".join(lines) + "\n"


def _fatbin(*entries: tuple[int, int, int], padding: int = 0) -> bytes:
    """A fat binary as nvcc writes it: kind (1 PTX, 2 cubin), architecture, flags; with some bytes of code each."""
    body = b""
    for kind, architecture, flags in entries:
        header = struct.pack("<HHIQIIHHIIIQQQ", kind, 0x101, 64, 40, 0, 0, 8, 1, architecture, 0, 0, flags, 0, 0)
        body += header + b"\x55" * 40
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body + b"\0" * padding


def _with_gpu_code(folder: Path, content: bytes, section: str = ".nv_fatbin") -> Path:
    numbers = ",".join(map(str, content))
    return _compile(folder, f'__attribute__((section("{section}"))) const unsigned char code[] = {{{numbers}}};')


def test_needed_libraries_and_where_they_are_looked_for(tmp_path: Path) -> None:
    stub = _compile(tmp_path, "int stub;", "-Wl,-soname,libcudart.so.12", name="libcudart.so.12")
    path = _compile(tmp_path, "int x;", "-Wl,--no-as-needed", str(stub), "-Wl,-rpath,$ORIGIN/../torch/lib:/opt/x")
    stub.unlink()
    facts = read_elf(path)
    assert facts.needed[0] == "libcudart.so.12"
    assert facts.cuda_runtime == Version("12")
    assert facts.search_path == ("$ORIGIN/../torch/lib", "/opt/x")
    assert facts.machine in {"x86_64", "aarch64"}
    assert facts.torch_symbols == ()
    assert facts.cxx11_abi is None
    assert facts.gpu_code == ()
    assert facts.runs_on((9, 0)) is None


@pytest.mark.parametrize(("soname", "version"), [("libcudart.so.11.0", "11.0"), ("libcudart.so.13", "13")])
def test_the_cuda_runtime(tmp_path: Path, soname: str, version: str) -> None:
    stub = _compile(tmp_path, "int stub;", f"-Wl,-soname,{soname}", name=soname)
    assert read_elf(_compile(tmp_path, "int x;", "-Wl,--no-as-needed", str(stub))).cuda_runtime == Version(version)


def test_a_library_that_only_sounds_like_the_runtime(tmp_path: Path) -> None:
    stub = _compile(tmp_path, "int stub;", "-Wl,-soname,libcudart_static_shim.so.9", name="libx.so")
    assert read_elf(_compile(tmp_path, "int x;", "-Wl,--no-as-needed", str(stub))).cuda_runtime is None


def test_floors_of_glibc_and_libstdcxx(tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    versions.write_text("GLIBC_2.9 { global: old; };\nGLIBC_2.32 { global: new; };\nGLIBCXX_3.4.99 { global: cxx; };\n")
    source = "void old(void) {} void new(void) {} void cxx(void) {}"
    library = _compile(tmp_path, source, f"-Wl,--version-script={versions}", name="libc2.so")
    facts = read_elf(_compile(tmp_path, _wants("old", "new", "cxx"), str(library)))
    assert facts.glibc == Version("2.32")
    assert facts.libstdcxx == Version("3.4.99")


def test_symbols_that_this_torch_lacks(tmp_path: Path) -> None:
    facts = read_elf(_compile(tmp_path, _wants(_OLD_ABI, _THERE, "malloc", weak="_ZN3c104weak3fooEv")))
    assert facts.torch_symbols == (_OLD_ABI, _THERE)
    assert facts.cxx11_abi is False
    libraries = torch_libraries(torch_base().site / "torch")
    assert {"libc10.so", "libtorch_cpu.so", "libtorch_python.so"} <= {path.name for path in libraries}
    assert missing_symbols(facts, libraries) == (_OLD_ABI,)


def test_symbols_that_this_torch_has(tmp_path: Path) -> None:
    facts = read_elf(_compile(tmp_path, _wants(_NEW_ABI, _THERE)))
    assert facts.cxx11_abi is True
    assert missing_symbols(facts, torch_libraries(torch_base().site / "torch")) == ()


def test_torchs_own_extension_fits_torch() -> None:
    """Thousands of real symbols: none may be called missing."""
    folder = torch_base().site / "torch"
    facts = read_elf(folder / "lib/libtorch_python.so")
    assert len(facts.torch_symbols) > 1000
    assert missing_symbols(facts, torch_libraries(folder)) == ()
    assert facts.cxx11_abi is True


def test_a_symbol_that_a_library_only_wants_itself_is_missing(tmp_path: Path) -> None:
    wanting = _compile(tmp_path, _wants(_OLD_ABI), name="libwanting.so")
    facts = read_elf(wanting)
    assert missing_symbols(facts, [wanting]) == (_OLD_ABI,)


def test_gpu_code_of_every_kind(tmp_path: Path) -> None:
    content = _fatbin((2, 80, 0x11), (2, 90, 0x100011), padding=8) + _fatbin(
        (2, 100, 0x1200011), (2, 120, 0x1000011), (1, 120, 0x8011), (7, 130, 0)
    )
    facts = read_elf(_with_gpu_code(tmp_path, content))
    assert [str(code) for code in facts.gpu_code] == ["sm_80", "sm_90a", "sm_100f", "sm_120", "compute_120"]
    assert facts.runs_on((8, 9)) is True
    assert facts.runs_on((7, 5)) is False


def test_code_for_separate_linking_counts(tmp_path: Path) -> None:
    facts = read_elf(_with_gpu_code(tmp_path, _fatbin((1, 70, 0)), section="__nv_relfatbin"))
    assert [str(code) for code in facts.gpu_code] == ["compute_70"]


@pytest.mark.parametrize(
    ("code", "runs", "does_not"),
    [
        (GpuCode(capability=(8, 0), ptx=False), [(8, 0), (8, 6), (8, 9)], [(7, 5), (9, 0), (12, 0)]),
        (GpuCode(capability=(8, 6), ptx=False), [(8, 6), (8, 9)], [(8, 0), (9, 0)]),
        (GpuCode(capability=(9, 0), ptx=False, feature="a"), [(9, 0)], [(8, 0), (10, 0), (12, 0)]),
        (GpuCode(capability=(10, 0), ptx=False), [(10, 0), (10, 3)], [(9, 0), (12, 0), (12, 1)]),
        (GpuCode(capability=(10, 0), ptx=False, feature="a"), [(10, 0)], [(10, 3)]),
        (GpuCode(capability=(10, 0), ptx=False, feature="f"), [(10, 0), (10, 3)], [(12, 0)]),
        (GpuCode(capability=(12, 0), ptx=False), [(12, 0), (12, 1)], [(10, 3)]),
        (GpuCode(capability=(8, 0), ptx=True), [(8, 0), (9, 0), (12, 1)], [(7, 5)]),
        (GpuCode(capability=(9, 0), ptx=True, feature="a"), [(9, 0)], [(10, 0)]),
    ],
    ids=str,
)
def test_what_runs_where(code: GpuCode, runs: list[tuple[int, int]], does_not: list[tuple[int, int]]) -> None:
    assert [capability for capability in runs + does_not if code.runs_on(capability)] == runs


def test_damaged_gpu_sections_do_not_hang_or_raise(tmp_path: Path) -> None:
    good = _fatbin((2, 80, 0))
    for number, content in enumerate((good[:30], b"\xff" * 200, good[:16] + b"\0" * 100, b"")):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert read_elf(_with_gpu_code(folder, content or b"\0")).gpu_code == ()


_HEADER = b"\x7fELF\x02\x01\x01"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"not elf at all", id="text"),
        pytest.param(b"\x7fELF", id="magic-only"),
        pytest.param(_HEADER + b"\0" * 57, id="zeros"),
        pytest.param(_HEADER + b"\xff" * 300, id="ones"),
    ],
)
def test_what_is_no_elf_file_cannot_be_determined(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(content)
    with pytest.raises(UndeterminedError, match=r"x\.so"):
        read_elf(path)


def test_a_cut_off_file_cannot_be_determined_or_is_read_right(tmp_path: Path) -> None:
    whole = _compile(tmp_path, _wants(_OLD_ABI)).read_bytes()
    for size in range(64, len(whole), 997):
        (tmp_path / "cut.so").write_bytes(whole[:size])
        with pytest.raises(UndeterminedError):
            read_elf(tmp_path / "cut.so")


def test_a_missing_file_and_a_missing_library(tmp_path: Path) -> None:
    with pytest.raises(UndeterminedError, match="No such file"):
        read_elf(tmp_path / "gone.so")
    facts = read_elf(_compile(tmp_path, _wants(_OLD_ABI)))
    with pytest.raises(UndeterminedError, match="No such file"):
        missing_symbols(facts, [tmp_path / "gone.so"])


def test_extension_modules_of_a_package(tmp_path: Path) -> None:
    for name in ("a.so", "sub/b.cpython-311-x86_64-linux-gnu.so", "lib/c.so.12", "d.py", "e.sox", "f.so.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.name for path in extension_modules(tmp_path)] == [
        "a.so",
        "c.so.12",
        "b.cpython-311-x86_64-linux-gnu.so",
    ]
