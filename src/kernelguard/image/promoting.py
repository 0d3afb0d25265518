"""The walk of `kernelguard promote`: evidence made elsewhere, held against the lock and against this very image."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kernelguard.errors import InputError, UndeterminedError
from kernelguard.image import builders, labels
from kernelguard.image.build import RefusedError
from kernelguard.image.engine import Engine
from kernelguard.image.evidence import Evidence, holds, load_evidence, told
from kernelguard.image.plan import check_name
from kernelguard.image.promotion import Workshop, claims_of, promote
from kernelguard.image.recipe import digest_of
from kernelguard.image.values import Builder, Claims, ImageFacts, Outcome, Resolved
from kernelguard.judge.values import Level, Status
from kernelguard.lock.values import Lock

_CANDIDATE = "-candidate"


def promote_image(
    engine: Engine,
    image: str,
    *,
    lock: Lock,
    lock_path: Path,
    verdict: Path,
    tag: str,
    builder: Builder | None,
    environ: Mapping[str, str],
) -> Outcome:
    """Give a candidate its tag, when the evidence is about its content and proves level gpu for the lock.

    Raises:
        InputError: the image is not here or was not built from this lock, or the evidence is about another image.
        RefusedError: what was measured is a definite no.
        UndeterminedError: the evidence does not decide it: another level, another GPU, a kernel not measured.
    """
    facts = engine.image(image)
    if facts is None:
        raise InputError(f"the engine has no image {image}", hint=f"docker pull {image}, or docker image ls")
    claims = labels.read_labels(facts.labels)
    if claims is None:
        raise InputError(
            f"{image} was not built by `kernelguard build`: it has none of its labels",
            hint="kernelguard build LOCK -t NAME:TAG --require-level import",
        )
    target = check_name(tag or _target(image))
    _same_image(image, facts, claims, lock)
    evidence = load_evidence(verdict)
    if evidence.content != facts.content:
        raise InputError(
            f"{verdict} is about another image: content {evidence.content}, {image} has {facts.content}",
            hint=f"kernelguard verify MODEL --image {image} -o {verdict}, on a GPU machine",
        )
    _proves(evidence, lock, image)
    chosen, _ = builders.find_builder(builder, environ)
    base = Resolved(name=claims.base_name, reference="", digest=claims.base_digest)
    made = claims_of(lock, evidence, facts, claims.recipe, base, level=Level.GPU)
    try:
        engine.sweep()
        shop = Workshop(engine=engine, builder=chosen, environ=environ)
        return promote(shop, facts, made, target=target, proof=evidence, lock_path=lock_path)
    finally:
        engine.cleanup()


def _target(image: str) -> str:
    if not image.endswith(_CANDIDATE):
        raise InputError(
            f"{image} does not end in {_CANDIDATE}, so what to call it then is not known", hint="-t NAME:TAG"
        )
    return image.removesuffix(_CANDIDATE)


def _same_image(image: str, facts: ImageFacts, claims: Claims, lock: Lock) -> None:
    digest = digest_of(lock)
    if claims.lock != digest:
        raise InputError(
            f"{image} was built from another lock: {claims.lock}, this one is {digest}",
            hint="--lock FILE names another",
        )
    if claims.content != facts.content:
        raise InputError(
            f"{image} is no longer what was built: its content is {facts.content}, its labels say {claims.content}",
            hint="build it again; something added a layer or changed its configuration",
        )


def _proves(evidence: Evidence, lock: Lock, image: str) -> None:
    answer = holds(evidence, lock, Level.GPU)
    if answer.status is Status.FAIL:
        raise RefusedError(f"{image} is not promoted: its kernels are a no\n{told(answer.against)}")
    if answer.status is Status.UNKNOWN:
        raise UndeterminedError(f"{image} is not promoted: it is not proven\n{told(answer.against)}")
