"""Commands that make images: build, promote."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelguard.cli.shared import LevelName, app, print_json, write
from kernelguard.cli.streams import say, tell
from kernelguard.errors import InputError

if TYPE_CHECKING:
    from kernelguard.image.build import Talk
    from kernelguard.image.engine import Engine
    from kernelguard.image.plan import Plan, Request
    from kernelguard.image.values import Outcome


@app.command()
def build(
    lock_file: Annotated[Path, typer.Argument(metavar="LOCK", help="A lock written by `kernelguard lock`.")],
    *,
    tag: Annotated[str, typer.Option("-t", "--tag", help="The image to make: name:tag.")],
    require_level: Annotated[
        LevelName, typer.Option(help="gpu, or import: a candidate tag where there is no GPU.")
    ] = LevelName.GPU,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Dockerfile, the context and the plan.")] = False,
    model: Annotated[
        str | None, typer.Option(help="Where the lock's model is now, if not where it was locked.")
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="Start from this image instead of docker/base-images.toml's.")
    ] = None,
    add: Annotated[
        list[Path] | None, typer.Option(help="A folder to copy to /workspace/<its name>; several times for several.")
    ] = None,
    builder: Annotated[
        str | None, typer.Option(help="buildx, buildkit or legacy. Default: buildx where it is installed, else legacy.")
    ] = None,
    network: Annotated[
        str | None, typer.Option(help="Docker network of the one stage that may use one, for example host.")
    ] = None,
    length: Annotated[int, typer.Option(help="The training length in tokens.", metavar="<int>", min=1)] = 4096,
    max_jobs: Annotated[
        int | None, typer.Option(help="Compilers at once in source builds.", metavar="<int>", min=1)
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not use the builder's cache.")] = False,
    refresh_base: Annotated[
        bool, typer.Option("--refresh-base", help="Ask the registry for the base's digest of today.")
    ] = False,
    pin_base: Annotated[
        bool, typer.Option("--pin-base", help="Write the resolved base image into the lock, and lock its digest.")
    ] = False,
    sbom: Annotated[bool, typer.Option("--sbom", help="Attach SBOM and provenance (buildx).")] = False,
    cache_ref: Annotated[str, typer.Option(help="A registry reference for the build cache (buildx).")] = "",
    keep_failed: Annotated[
        bool, typer.Option("--keep-failed", help="Keep an image that failed, as NAME:TAG-failed.")
    ] = False,
    send: Annotated[
        bool, typer.Option("--push", help="Push it to the registry in its name, with the verdict attached.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that the build may take.")] = 7200.0,
    verify_timeout: Annotated[float, typer.Option(help="Seconds that each verification may take.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Build an image from a lock, verify its kernels inside it, and only then give it its tag.

    Example: kernelguard build kernelguard.lock -t train:v1
    """
    from kernelguard.check import cache_folder
    from kernelguard.image.plan import Request
    from kernelguard.image.registry import check_reference
    from kernelguard.image.subject import subject_of
    from kernelguard.image.values import Builder
    from kernelguard.judge.values import Level
    from kernelguard.lock import load_lock

    if builder is not None and builder not in list(Builder):
        raise InputError(f"there is no builder {builder}", hint=f"--builder {', '.join(Builder)}")
    if require_level not in {LevelName.GPU, LevelName.IMPORT}:
        raise InputError(
            f"an image is tagged at level gpu or import, not {require_level}", hint="--require-level import"
        )
    if send:
        check_reference(tag)
    lock = load_lock(lock_file)
    request = Request(
        lock=lock,
        path=lock_file,
        image=tag,
        subject=subject_of(lock, lock_file, model=model or "", length=length),
        level=Level[require_level.name],
        base=base or "",
        builder=Builder(builder) if builder else None,
        add=tuple(add or ()),
        network=network,
        max_jobs=max_jobs,
        no_cache=no_cache,
        refresh_base=refresh_base,
        sbom=sbom,
        cache_ref=cache_ref,
        keep_failed=keep_failed,
        timeout=timeout,
        verify_timeout=verify_timeout,
    )
    environ, cache = dict(os.environ), cache_folder(os.environ)
    if dry_run:
        _print_plan(_dry(request, environ, cache), request, as_json=as_json)
        return
    from kernelguard.image.build import run_build
    from kernelguard.image.engine import connect
    from kernelguard.image.pinning import pinned

    with termination(), connect(environ) as engine, _talk() as talk:
        if pin_base:
            request = pinned(request, engine)
        outcome = run_build(engine, request, environ, cache, talk=talk)
        if send:
            outcome = _pushed(engine, outcome, talk)
    _print_outcome(outcome, as_json=as_json)


