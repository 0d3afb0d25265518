"""From a candidate to an image that says it was verified: a cache layer, labels, the verdict beside the lock, a tag."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.image import builders, labels
from kernelguard.image.builders import Order
from kernelguard.image.engine import Engine
from kernelguard.image.evidence import Evidence, dumps
from kernelguard.image.fetch import disk_error
from kernelguard.image.plan import verdict_path
from kernelguard.image.recipe import CACHE, PYTHON, digest_of
from kernelguard.image.values import Builder, Claims, ContextFile, ImageFacts, Outcome, Resolved, State
from kernelguard.judge.values import Level
from kernelguard.lock.values import Lock
from kernelguard.sources.http import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """Where images are made."""

    engine: Engine
    builder: Builder
    environ: Mapping[str, str]
    attested: bool = False
    """SBOM and provenance of what is promoted: a build drops those of the image that it starts from."""


def known(engine: Engine, name: str) -> ImageFacts:
    """The facts of an image that has to be there.

    Raises:
        UndeterminedError: somebody removed it meanwhile.
    """
    facts = engine.image(name)
    if facts is None:
        raise UndeterminedError(f"the image {name} vanished while it was worked on", hint="build again")
    return facts


def with_cache(shop: Workshop, made: str, warmed: bytes, *, timeout: float) -> str:
    """The image with what its Triton compiled and tuned, as one more layer; its id."""
    files = tuple(_cache_files(warmed))
    if not files:
        return made
    engine, classic = shop.engine, shop.builder is Builder.LEGACY
    start = made if classic else engine.tag_for_now(made, "warm")
    text = f"FROM {start}\nCOPY cache/ {CACHE}/\n".encode()
    order = Order(
        files=(ContextFile(path="Dockerfile", content=text, size=len(text)), *files),
        tag="" if classic else f"kernelguard-cached:{engine.run_id}",
    )
    warm = builders.build(engine, shop.builder, order, environ=shop.environ, timeout=timeout)
    engine.tag_for_now(warm, "cached")
    return warm


def _cache_files(warmed: bytes) -> Iterator[ContextFile]:
    with tarfile.open(fileobj=io.BytesIO(warmed)) as archive:
        for member in archive.getmembers():
            handle = archive.extractfile(member) if member.isfile() else None
            if handle is None:
                continue
            body = handle.read()
            below = member.name.partition("/")[2]
            mode = 0o755 if member.mode & 0o100 else 0o644
            yield ContextFile(path=f"cache/{below}", content=body, size=len(body), mode=mode, mtime=int(member.mtime))


def claims_of(
    lock: Lock, proof: Evidence, facts: ImageFacts, recipe: str, base: Resolved | None, *, level: Level
) -> Claims:
    """What an image may say about itself after this proof."""
    fingerprint = proof.verdict.fingerprint
    capability = fingerprint.capability
    gpu = level >= Level.GPU
    return Claims(
        state=State.VERIFIED if gpu else State.CANDIDATE,
        level=level,
        lock=digest_of(lock),
        recipe=recipe,
        verdict=proof.sha256,
        content=facts.content,
        python=PYTHON,
        base_name=base.name if base is not None else "",
        base_digest=base.digest if base is not None else "",
        torch=fingerprint.torch or lock.torch.version,
        cuda=fingerprint.cuda,
        gpu=fingerprint.gpu if gpu else "",
        capability=f"{capability[0]}.{capability[1]}" if gpu and capability else "",
        driver=fingerprint.driver if gpu else "",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def quoted(value: str) -> str:
    """A value in a Dockerfile, so that nothing in it is expanded or ends it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("\n", " ")
    return f'"{escaped}"'


def promote(
    shop: Workshop, facts: ImageFacts, claims: Claims, *, target: str, proof: Evidence, lock_path: Path
) -> Outcome:
    """Add labels, nothing else; write the verdict beside the lock; tag last.

    Raises:
        ToolError: the builder changed more than labels, or the verdict cannot be written. Nothing is tagged.
    """
    engine, classic = shop.engine, shop.builder is Builder.LEGACY
    start = facts.id if classic else engine.tag_for_now(facts.id, "promote")
    # In one instruction: the classic builder makes a step of each label that it is given beside a Dockerfile.
    said = " ".join(f"{name}={quoted(value)}" for name, value in labels.to_labels(claims).items())
    text = f"FROM {start}\nLABEL {said}\n".encode()
    order = Order(
        files=(ContextFile(path="Dockerfile", content=text, size=len(text)),),
        tag="" if classic else f"kernelguard-promoted:{engine.run_id}",
        sbom=shop.attested,
    )
    made = builders.build(engine, shop.builder, order, environ=shop.environ, timeout=600.0)
    engine.tag_for_now(made, "promoted")
    promoted = known(engine, made)
    if promoted.content != facts.content:
        raise ToolError(
            f"promotion changed more than labels: content {promoted.content} after, {facts.content} verified",
            hint="--builder legacy",
        )
    verdict = verdict_path(lock_path)
    try:
        write_whole(verdict, dumps(proof.document))
    except OSError as error:
        raise disk_error(error, verdict) from error
    engine.tag(made, target)
    named = known(engine, target)
    return Outcome(
        image=target,
        facts=named,
        claims=claims,
        verdict=verdict,
        exit_code=0,
        text=f"{target}: {claims.state}, level {claims.level.name.lower()}",
        layers=engine.layers(target),
    )
