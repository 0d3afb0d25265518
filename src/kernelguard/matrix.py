"""What is known about each kernel package: its symbols, when they run, what they need (`matrices/kernels/*.toml`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kernelguard.data import matrices
from kernelguard.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSymbol:
    """One function or class of a kernel package."""

    name: str
    module: str
    """Where the symbol is imported from."""
    phases: tuple[str, ...]
    """`training`, `decoding` or both (the values of `declare.values.Phase`)."""
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


class KernelPackages(Mapping[str, KernelPackage]):
    """The kernel packages by import name; a file is read when it is first asked for.

    Each file is named like its package, so that a static check reads only the one or two that it needs.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {path.stem: path for path in sorted(folder.glob("*.toml"))}
        self._read: dict[str, KernelPackage] = {}

    def __getitem__(self, package: str) -> KernelPackage:
        if package not in self._read:
            self._read[package] = _read(self._files[package])
        return self._read[package]

    def __contains__(self, package: object) -> bool:
        return package in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def symbol(self, package: str, name: str) -> KernelSymbol | None:
        """What is known about one symbol of a package, or None."""
        known = self.get(package)
        return known.symbols.get(name) if known is not None else None


@cache
def kernel_packages() -> KernelPackages:
    """The kernel packages that ship with kernelguard."""
    return KernelPackages(matrices() / "kernels")


_PHASES = {"training": ("training",), "decoding": ("decoding",), "both": ("training", "decoding")}


def _read(path: Path) -> KernelPackage:
    """Read one file.

    Raises:
        InputError: it is not in the form that `kernelguard matrix check` checks.
    """
    import tomllib  # noqa: PLC0415 - 6 ms that a model without kernels does not need

    try:
        table = tomllib.loads(path.read_text("utf-8"))
        if table["package"] != path.stem:
            raise InputError(f"{path} describes {table['package']}; a file is named like its package")
        return KernelPackage(
            package=table["package"],
            distributions=tuple(table["distributions"]),
            install=table["install"],
            note=table.get("note", ""),
            needs_modules=tuple(table.get("needs_modules", ())),
            symbols={
                name: KernelSymbol(
                    name=name,
                    module=row["module"],
                    phases=_PHASES[row["phase"]],
                    boundaries=tuple(row.get("boundaries", ())),
                    mixes_tokens=row.get("mixes_tokens", True),
                )
                for name, row in table.get("symbols", {}).items()
            },
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not in the agreed form: {error!r}", hint="kernelguard matrix check") from error