@app.command()
def promote(
    image: Annotated[str, typer.Argument(help="A candidate made by `kernelguard build --require-level import`.")],
    *,
    verdict: Annotated[Path, typer.Option(help="What `kernelguard verify --image` wrote on a GPU machine.")],
    lock_file: Annotated[Path, typer.Option("--lock", help="The lock that the image was built from.")] = Path(
        "kernelguard.lock"
    ),
    tag: Annotated[
        str | None, typer.Option("-t", "--tag", help="The tag to give. Default: the candidate's without `-candidate`.")
    ] = None,
    builder: Annotated[str | None, typer.Option(help="buildx, buildkit or legacy.")] = None,
    send: Annotated[
        bool, typer.Option("--push", help="Push it to the registry in its name, with the verdict attached.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Give a candidate its tag, on evidence that was made elsewhere about exactly this content.

    Example: kernelguard promote train:v1-candidate --verdict verdict.json
    """
    from kernelguard.image.engine import connect
    from kernelguard.image.promoting import promote_image
    from kernelguard.image.registry import check_reference
    from kernelguard.image.values import Builder
    from kernelguard.lock import load_lock

    lock = load_lock(lock_file)
    environ = dict(os.environ)
    if send:
        check_reference(tag or image)
    with termination(), connect(environ) as engine, _talk() as talk:
        outcome = promote_image(
            engine,
            image,
            lock=lock,
            lock_path=lock_file,
            verdict=verdict,
            tag=tag or "",
            builder=Builder(builder) if builder else None,
            environ=environ,
        )
        if send:
            outcome = _pushed(engine, outcome, talk)
    _print_outcome(outcome, as_json=as_json)


@app.command()
def verdict(
    image: Annotated[str, typer.Argument(help="An image in a registry: registry/name:tag, or @sha256:...")],
    *,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Where to write it. Default: stdout.")] = None,
    plain_http: Annotated[bool, typer.Option("--plain-http", help="Speak to the registry without TLS.")] = False,
) -> None:
    """Get the verdict that is attached to an image in its registry: exactly the one that its labels name.

    Example: kernelguard verdict registry.example/train:v1 -o kernelguard.verdict.json
    """
    from kernelguard.image.registry import Access, find

    body = find(image, Access(plain_http=plain_http, config=os.environ.get("DOCKER_CONFIG", "")))
    write(output or Path("-"), body, quiet=True)


def _pushed(engine: Engine, outcome: Outcome, talk: Talk) -> Outcome:
    from kernelguard.image.pushing import push

    talk.step(f"pushing {outcome.image}")
    return push(engine, outcome, os.environ, amount=lambda done, total: talk.amount("pushing", done, total))


def _dry(request: Request, environ: dict[str, str], cache: Path) -> Plan:
    """The plan, with digests where an engine can be asked; it fetches and makes nothing."""
    from kernelguard.errors import UndeterminedError
    from kernelguard.image.engine import connect
    from kernelguard.image.plan import make_plan
    from kernelguard.image.values import Resolved

    def unresolved(name: str) -> Resolved:
        digest = name.partition("@")[2]
        return Resolved(name=name, reference=name, digest=digest)

    try:
        with connect(environ) as engine:

            def known(name: str) -> Resolved:
                return engine.resolve(name) if engine.image(name) is not None else unresolved(name)

            return make_plan(request, environ, cache, resolve=known, fetched=False)
    except UndeterminedError as error:
        tell(f"{error.message}; digests are left open")
        return make_plan(request, environ, cache, resolve=unresolved, fetched=False)


def _print_plan(plan: Plan, request: Request, *, as_json: bool) -> None:
    recipe = plan.recipe
    if as_json:
        document = {
            "schema": 1,
            "kind": "build-plan",
            "image": request.image,
            "base": {"name": plan.base.name, "reference": plan.base.reference, "digest": plan.base.digest},
            "builder": str(plan.builder),
            "recipe_sha256": recipe.digest,
            "dockerfile": recipe.dockerfile,
            "context": [{"path": f.path, "size": f.size, "sha256": f.sha256} for f in recipe.files],
            "steps": list(plan.steps),
            "notes": list(plan.notes),
        }
        print_json(document)
        return
    say(recipe.dockerfile)
    say(f"# context: {len(recipe.files)} files, {recipe.size / 2**20:.1f} MB")
    for file in recipe.files:
        say(f"#   {file.size:>12,}  {file.path}")
    say(f"# base {plan.base.name}: {plan.base.digest or 'its digest is asked for when the image is built'}")
    say(f"# builder {plan.builder}: {plan.why_builder}")
    say("# plan:")
    for number, step in enumerate(plan.steps, start=1):
        say(f"#   {number}. {step}")
    for note in plan.notes:
        say(f"# note: {note}")


def _print_outcome(outcome: Outcome, *, as_json: bool) -> None:
    facts, claims = outcome.facts, outcome.claims
    if as_json:
        document: dict[str, Any] = {
            "schema": 1,
            "kind": "image",
            "image": outcome.image,
            "text": outcome.text,
            "unchanged": outcome.unchanged,
            "id": facts.id if facts else "",
            "content_sha256": facts.content if facts else "",
            "level": claims.level.name.lower() if claims else "",
            "state": str(claims.state) if claims else "",
            "verdict": str(outcome.verdict) if outcome.verdict else "",
            "layers": [{"size": layer.size, "made_by": layer.made_by} for layer in outcome.layers],
            "seconds": outcome.seconds,
            "pushed": outcome.pushed.image if outcome.pushed else "",
            "verdict_artifact": outcome.pushed.artifact if outcome.pushed else "",
        }
        print_json(document)
        return
    from kernelguard.cli.shared import console
    from kernelguard.report.image import print_outcome

    print_outcome(console(), outcome)


@contextlib.contextmanager
def termination() -> Iterator[None]:
    """A polite kill ends like Ctrl-C: what was made on the way is removed."""

    def interrupted(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _talk() -> Iterator[Talk]:
    """Steps and their lines on stderr; bytes in one line that is written over, on a terminal only."""
    from kernelguard.image.build import Talk

    terminal = sys.stderr.isatty()
    open_line = [False]

    def put(text: str) -> None:
        if open_line[0]:
            sys.stderr.write("\r\x1b[K")
            open_line[0] = False
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def amount(what: str, done: int, total: int) -> None:
        if terminal:
            share = f" of {total / 2**20:,.0f}" if total else ""
            sys.stderr.write(f"\r\x1b[K   {what}: {done / 2**20:,.0f}{share} MB")
            sys.stderr.flush()
            open_line[0] = True

    yield Talk(step=lambda text: put(f"=> {text}"), line=lambda text: put(f"   {text}"), amount=amount)
