"""What would a build do? The request, the resolved base, the recipe and the steps, before anything is made."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelguard.errors import InputError
from kernelguard.image import builders, labels
from kernelguard.image.bases import base_of, needs_toolkit
from kernelguard.image.context import walk
from kernelguard.image.engine import Engine
from kernelguard.image.recipe import Extras, digest_of, make_recipe, wanted_files
from kernelguard.image.running import Subject
from kernelguard.image.sources import source_files, tool_files
from kernelguard.image.values import Builder, ContextFile, Outcome, Recipe, Resolved
from kernelguard.judge.values import Level
from kernelguard.lock.values import Lock

_NAME = re.compile(
    r"(?:[\w.-]+(?::\d+)?/)?"  # registry
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::\w[\w.-]{0,100})?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked on the command line."""

    lock: Lock
    path: Path
    """Of the lock; the verdict is written beside it."""
    image: str
    """The tag to give: `name:tag`."""
    subject: Subject
    level: Level = Level.GPU
    base: str = ""
    builder: Builder | None = None
    add: tuple[Path, ...] = ()
    network: str | None = None
    max_jobs: int | None = None
    no_cache: bool = False
    refresh_base: bool = False
    sbom: bool = False
    cache_ref: str = ""
    keep_failed: bool = False
    timeout: float = 7200.0
    verify_timeout: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a build would do."""

    recipe: Recipe
    base: Resolved
    toolkit: Resolved | None
    builder: Builder
    why_builder: str
    steps: tuple[str, ...]
    notes: tuple[str, ...] = ()


def candidate_name(image: str) -> str:
    """The tag of an image that is not verified on a GPU yet."""
    return f"{with_tag(image)}-candidate"


def with_tag(image: str) -> str:
    """An image name with its tag; without one, `latest` as every tool takes it."""
    return image if ":" in image.rpartition("/")[2] else f"{image}:latest"


def verdict_path(path: Path) -> Path:
    """Where the verdict of a lock's image is kept: beside the lock."""
    return path.with_name(f"{path.stem}.verdict.json")


def check_name(image: str) -> str:
    """The image name, if it can be one.

    Raises:
        InputError: it cannot.
    """
    if not _NAME.fullmatch(image):
        raise InputError(f"{image!r} is no name for an image", hint="-t name:tag, lower case, for example -t train:v1")
    return image


def make_plan(
    request: Request,
    environ: Mapping[str, str],
    cache: Path,
    *,
    resolve: Callable[[str], Resolved],
    fetched: bool,
) -> Plan:
    """Resolve the base, and write the recipe. `fetched`: also get what only source builds need.

    Raises:
        InputError: the lock or a folder cannot be built.
        UndeterminedError: the base, or what a source build needs, cannot be had.
    """
    lock = request.lock
    builder, why = builders.find_builder(request.builder, environ)
    base = base_of(lock, request.base)
    resolved = resolve(base.runtime)
    toolkit = resolve(base.toolkit) if needs_toolkit(lock) else None
    extras = Extras(
        tools=tool_files(lock, cache) if fetched else (),
        sources=source_files(lock, cache, fetched=fetched),
        added=tuple(_added(folder) for folder in request.add),
        max_jobs=request.max_jobs,
    )
    recipe = make_recipe(
        lock, name=request.path.name, base=resolved, toolkit=toolkit, builder=builder, cache=cache, extras=extras
    )
    return Plan(
        recipe=recipe,
        base=resolved,
        toolkit=toolkit,
        builder=builder,
        why_builder=why,
        steps=tuple(_steps(request, builder)),
        notes=tuple(_notes(request, resolved)),
    )


def _steps(request: Request, builder: Builder) -> Iterator[str]:
    yield f"fetch {len(wanted_files(request.lock))} files, each held against the lock's hash"
    yield "build stage system with a network" if builder is Builder.LEGACY else "build; only stage system has a network"
    if builder is Builder.LEGACY:
        yield "build everything else without a network"
    yield "verify --level import in the image, without a network"
    if request.level < Level.GPU:
        yield f"tag {candidate_name(request.image)}; launch refuses it until it is promoted"
        return
    yield "verify --level gpu in the image, with every GPU; this fills the Triton and autotune cache"
    yield "add the cache as the last layer, and verify that image again"
    yield f"promote: labels only, then tag {with_tag(request.image)}"
    yield f"write {verdict_path(request.path).name} beside the lock"


def _notes(request: Request, base: Resolved) -> Iterator[str]:
    if base.local:
        yield f"{base.name} has no registry digest; it is pinned by its id, which only this engine knows"
    if with_tag(request.image).endswith(":latest"):
        yield "the tag is `latest`: what it names changes under whoever uses it; -t name:version is safer"


def _added(folder: Path) -> tuple[str, tuple[ContextFile, ...]]:
    files, unfit = walk(folder)
    if unfit:
        told_of = "; ".join(f"{folder / u.path} {u.why}" for u in unfit)
        names = ", ".join(u.path for u in unfit[:3])
        raise InputError(told_of, hint=f"put {names} into {folder}/.dockerignore, or move it out of the folder")
    return folder.resolve().name, files


def unchanged(engine: Engine, request: Request, plan: Plan) -> Outcome | None:
    """The outcome of the last build, when it still stands: same recipe, same content, verdict in place."""
    wanted = (
        [with_tag(request.image)]
        if request.level >= Level.GPU
        else [
            with_tag(request.image),
            candidate_name(request.image),
        ]
    )
    for name in wanted:
        facts = engine.image(name)
        claims = labels.read_labels(facts.labels) if facts is not None else None
        if facts is None or claims is None or claims.level < request.level:
            continue
        verdict = verdict_path(request.path)
        same = (claims.recipe, claims.lock, claims.content) == (
            plan.recipe.digest,
            digest_of(request.lock),
            facts.content,
        )
        if same and verdict.is_file() and _sha256(verdict) == claims.verdict:
            return Outcome(
                image=name,
                facts=facts,
                claims=claims,
                verdict=verdict,
                exit_code=0,
                text=f"nothing to do: {name} is what this lock makes, verified at level {claims.level.name.lower()}",
                unchanged=True,
                layers=engine.layers(name),
            )
    return None


def _sha256(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
