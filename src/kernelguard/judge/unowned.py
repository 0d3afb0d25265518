"""Is the code that was imported that of the release that is installed? A checkout or an editable install is its own.

What is known of bad combinations is known by release. Where a package is imported from a folder that none of its
installed distributions lies in, their metadata speaks of other files; what counts then is the package's own
`__version__`, and where it has none, no known bad combination can be ruled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kernelguard.declare.values import FastPath
from kernelguard.judge.bound import find_binding, import_fact, install_command
from kernelguard.judge.values import Finding, Status
from kernelguard.matrix import KernelPackage
from kernelguard.observe.values import Bindings, BoundTo, Distribution, Environment

_UNKNOWN = "of unknown version"
"""Stands for a version; being none, it leaves open whatever depends on it."""


def judge_unowned(
    path: FastPath, *, environment: Environment, bindings: Bindings, kernels: Mapping[str, KernelPackage]
) -> Iterator[Finding]:
    """One finding where the kernel's code is not that of an installed distribution. Pure."""
    found = _folder_and_version(path, environment, bindings, kernels)
    if found is None:
        return
    folder, version = found
    others = [d for n in _names(path, kernels) if (d := (environment.distributions or {}).get(n)) is not None]
    if not version:
        yield Finding(
            code="release-unknown",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"{path.package} is imported from {folder}, which belongs to no installed distribution, and says no "
            "__version__: which known bad combinations it is in cannot be told",
            fix=install_command(path, kernels),
            evidence=(str(folder),),
        )
    elif any(_differ(version, other.version) for other in others):
        installed = ", ".join(f"{other.name} {other.version}" for other in others)
        yield Finding(
            code="other-release",
            status=Status.WARN,
            fast_path=path.symbol,
            reason=f"{installed} is installed, and what is imported is {path.package} {version} from {folder}: that "
            "one is judged here",
            fix=f"take {folder.parent} off the path, or uninstall {others[0].name}",
            evidence=(str(folder),),
        )


def as_imported(
    paths: Iterable[FastPath], environment: Environment, bindings: Bindings | None, kernels: Mapping[str, KernelPackage]
) -> Environment:
    """The environment with the versions of the code that is really imported, for rules to be held against."""
    if bindings is None or environment.distributions is None:
        return environment
    changed: dict[str, Distribution] = {}
    for path in paths:
        found = _folder_and_version(path, environment, bindings, kernels)
        if found is None:
            continue
        folder, version = found
        for name in _names(path, kernels):
            changed[name] = Distribution(name=name, version=version or _UNKNOWN, location=str(folder.parent))
    return replace(environment, distributions={**environment.distributions, **changed}) if changed else environment


def unpinned(
    paths: Iterable[FastPath], environment: Environment, bindings: Bindings | None, kernels: Mapping[str, KernelPackage]
) -> tuple[str, ...]:
    """What no fingerprint can hold, one sentence for each folder: versions and RECORDs are those of other files."""
    found = [_folder_and_version(path, environment, bindings, kernels) for path in paths] if bindings else []
    return tuple(
        f"what was measured is imported from {folder}, which belongs to no installed distribution: the fingerprint "
        "does not hold its code, so this proves nothing about another run (install it, and not editable)"
        for folder in dict.fromkeys(one[0] for one in found if one is not None)
    )


def _names(path: FastPath, kernels: Mapping[str, KernelPackage]) -> tuple[str, ...]:
    known = kernels.get(path.package)
    return tuple(known.distributions) if known is not None else (path.distribution,)


def _folder_and_version(
    path: FastPath, environment: Environment, bindings: Bindings, kernels: Mapping[str, KernelPackage]
) -> tuple[Path, str] | None:
    """Where the package's code lies and what it calls its version; None where a distribution's files are there."""
    binding = find_binding(path, bindings)
    if binding is None or binding.bound_to is not BoundTo.KERNEL or not binding.file or binding.distribution:
        return None
    folder = next((p for p in Path(binding.file).parents if p.name == path.package), None)
    if folder is None:
        return None  # transformers' own copy of a kernel, say
    installed = environment.distributions or {}
    # Without a RECORD, as some package managers leave it, the place alone tells.
    places = [Path(installed[name].location) for name in _names(path, kernels) if name in installed]
    if any(place.resolve() == folder.parent.resolve() for place in places):
        return None
    fact = import_fact(path, bindings)
    return folder, fact.version if fact is not None else ""


def _differ(one: str, other: str) -> bool:
    try:
        return Version(one).base_version != Version(other).base_version
    except InvalidVersion:
        return one != other
