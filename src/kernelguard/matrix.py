"""What is known about each kernel package: its symbols, when they run, what they need (`matrices/kernels/*.toml`)."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernelguard.data import matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSymbol:
    """One function of a kernel package."""

    name: str
    module: str
    """Where the symbol is imported from."""
    phase: str
    """`training`, `decoding` or `both`."""
    boundaries: tuple[str, ...]
    """Arguments any one of which keeps packed samples apart; empty: it has none, packed samples always leak."""
    mixes_tokens: bool = True
    """False: it works on each position alone (a norm), so that packing cannot leak through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage:
    """One kernel package."""

    package: str
    """Import name."""
    distributions: tuple[str, ...]
    """What can be installed to get it; the first is recommended."""
    install: str
    """A command that can be pasted."""
    note: str
    needs_modules: tuple[str, ...]
    """Modules it cannot work without, though its metadata may not say so."""
    symbols: Mapping[str, KernelSymbol]


def load_kernel_packages(files: Iterable[Path]) -> dict[str, KernelPackage]:
    """Read kernel package files, keyed by import name. Their form is checked by `kernelguard matrix check`."""
    packages = {}
    for file in sorted(files):
        row = tomllib.loads(file.read_text("utf-8"))
        packages[row["package"]] = KernelPackage(
            package=row["package"],
            distributions=tuple(row["distributions"]),
            install=row["install"],
            note=row.get("note", ""),
            needs_modules=tuple(row.get("needs_modules", ())),
            symbols={
                name: KernelSymbol(
                    name=name,
                    module=s["module"],
                    phase=s["phase"],
                    boundaries=tuple(s.get("boundaries", ())),
                    mixes_tokens=s.get("mixes_tokens", True),
                )
                for name, s in row.get("symbols", {}).items()
            },
        )
    return packages


@cache
def kernel_packages() -> Mapping[str, KernelPackage]:
    """The kernel packages that ship with kernelguard."""
    return load_kernel_packages((matrices() / "kernels").glob("*.toml"))
