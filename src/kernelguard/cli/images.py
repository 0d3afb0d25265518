"""Commands about images: build, promote, lint; and what `--image` of check and verify does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelguard.cli.shared import LevelName, app, print_json
from kernelguard.errors import InputError

if TYPE_CHECKING:
    from kernelguard.image.build import Talk
    from kernelguard.image.plan import Plan, Request
    from kernelguard.image.values import Outcome
    from kernelguard.judge.values import Finding


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
    length: Annotated[int, typer.Option(help="The training length in tokens.", min=1)] = 4096,
    max_jobs: Annotated[int | None, typer.Option(help="Compilers at once in source builds.", min=1)] = None,
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
    timeout: Annotated[float, typer.Option(help="Seconds that the build may take.")] = 7200.0,
    verify_timeout: Annotated[float, typer.Option(help="Seconds that each verification may take.")] = 1800.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Build an image from a lock, verify its kernels inside it, and only then give it its tag.

    Example: kernelguard build kernelguard.lock -t train:v1
    """
    from kernelguard.check import cache_folder
    from kernelguard.image.plan import Request
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

    with _termination(), connect(environ) as engine, _talk() as talk:
        if pin_base:
            request = pinned(request, engine)
        outcome = run_build(engine, request, environ, cache, talk=talk)
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Give a candidate its tag, on evidence that was made elsewhere about exactly this content.

    Example: kernelguard promote train:v1-candidate --verdict verdict.json
    """
    from kernelguard.image.engine import connect
    from kernelguard.image.promoting import promote_image
    from kernelguard.image.values import Builder
    from kernelguard.lock import load_lock

    lock = load_lock(lock_file)
    environ = dict(os.environ)
    with _termination(), connect(environ) as engine:
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
    _print_outcome(outcome, as_json=as_json)


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
        typer.echo(f"{error.message}; digests are left open", err=True)
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
    typer.echo(recipe.dockerfile)
    typer.echo(f"# context: {len(recipe.files)} files, {recipe.size / 2**20:.1f} MB")
    for file in recipe.files:
        typer.echo(f"#   {file.size:>12,}  {file.path}")
    typer.echo(f"# base {plan.base.name}: {plan.base.digest or 'its digest is asked for when the image is built'}")
    typer.echo(f"# builder {plan.builder}: {plan.why_builder}")
    typer.echo("# plan:")
    for number, step in enumerate(plan.steps, start=1):
        typer.echo(f"#   {number}. {step}")
    for note in plan.notes:
        typer.echo(f"# note: {note}")


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
        }
        print_json(document)
        return
    from kernelguard.cli.shared import console
    from kernelguard.report.image import print_outcome

    print_outcome(console(), outcome)


@contextlib.contextmanager
def _termination() -> Iterator[None]:
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


@app.command()
def lint(
    dockerfile: Annotated[Path, typer.Argument(help="A Dockerfile, or the folder that holds one.")],
    *,
    driver: Annotated[str, typer.Option(help="The NVIDIA driver where it will run, for example 550.")] = "",
    platform: Annotated[str, typer.Option(help="air: also what Databricks AI Runtime asks of an image.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a no.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Read a Dockerfile of your own, and the folder it lies in, for what will cost the run on the GPU machine.

    Example: kernelguard lint Dockerfile --driver 550
    """
    from kernelguard.image.asking import Asked, lint_file

    _platform(platform)
    findings = lint_file(dockerfile, Asked(driver=_driver(driver), platform=platform))
    raise typer.Exit(_print_findings(str(dockerfile), findings, strict=strict, as_json=as_json))


def check_image(
    image: str,
    *,
    asked: Mapping[str, Any],
    model: str | None,
    outside: Sequence[str],
    arguments: Sequence[str],
    timeout: float,
    as_json: bool,
) -> int:
    """What `kernelguard check --image` does; the exit code.

    `arguments` are those of the check in the container; `outside` were given, and name something that is not in there.
    """
    from kernelguard.check import cache_folder
    from kernelguard.image.asking import Asked, check_inside
    from kernelguard.image.asking import check_image as look
    from kernelguard.image.engine import connect

    if outside:
        raise InputError(f"{outside[0]} cannot be combined with --image: it names something outside the container")
    if model is not None and not Path(model).exists():
        raise InputError(f"{model} is not on this machine", hint="give a config.json or a folder that holds one")
    _platform(asked.get("platform", ""))
    said = Asked(**{**asked, "driver": _driver(asked.get("driver", ""))})
    with _termination(), connect(os.environ) as engine:
        engine.sweep()
        _, findings = look(engine, image, said)
        if model is None:
            return _print_findings(image, findings, strict="--strict" in arguments, as_json=as_json)
        code, output, last = check_inside(
            engine,
            image,
            ["/kernelguard-box/in/model", *arguments],
            Path(model),
            {},
            cache=cache_folder(os.environ),
            python=said.python,
            timeout=timeout,
            environment=_terminal(),
        )
    if code not in {0, 1, 3}:
        typer.echo(last, err=True)
        return code
    if as_json:
        document = json.loads(output)
        document["image"] = {"name": image, "findings": [asdict(f) for f in findings]}
        document["exit_code"] = _worse(code, _code(findings, strict="--strict" in arguments))
        print_json(document)
    else:
        from kernelguard.cli.shared import console
        from kernelguard.judge.values import Status
        from kernelguard.report.terminal import close, count, print_finding

        typer.echo(output)
        for finding in findings:
            print_finding(console(), finding)
        both = _worse(code, _code(findings, strict="--strict" in arguments))
        what = f"{image}, the check above (exit {code}) and {count('finding', (f.status for f in findings))}"
        close(console(), {0: Status.PASS, 1: Status.FAIL, 3: Status.UNKNOWN}[both], what, code=both)
    return _worse(code, _code(findings, strict="--strict" in arguments))


def _print_findings(what: str, findings: Sequence[Finding], *, strict: bool, as_json: bool) -> int:
    from kernelguard.cli.shared import console
    from kernelguard.report.terminal import print_findings

    code = _code(findings, strict=strict)
    if as_json:
        rows = [{**asdict(f), "status": str(f.status)} for f in findings]
        print_json({"schema": 1, "kind": "findings", "subject": what, "exit_code": code, "findings": rows})
    else:
        print_findings(console(), what, findings, code=code)
    return code


def _code(findings: Sequence[Finding], *, strict: bool) -> int:
    from kernelguard.judge.values import exit_code, worst

    return exit_code(worst(f.status for f in findings), strict=strict)


def _worse(*codes: int) -> int:
    return next((code for code in (1, 3) if code in codes), 0)


def _terminal() -> dict[str, str]:
    """What the command in the container needs to print as it would here."""
    import shutil

    found = {"COLUMNS": str(shutil.get_terminal_size().columns)}
    found |= {name: os.environ[name] for name in ("NO_COLOR", "FORCE_COLOR") if name in os.environ}
    return found | ({"FORCE_COLOR": "1"} if sys.stdout.isatty() and "NO_COLOR" not in found else {})


def _driver(text: str) -> str:
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(text)) if text else ""
    except InvalidVersion as error:
        raise InputError(f"{text} is no driver version", hint="--driver 580.95.05, as nvidia-smi prints it") from error


def _platform(name: str) -> None:
    if name not in {"", "air"}:
        raise InputError(f"nothing is known about the platform {name}", hint="--platform air")
