"""What does an extension module need, and which GPUs is it built for? Read from the file; nothing of it is run."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from packaging.version import Version

from kernelguard.errors import UndeterminedError

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64", "EM_386": "x86", "EM_ARM": "arm"}
# A mangled name that speaks of one of torch's namespaces, or torch's C interfaces.
_TORCH_SYMBOL = re.compile(r"N[KVRO]*(?:3c10|2at|5torch|6caffe2)\d*[A-Za-z0-9_]|^(?:aoti_)?torch_")
_NEW_ABI = "NSt7__cxx11"
_OLD_ABI = re.compile(r"(?:E|RK)Ss(?:$|[A-Z])")
# Where nvcc puts GPU code: linked at once, or for separate linking.
_GPU_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_FATBIN_MAGIC = 0xBA55ED50
_FATBIN = struct.Struct("<IHHQ")  # magic, version, header size, size of what follows
_ENTRY = struct.Struct("<HHIQIIHHIIIQ")  # kind, ?, header size, size, ..., minor, major, architecture, ..., flags
_PTX, _CUBIN = 1, 2
# Seen in what nvcc 13.0 makes for sm_90a and sm_100f.
_FLAG_EXACT, _FLAG_FAMILY = 0x100000, 0x200000


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class GpuCode:
    """Code for one GPU architecture inside a shared object."""

    capability: tuple[int, int]
    ptx: bool
    """PTX, which the driver compiles for newer GPUs; otherwise a cubin, which runs as it is."""
    feature: str = ""
    """`a`: for this capability only. `f`: for this family. Empty: as the capability says."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this capability can run it."""
        if self.feature == "a":
            return capability == self.capability
        if self.ptx and not self.feature:
            return capability >= self.capability
        return capability[0] == self.capability[0] and capability[1] >= self.capability[1]

    def __str__(self) -> str:
        return f"{'compute' if self.ptx else 'sm'}_{self.capability[0]}{self.capability[1]}{self.feature}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFacts:
    """One shared object, as its headers describe it."""

    path: str
    machine: str
    """`x86_64`, `aarch64`, or ELF's own name for another one."""
    needed: tuple[str, ...]
    """Libraries it asks the loader for, `libcudart.so.12`."""
    search_path: tuple[str, ...]
    """Where it wants them looked for (RPATH and RUNPATH)."""
    glibc: Version | None
    """The newest glibc version it refers to: the oldest it loads on."""
    libstdcxx: Version | None
    """The newest GLIBCXX version it refers to."""
    torch_symbols: tuple[str, ...]
    """Mangled names of torch's that it expects to find, weak ones left out."""
    gpu_code: tuple[GpuCode, ...]

    @property
    def cuda_runtime(self) -> Version | None:
        """The CUDA runtime it is linked to; None: none (it may be linked in)."""
        for name in self.needed:
            found = re.fullmatch(r"libcudart\.so\.(\d+(?:\.\d+)?)", name)
            if found:
                return Version(found[1])
        return None

    @property
    def cxx11_abi(self) -> bool | None:
        """The C++ ABI it was compiled for, as the torch symbols with a string in them show; None: none shows it."""
        new = any(_NEW_ABI in symbol for symbol in self.torch_symbols)
        old = any(_OLD_ABI.search(symbol) for symbol in self.torch_symbols)
        return new if new != old else None

    def runs_on(self, capability: tuple[int, int]) -> bool | None:
        """Whether some of its GPU code runs on such a GPU; None: it has no GPU code."""
        return any(code.runs_on(capability) for code in self.gpu_code) if self.gpu_code else None


def read_elf(path: Path) -> ElfFacts:
    """Read the headers of a shared object.

    Raises:
        UndeterminedError: it cannot be read, or is no ELF file.
    """
    from elftools.common.exceptions import ELFError  # noqa: PLC0415  # most checks need no ELF
    from elftools.construct import ConstructError  # noqa: PLC0415
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415

    try:
        with path.open("rb") as handle:
            elf = ELFFile(handle)
            dynamic: Any = elf.get_section_by_name(".dynamic")
            if elf["e_type"] != "ET_DYN" or dynamic is None:
                # Also a library whose section headers were stripped: "needs nothing" would be a guess.
                raise UndeterminedError(f"{path} is no shared object with a dynamic section")
            tags = list(dynamic.iter_tags())
            versions = list(_version_needs(elf))
            machine = elf["e_machine"]
            return ElfFacts(
                path=str(path),
                machine=_MACHINES.get(machine, str(machine)),
                needed=tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"),
                search_path=tuple(_search_path(tags)),
                glibc=_newest(versions, "GLIBC"),
                libstdcxx=_newest(versions, "GLIBCXX"),
                torch_symbols=tuple(sorted(set(_undefined_torch_symbols(elf)))),
                gpu_code=tuple(sorted(set(_gpu_code(elf, handle)))),
            )
    except OSError as error:
        raise UndeterminedError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ELFError, ConstructError, struct.error, UnicodeDecodeError, AttributeError, KeyError) as error:
        # pyelftools raises whatever a damaged structure leads it to.
        raise UndeterminedError(f"{path} is no readable ELF file: {type(error).__name__}: {error}") from error


