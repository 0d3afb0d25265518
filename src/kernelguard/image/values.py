"""What `image` hands on: a recipe, what an engine did with it, and what an image claims about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from packaging.version import Version

from kernelguard.judge.values import Level


class Builder(StrEnum):
    """Who carries out a Dockerfile."""

    LEGACY = "legacy"
    """The engine's own classic builder, through its API."""
    BUILDKIT = "buildkit"
    """BuildKit through a docker command before 23, which needs no plugin for it."""
    BUILDX = "buildx"
    """BuildKit through the buildx plugin: cache, SBOM and provenance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """One row of `docker/base-images.toml`, filled in for a Python."""

    cuda: Version | None
    """None: for CPU builds of torch."""
    runtime: str
    """Name of the image that the product starts from."""
    toolkit: str
    """Name of an image that has this CUDA's nvcc; empty: none."""
    glibc: Version
    """Of the runtime image."""
    driver: Version | None
    """The driver that this CUDA was released with."""
    compatible: Version | None
    """Enough for programs built with any minor release of the same CUDA major."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """An image name, and the digest it has been pinned to."""

    name: str
    """As a person writes it: `python:3.12-slim-bookworm`."""
    reference: str
    """What stands behind FROM: `name@sha256:...`, or an image id where no registry has it."""
    digest: str
    """`sha256:...`"""
    local: bool = False
    """Only this engine has it: the digest is an image id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextFile:
    """One file of a build context: bytes made here, or a file on disk."""

    path: str
    """In the context, with slashes."""
    content: bytes | None = None
    source: Path | None = None
    sha256: str = ""
    """Of a file on disk, where it is known before it is read."""
    size: int = 0
    mode: int = 0o644
    mtime: int = 315_532_800
    """1980-01-01: the same files give the same bytes, and zip files can hold the date."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what a build makes."""

    dockerfile: str
    files: tuple[ContextFile, ...]
    digest: str
    """Over the Dockerfile, every path, and every digest."""
    python: str
    """The interpreter inside the image."""
    cache: str
    """The folder inside the image that holds what Triton compiled and tuned."""
    user: str

    @property
    def size(self) -> int:
        """Bytes of the whole context."""
        return sum(file.size for file in self.files)


class State(StrEnum):
    """How far an image has come."""

    CANDIDATE = "candidate"
    """Built, and every kernel loads in it. Nothing is known about what they compute."""
    VERIFIED = "verified"
    """Its kernels passed forward and backward on a GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """What an image's labels say. A claim, not a proof: the digests lead to the proof."""

    state: State
    level: Level
    lock: str
    """Digest of the lock."""
    recipe: str
    verdict: str
    """sha256 of the verdict file's bytes."""
    content: str
    """The content identity that was verified."""
    python: str
    base_name: str = ""
    base_digest: str = ""
    torch: str = ""
    cuda: str = ""
    gpu: str = ""
    capability: str = ""
    driver: str = ""
    created: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFacts:
    """What an engine says about an image."""

    id: str
    tags: tuple[str, ...]
    content: str
    """Content identity: over layers and configuration, labels left out."""
    labels: dict[str, str]
    layers: tuple[str, ...]
    size: int
    user: str
    environment: tuple[str, ...]
    working_dir: str = ""
    repo_digests: tuple[str, ...] = ()
    architecture: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer and what made it."""

    size: int
    """Bytes."""
    made_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """An image in a registry, and its verdict beside it there."""

    image: str
    """By digest: `registry/name@sha256:...`."""
    artifact: str
    """The artifact that holds the verdict, by digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a build or a promotion."""

    image: str
    """The tag that was given, or empty: none was."""
    facts: ImageFacts | None
    claims: Claims | None
    verdict: Path | None
    """Where the verdict was written."""
    exit_code: int
    text: str
    """One sentence."""
    fix: str = ""
    unchanged: bool = False
    layers: tuple[Layer, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    """By step."""
    pushed: Attached | None = None
