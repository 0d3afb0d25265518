"""What `sources` hands on: the candidates for a kernel, and the builds of torch, with where each is known from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version


class Kind(StrEnum):
    """In which form a kernel comes."""

    WHEEL = "wheel"
    HUB = "hub"
    """A build variant of a kernel hub repository."""
    SDIST = "sdist"
    GIT = "git"
    """A repository at a commit, to be built."""


class Known(StrEnum):
    """How well it is known that a candidate exists."""

    SEEN = "seen"
    """A source listed it in this run."""
    OBSERVED = "observed"
    """An asset list or a URL in use was read when the matrix was made."""
    REPORTED = "reported"
    """Its publisher's README says so."""
    PLANNED = "planned"
    """The workflow that builds it says so; jobs fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltFor:
    """What a compiled candidate was built for. None in a field: it does not say."""

    torch: Version | None = None
    """major.minor."""
    cuda: Version | None = None
    """`12` (any 12.x) or `12.8`."""
    cxx11_abi: bool | None = None
    archs: tuple[str, ...] | None = None
    """Compute capabilities with machine code: `8.0`, `9.0a`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One thing that could be installed to get a kernel."""

    distribution: str
    """Normalized name."""
    version: Version
    """As its file name says, local part included."""
    kind: Kind
    source: str
    """For a person: `package index`, `Astral index cu130`, `release page v1.6.2.post1`, `folder wheels/`."""
    known: Known
    filename: str = ""
    url: str = ""
    """Empty: to be found by name and version on the package index."""
    index_url: str = ""
    """The extra index that lists it; empty: the configured package index, or a direct URL."""
    sha256: str = ""
    size: int | None = None
    pythons: tuple[str, ...] | None = None
    """`cp312`; None: any (pure, or the stable ABI, which then says its floor in `requires_python`)."""
    machines: tuple[str, ...] | None = None
    """None: any."""
    glibc: Version | None = None
    """The oldest one it loads on; None: none needed, or not known."""
    built_for: BuiltFor | None = None
    """None: not compiled against torch."""
    requires_python: SpecifierSet = field(default_factory=SpecifierSet)
    requires: tuple[Requirement, ...] = ()
    yanked: str = ""
    """The reason, or `no reason given`; empty: not yanked."""
    direct: bool = False
    """It has to be installed by URL: its file name and its metadata disagree, so pip refuses it by version."""
    needs_nvcc: bool = False
    commit: str = ""
    """Of a hub variant or a git source: 40 hex digits."""
    evidence: str = ""
    """Where this is known from, and when."""

    @property
    def label(self) -> str:
        """How a report names it."""
        return self.filename or f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """One published build of torch for one machine."""

    version: Version
    """Without a local part."""
    machine: str
    cuda: Version | None
    """None: a CPU build."""
    channel: str
    """`index` for the package index's own build, else `cu126`, `cpu`: a channel of PyTorch's index, or `folder`."""
    cxx11_abi: bool
    glibc: Version
    pythons: tuple[str, ...]
    triton: SpecifierSet | None
    """What it pins; None: it brings no triton."""
    archs: tuple[str, ...] | None
    """None: not known."""
    min_cxx: int
    requires_python: SpecifierSet
    known: Known
    evidence: str
    url: str = ""
    """The index that lists it, or the file itself (`folder`); empty: the package index."""
    sha256: str = ""

    @property
    def label(self) -> str:
        """`torch 2.12.1+cu130`."""
        return f"torch {self.version}+{self.tag}"

    @property
    def tag(self) -> str:
        """`cu130`, or `cpu`."""
        return "cpu" if self.cuda is None else f"cu{self.cuda.major}{self.cuda.minor}"

    @property
    def triton_version(self) -> Version | None:
        """The lowest version that its pin allows: what it was released with."""
        if self.triton is None:
            return None
        return min(Version(spec.version) for spec in self.triton)


class Source(Protocol):
    """A place where candidates come from. One that cannot be asked raises; it never answers "nothing" instead."""

    @property
    def name(self) -> str:
        """For a person."""

    def find(self, distribution: str) -> tuple[Candidate, ...]:
        """Everything that this place has of a distribution (its normalized name), unfiltered.

        Raises:
            UndeterminedError: the place does not answer, or not in a way that can be used.
        """