def missing_symbols(facts: ElfFacts, libraries: Iterable[Path]) -> tuple[str, ...]:
    """The torch symbols of an extension that none of these libraries exports: it was built for another torch.

    The libraries' own symbol hash tables are asked, so that half a gigabyte of torch costs little.

    Raises:
        UndeterminedError: a library cannot be read, or has no hash table.
    """
    from elftools.elf.elffile import ELFFile  # noqa: PLC0415

    left = set(facts.torch_symbols)
    for library in libraries:
        if not left:
            break
        with ExitStack() as stack:
            try:
                elf = ELFFile(stack.enter_context(library.open("rb")))
            except OSError as error:
                raise UndeterminedError(f"{library} cannot be read: {error.strerror or error}") from error
            table = elf.get_section_by_name(".gnu.hash") or elf.get_section_by_name(".hash")
            if table is None:
                raise UndeterminedError(f"{library} has no symbol hash table")
            left -= {name for name in left if _exports(table, name)}
    return tuple(sorted(left))


def torch_libraries(torch_folder: Path) -> tuple[Path, ...]:
    """The libraries of an installed torch that extensions link to, the small ones first."""
    return tuple(sorted((torch_folder / "lib").glob("lib*.so"), key=lambda path: path.stat().st_size))


def extension_modules(folder: Path) -> tuple[Path, ...]:
    """Every shared object below a package folder."""
    return tuple(sorted(path for path in folder.rglob("*.so*") if re.search(r"\.so(\.\d+)*$", path.name)))


def _exports(table: Any, name: str) -> bool:
    symbol = table.get_symbol(name)
    return symbol is not None and symbol["st_shndx"] != "SHN_UNDEF"


def _search_path(tags: Iterable[Any]) -> Iterator[str]:
    for tag in tags:
        if tag.entry.d_tag in {"DT_RPATH", "DT_RUNPATH"}:
            value: str = tag.runpath if tag.entry.d_tag == "DT_RUNPATH" else tag.rpath
            yield from value.split(":")


def _version_needs(elf: Any) -> Iterator[str]:
    section = elf.get_section_by_name(".gnu.version_r")
    if section is not None:
        for _, auxiliaries in section.iter_versions():
            yield from (auxiliary.name for auxiliary in auxiliaries)


def _newest(versions: Iterable[str], family: str) -> Version | None:
    numbers = (re.fullmatch(rf"{family}_(\d+(?:\.\d+)+)", version) for version in versions)
    return max((Version(found[1]) for found in numbers if found), default=None)


def _undefined_torch_symbols(elf: Any) -> Iterator[str]:
    section = elf.get_section_by_name(".dynsym")
    if section is None:
        return
    for symbol in section.iter_symbols():
        if symbol["st_shndx"] == "SHN_UNDEF" and symbol["st_info"]["bind"] != "STB_WEAK":
            name: str = symbol.name
            if _TORCH_SYMBOL.search(name):
                yield name


def _gpu_code(elf: Any, handle: IO[bytes]) -> Iterator[GpuCode]:
    """Walk over the fat binaries by their headers; the code itself, often hundreds of megabytes, is skipped."""
    for name in _GPU_SECTIONS:
        section = elf.get_section_by_name(name)
        if section is None:
            continue
        position, end = section["sh_offset"], section["sh_offset"] + section["sh_size"]
        while position + _FATBIN.size <= end:
            handle.seek(position)
            magic, _, header_size, size = _FATBIN.unpack(handle.read(_FATBIN.size))
            if magic != _FATBIN_MAGIC or header_size < _FATBIN.size:
                # Padding between two of them.
                position += 8
                continue
            position += header_size
            yield from _entries(handle, position, min(position + size, end))
            position += size


def _entries(handle: IO[bytes], position: int, end: int) -> Iterator[GpuCode]:
    while position + _ENTRY.size <= end:
        handle.seek(position)
        kind, _, header_size, size, *_, architecture, _, _, flags = _ENTRY.unpack(handle.read(_ENTRY.size))
        if header_size < _ENTRY.size:
            return
        if kind in {_PTX, _CUBIN}:
            feature = "a" if flags & _FLAG_EXACT else "f" if flags & _FLAG_FAMILY else ""
            yield GpuCode(capability=divmod(architecture, 10), ptx=kind == _PTX, feature=feature)
        position += header_size + size
