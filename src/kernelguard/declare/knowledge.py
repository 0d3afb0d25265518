"""What is known about kernel packages that no model's source says? Reads matrices/kernels/*.toml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kernelguard import data
from kernelguard.declare.values import Phase
from kernelguard.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSymbol:
    """One function or class of a kernel package."""

    name: str
    module: str
    phases: tuple[Phase, ...]
    boundaries: tuple[str, ...]
    """Arguments any one of which keeps packed samples apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPackage:
    """One kernel package: its import name, who ships it, what it needs."""

    package: str
    distributions: tuple[str, ...]
    symbols: Mapping[str, KernelSymbol] = field(default_factory=dict)


_PHASES = {
    "training": (Phase.TRAINING,),
    "decoding": (Phase.DECODING,),
    "both": (Phase.TRAINING, Phase.DECODING),
}


class Kernels:
    """The kernel packages by import name; a file is read when it is first asked for."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or data.matrices() / "kernels"
        self.packages = frozenset(path.stem for path in self._folder.glob("*.toml"))
        """Import names; each file is named like its package."""
        self._read: dict[str, KernelPackage] = {}

    def get(self, package: str) -> KernelPackage | None:
        """What is known about a package, or None.

        Raises:
            InputError: Its file is not in the agreed form.
        """
        if package in self.packages and package not in self._read:
            self._read[package] = _read(self._folder / f"{package}.toml")
        return self._read.get(package)

    def symbol(self, package: str, name: str) -> KernelSymbol | None:
        """What is known about one symbol of a package, or None."""
        known = self.get(package)
        return known.symbols.get(name) if known is not None else None


def _read(path: Path) -> KernelPackage:
    import tomllib  # noqa: PLC0415 - 6 ms that most models do not need

    try:
        with path.open("rb") as handle:
            table = tomllib.load(handle)
        if table["package"] != path.stem:
            raise InputError(
                f"{path.name} in matrices/kernels describes {table['package']}; a file is named like its package."
            )
        return KernelPackage(
            package=table["package"],
            distributions=tuple(table["distributions"]),
            symbols={
                name: KernelSymbol(
                    name=name,
                    module=row["module"],
                    phases=_PHASES[row["phase"]],
                    boundaries=tuple(row.get("boundaries", ())),
                )
                for name, row in table.get("symbols", {}).items()
            },
        )
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise InputError(f"{path.name} in matrices/kernels is not as agreed: {error!r}.") from error
