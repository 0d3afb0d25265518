"""Which compiled modules does a kernel package bring, and do they fit this torch and machine? Nothing is run."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from kernelguard.errors import UndeterminedError
from kernelguard.observe.elf import ElfFacts, missing_symbols, read_elf, torch_libraries
from kernelguard.observe.values import Distribution, Environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One shared object of an installed distribution."""

    distribution: str
    path: str
    elf: ElfFacts | None
    """None: it could not be read, `problem` says why."""
    missing: tuple[str, ...] | None
    """Torch symbols it wants and this torch does not export; None: could not be compared."""
    problem: str = ""


def inspect_extensions(environment: Environment, packages: Iterable[str]) -> tuple[Extension, ...]:
    """Every shared object of the distributions that own the import names `packages`, in a live environment.

    They are listed by RECORD, because many lie beside their package (`causal_conv1d_cuda.so`), not in it.
    """
    if environment.distributions is None or not environment.live:
        return ()
    wanted = set(packages)
    torch = environment.distributions.get("torch")
    libraries = () if torch is None else torch_libraries(Path(torch.location, "torch"))
    return tuple(
        _extension(owner, path, libraries)
        for owner in environment.distributions.values()
        if wanted & set(owner.top_level)
        for path in _shared_objects(owner)
    )


def _shared_objects(owner: Distribution) -> Iterator[Path]:
    for folder in Path(owner.location).glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        record = folder / "RECORD"
        if canonicalize_name(name) != owner.name or version != owner.version or not record.is_file():
            continue
        for row in csv.reader(record.read_text(encoding="utf-8", errors="replace").splitlines()):
            if row and row[0].endswith(".so"):
                yield Path(owner.location, row[0])


def _extension(owner: Distribution, path: Path, libraries: tuple[Path, ...]) -> Extension:
    try:
        facts = read_elf(path)
    except UndeterminedError as error:
        return Extension(distribution=owner.name, path=str(path), elf=None, missing=None, problem=error.message)
    if not libraries and facts.torch_symbols:
        problem = "there is no torch to compare it with"
        return Extension(distribution=owner.name, path=str(path), elf=facts, missing=None, problem=problem)
    try:
        missing = missing_symbols(facts, libraries)
    except UndeterminedError as error:
        return Extension(distribution=owner.name, path=str(path), elf=facts, missing=None, problem=error.message)
    return Extension(distribution=owner.name, path=str(path), elf=facts, missing=missing)
