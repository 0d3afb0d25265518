"""What is known about builds of torch and of kernel packages, drivers and the hub: the values behind `matrices/`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelguard.sources.values import Candidate, TorchBuild


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """The oldest NVIDIA driver on Linux for each CUDA."""

    compatible: Mapping[int, str]
    """CUDA major -> driver that runs any minor of it, as NVIDIA writes it (`525.60.13`)."""
    toolkit: Mapping[Version, str]
    """CUDA release -> driver it came with."""

    def floor(self, cuda: Version) -> Version | None:
        """The oldest driver that runs programs built with this CUDA; None: not known."""
        text = self.floor_text(cuda)
        return Version(text) if text else None

    def floor_text(self, cuda: Version) -> str:
        """The same as NVIDIA writes it; empty: not known."""
        return self.compatible.get(cuda.major, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which releases of `kernels` a transformers accepts."""

    transformers: SpecifierSet
    kernels: SpecifierSet
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What some releases of transformers need."""

    transformers: SpecifierSet
    torch: SpecifierSet
    python: SpecifierSet


@dataclass(frozen=True, slots=True, kw_only=True)
class HubBuilds:
    """What is known to limit the builds of one version of a hub repository."""

    version: int
    torch: SpecifierSet
    archs: tuple[str, ...]
    """GPU code inside; empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A kernel hub repository."""

    id: str
    package: str
    symbols: tuple[str, ...]
    versions: tuple[tuple[SpecifierSet, int], ...]
    """transformers -> the version (a branch `v<n>`) that it asks for."""
    backward: bool
    source: str
    builds: tuple[HubBuilds, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What is known about kernels from the hub."""

    windows: tuple[Window, ...]
    published: tuple[Version, ...]
    """Releases of the package `kernels`."""
    repositories: tuple[Repository, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What building a package from source takes."""

    std: str
    """The C++ standard that its setup.py passes; empty: none."""
    hard_coded_archs: bool
    arch_variable: str
    requires: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """Symbols of another import package that a distribution has a function for, behind a shim."""

    package: str
    symbols: tuple[str, ...]
    shim: str
    """Name of what has to bind the model to it."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """One file of `matrices/wheels/`."""

    distribution: str
    package: str
    kind: str
    """`extension`, `pure` or `tool`."""
    companions: tuple[str, ...]
    helps: tuple[str, ...]
    """Import packages that a tool makes right where they would be wrong alone."""
    needs_nvcc: bool
    look_alikes: SpecifierSet | None
    """Releases on the package index that are not what their name says."""
    build: BuildFacts | None
    candidates: tuple[Candidate, ...]
    archs: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """Public version and CUDA major -> the GPU code inside the publisher's own wheels of it."""
    serves: tuple[Serves, ...] = ()
    repository: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Everything that `resolve` knows without asking anyone."""

    torch: tuple[TorchBuild, ...]
    drivers: Drivers
    hub: Hub
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)
    """By distribution."""
    floors: tuple[Floor, ...] = ()
    retrieved: dt.date | None = None
    """Of the torch table."""
