"""What `lock` hands on: exactly which bytes serve which fast path of which model on which target."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

SCHEMA = 1


class Role(StrEnum):
    """Why something is in a lock."""

    KERNEL = "kernel"
    """It, or a part of it, was chosen for a fast path."""
    TORCH = "torch"
    """torch, triton, and what torch brings."""
    DEPENDENCY = "dependency"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """One file that is installed."""

    name: str
    """Normalized distribution name."""
    version: str
    """As the installed metadata will say."""
    filename: str
    url: str
    sha256: str
    role: Role
    size: int | None = None
    direct: bool = False
    """It is installed by its URL, as its file name and its metadata disagree."""
    index: str = ""
    """The extra index that has it; empty: the configured package index."""
    source: str = ""
    verify: tuple[str, ...] = ()
    """What has to be measured before it may be trusted."""
    files_sha256: str = ""
    """Digest over what the wheel's RECORD says of each of its files; empty: the wheel was not opened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFilePin:
    """One file of a hub variant."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HubPin:
    """One build variant of a kernel hub repository."""

    repository: str
    version: int
    """The branch `v<n>` that it was found on. Branches move; the commit does not."""
    commit: str
    variant: str
    files: tuple[HubFilePin, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcePin:
    """Something that the image's build stage builds. Never installed by `sync`."""

    name: str
    version: str
    url: str
    sha256: str
    """Of the sdist; empty with a git source, which has a commit."""
    commit: str
    requires: tuple[str, ...]
    archs: tuple[str, ...]
    arch_variable: str
    archs_note: str
    nvcc: str
    cxx: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedPath:
    """One fast path, and what serves it."""

    symbol: str
    package: str
    served_by: str
    """`causal-conv1d 1.7.0`; empty: nothing does (only in a lock that admits no launch)."""
    layers: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedModel:
    """The model that was locked for."""

    source: str
    model_type: str
    sha256: str
    """Of the config.json, in canonical form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTarget:
    """The machines that the lock is for."""

    spec: str
    python: str
    """major.minor."""
    machine: str
    glibc: str
    """The lowest that every file loads on."""
    driver: str
    """The lowest that the chosen CUDA needs; empty without a GPU."""
    gpus: tuple[str, ...]
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedTorch:
    """The torch that everything was chosen for."""

    version: str
    cuda: str
    """Empty: a CPU build."""
    channel: str
    cxx11_abi: bool
    triton: str
    """Empty: it brings none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """A lock file."""

    model: LockedModel
    intent: tuple[tuple[str, str], ...]
    """Field of the intent -> its value as text; those that were only assumed end in ` (assumed)`."""
    transformers: str
    target: LockedTarget
    torch: LockedTorch
    fast_paths: tuple[LockedPath, ...]
    pins: tuple[Pin, ...]
    admits_launch: bool
    hub: tuple[HubPin, ...] = ()
    sources: tuple[SourcePin, ...] = ()
    notes: tuple[str, ...] = ()
    base_image: str = ""
    """Resolved by digest; filled in when an image is built."""
