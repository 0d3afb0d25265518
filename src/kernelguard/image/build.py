"""The walk of `kernelguard build`: recipe, candidate, verified inside, promoted by labels. Never tagged before that."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kernelguard.errors import KernelguardError, UndeterminedError
from kernelguard.image import builders, labels
from kernelguard.image.builders import Order
from kernelguard.image.complaints import GpuRuntimeError
from kernelguard.image.engine import Engine
from kernelguard.image.evidence import Evidence, holds, make_evidence, told
from kernelguard.image.fetch import Wanted, fetch
from kernelguard.image.plan import Plan, Request, candidate_name, check_name, make_plan, unchanged, with_tag
from kernelguard.image.promotion import Workshop, claims_of, known, promote, with_cache
from kernelguard.image.recipe import CACHE, PYTHON, digest_of, wanted_files
from kernelguard.image.running import verify_inside
from kernelguard.image.values import Builder, ContextFile, ImageFacts, Outcome, Resolved
from kernelguard.judge.values import Level, Status
from kernelguard.lock.values import Lock

Verifier = Callable[..., tuple[Mapping[str, Any], bytes | None]]


class RefusedError(KernelguardError):
    """The image was built, and what was measured in it is a definite no."""

    exit_code = 1


@dataclass(slots=True, kw_only=True)
class Talk:
    """Where a build says what it is at."""

    step: Callable[[str], None] = lambda _: None
    """A new part of the work."""
    line: Callable[[str], None] = lambda _: None
    """A line of what is going on in it."""
    amount: Callable[[str, int, int], None] = lambda _what, _done, _total: None
    """Bytes."""


def resolver(engine: Engine, request: Request, talk: Talk) -> Callable[[str], Resolved]:
    """Resolve image names, a base that an existing image was built on without asking a registry again."""

    def resolve(name: str) -> Resolved:
        return engine.resolve(
            name,
            pull=request.refresh_base,
            progress=lambda done, total: talk.amount(f"pulling {name}", done, total),
        )

    return resolve


@dataclass(slots=True, kw_only=True)
class _Clock:
    seconds: dict[str, float] = field(default_factory=dict)
    _since: float = field(default_factory=time.monotonic)

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name] = round(now - self._since, 2)
        self._since = now


def run_build(
    engine: Engine,
    request: Request,
    environ: Mapping[str, str],
    cache: Path,
    *,
    talk: Talk | None = None,
    verifier: Verifier = verify_inside,
) -> Outcome:
    """Build, verify, promote; what was made on the way is removed, whatever happens.

    Raises:
        RefusedError: the image was built, and does not hold the claim; it was not tagged.
        UndeterminedError: the claim cannot be decided here; the image was not tagged.
        ToolError: a step failed.
        InputError: what was asked for cannot be built.
    """
    say = talk or Talk()
    clock = _Clock()
    check_name(request.image)
    try:
        engine.sweep()
        if request.level >= Level.GPU and not request.lock.admits_launch:
            raise UndeterminedError(
                f"the lock is for {request.lock.target.spec}: an image of it can never be verified on a GPU",
                hint="--require-level import makes a candidate of it",
            )
        say.step("resolving the base image")
        plan = make_plan(request, environ, cache, resolve=resolver(engine, request, say), fetched=True)
        done = unchanged(engine, request, plan)
        if done is not None:
            return done
        if request.level >= Level.GPU:
            _can_give_gpus(engine, plan.base)
        clock.lap("resolve")
        say.step(f"fetching {len(request.lock.pins)} wheels")
        _fetch(request.lock, cache, say)
        clock.lap("fetch")
        inputs = _Inputs(engine=engine, request=request, environ=environ, cache=cache, say=say)
        candidate = _candidate(inputs, plan)
        clock.lap("build")
        return _verified(inputs, plan, candidate, clock, verifier)
    finally:
        engine.cleanup()


def _can_give_gpus(engine: Engine, base: Resolved) -> None:
    """Find out before twenty minutes of building whether a GPU can be had; by asking for one."""
    try:
        with engine.container(base.reference, ["true"], gpu=True) as container:
            engine.run(container, timeout=60.0)
    except GpuRuntimeError as error:
        raise UndeterminedError(f"level gpu cannot be reached here: {error.message}", hint=error.hint) from error


def _fetch(lock: Lock, cache: Path, say: Talk) -> None:
    hub = tuple(
        Wanted(
            url=f"https://huggingface.co/{pin.repository}/resolve/{pin.commit}/build/{pin.variant}/{file.path}",
            filename=Path(file.path).name,
            sha256=file.sha256,
            size=file.size,
        )
        for pin in lock.hub
        for file in pin.files
    )
    fetch((*wanted_files(lock), *hub), cache, progress=lambda d, t: say.amount("fetching", d, t))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    engine: Engine
    request: Request
    environ: Mapping[str, str]
    cache: Path
    say: Talk


def _candidate(inputs: _Inputs, plan: Plan) -> str:
    """Build the recipe; the id of the image, which has no name yet."""
    engine, request, say = inputs.engine, inputs.request, inputs.say
    say.step(f"building with {plan.builder} ({plan.why_builder}), context {plan.recipe.size / 2**20:.1f} MB")
    files = _startable(engine, plan, attested=request.sbom)
    order = Order(
        files=files,
        labels={labels.STAGE: ""},
        online_target="system",
        tag=f"kernelguard-build:{engine.run_id}" if plan.builder is not Builder.LEGACY else "",
        network=request.network,
        no_cache=request.no_cache,
        sbom=request.sbom,
        cache_ref=request.cache_ref,
    )
    made = builders.build(
        engine,
        plan.builder,
        order,
        environ=inputs.environ,
        timeout=request.timeout,
        tell=say.line,
        sent=lambda done, total: say.amount("sending", done, total),
    )
    engine.tag_for_now(made, "build")
    return made


def _startable(engine: Engine, plan: Plan, *, attested: bool) -> tuple[ContextFile, ...]:
    """The context, with names in place of what builders cannot start from.

    BuildKit cannot start from an image id, and asks a registry for a digest that is here. What is attested keeps the
    name that a registry knows.
    """
    text = plan.recipe.dockerfile
    if plan.builder is Builder.LEGACY:
        return plan.recipe.files
    for number, resolved in enumerate(r for r in (plan.base, plan.toolkit) if r is not None):
        facts = engine.image(resolved.reference)
        if facts is not None and (resolved.local or not attested):
            name = engine.tag_for_now(facts.id, f"base{number}")
            text = text.replace(f"FROM {resolved.reference} ", f"FROM {name} ")
    body = text.encode()
    return tuple(
        replace(f, content=body, size=len(body), sha256="") if f.path == "Dockerfile" else f for f in plan.recipe.files
    )


def _verified(inputs: _Inputs, plan: Plan, made: str, clock: _Clock, verifier: Verifier) -> Outcome:
    engine, request, cache, say = inputs.engine, inputs.request, inputs.cache, inputs.say
    shop = Workshop(engine=engine, builder=plan.builder, environ=inputs.environ, attested=request.sbom)

    def evidence(facts: ImageFacts, level: Level, warm: str = "") -> tuple[Evidence, bytes | None]:
        say.step(f"verifying at level {level.name.lower()} in the image")
        answer, warmed = verifier(
            engine,
            facts,
            request.subject,
            level=level,
            python=PYTHON,
            cache=cache,
            warm=warm,
            timeout=request.verify_timeout,
            say=say.line,
        )
        found = make_evidence(answer, content=facts.content, name=request.image, lock=digest_of(request.lock))
        decided = holds(found, request.lock, level)
        if decided.status not in {Status.PASS, Status.WARN}:
            _refuse(inputs, facts, level, decided.status, told(decided.against))
        return found, warmed

    facts = known(engine, made)
    proof, _ = evidence(facts, Level.IMPORT)
    clock.lap("verify import")
    if request.level >= Level.GPU:
        _, warmed = evidence(facts, Level.GPU, CACHE)
        clock.lap("verify gpu")
        if warmed is not None:
            say.step("adding the warm cache as the last layer")
            made = with_cache(shop, made, warmed, timeout=request.timeout)
            facts = known(engine, made)
        proof, _ = evidence(facts, Level.GPU)
        clock.lap("verify warm")
    target = with_tag(request.image) if request.level >= Level.GPU else candidate_name(request.image)
    say.step(f"promoting to {target}")
    claims = claims_of(request.lock, proof, facts, plan.recipe.digest, plan.base, level=request.level)
    outcome = promote(shop, facts, claims, target=target, proof=proof, lock_path=request.path)
    clock.lap("promote")
    return replace(outcome, seconds=clock.seconds)


def _refuse(inputs: _Inputs, facts: ImageFacts, level: Level, status: Status, text: str) -> None:
    """Raise what a claim that does not hold is; the image gets no tag, or one that says that it failed."""
    kept, request = "", inputs.request
    if request.keep_failed:
        name = f"{with_tag(request.image)}-failed"
        inputs.engine.tag(facts.id, name)
        kept = f"; it is kept as {name}"
    message = f"the image was built and is not tagged{kept}: level {level.name.lower()} does not hold in it\n{text}"
    hint = None if request.keep_failed else "--keep-failed keeps the image for a look"
    if status is Status.FAIL:
        raise RefusedError(message, hint=hint)
    raise UndeterminedError(message, hint=hint)
