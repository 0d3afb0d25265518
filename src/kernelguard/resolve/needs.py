"""What has to be installed for these fast paths, and who could provide it?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kernelguard.declare.values import FastPath
from kernelguard.matrix import KernelPackage
from kernelguard.resolve.matrix import Matrix, PackageFacts
from kernelguard.resolve.values import Kind, Need, Provider


def needs_of(
    fast_paths: Iterable[FastPath],
    *,
    kernels: Mapping[str, KernelPackage],
    known: Matrix,
    hub: bool = False,
) -> tuple[Need, ...]:
    """One need for each import package that the given fast paths (those the run needs) take symbols from.

    `hub`: the run uses `kernels` from the hub, so its repositories count as providers too.
    """
    wanted: dict[str, list[str]] = {}
    distribution: dict[str, str] = {}
    for path in fast_paths:
        symbols = wanted.setdefault(path.package, [])
        if path.symbol not in symbols:
            symbols.append(path.symbol)
        distribution.setdefault(path.package, path.distribution)
    return tuple(
        Need(
            package=package,
            symbols=tuple(sorted(symbols)),
            providers=tuple(
                _providers(package, frozenset(symbols), distribution[package], kernels.get(package), known, hub=hub)
            ),
        )
        for package, symbols in sorted(wanted.items())
    )


def _providers(
    package: str,
    symbols: frozenset[str],
    distribution: str,
    kernel: KernelPackage | None,
    known: Matrix,
    *,
    hub: bool,
) -> Iterator[Provider]:
    names = kernel.distributions if kernel is not None else (distribution,)
    for name in names:
        facts = known.packages.get(name)
        yield Provider(
            distribution=name,
            companions=facts.companions if facts is not None else (),
            why="recommended for this import name" if name == names[0] else f"also has the import name {package}",
        )
    if hub:
        yield from _from_hub(package, symbols, known)
    for facts in known.packages.values():
        yield from _behind_a_shim(facts, package, symbols)


def _behind_a_shim(facts: PackageFacts, package: str, symbols: frozenset[str]) -> Iterator[Provider]:
    for serves in facts.serves:
        if serves.package == package and symbols <= set(serves.symbols):
            yield Provider(
                distribution=facts.distribution,
                companions=facts.companions,
                shim=serves.shim,
                why=serves.why,
            )


def _from_hub(package: str, symbols: frozenset[str], known: Matrix) -> Iterator[Provider]:
    for repository in known.hub.repositories:
        if repository.package == package and symbols <= set(repository.symbols):
            yield Provider(
                distribution=repository.id,
                kind=Kind.HUB,
                why="a build from the kernel hub, loaded through the package kernels",
            )
