"""Commands that start jobs: launch."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelguard.cli.shared import LevelName, app, console, print_json, progress
from kernelguard.cli.streams import say, tell
from kernelguard.errors import InputError, ToolError

if TYPE_CHECKING:
    from kernelguard.launching import Launch, Request


@app.command()
def launch(
    lock: Annotated[Path, typer.Argument(metavar="LOCK", help="A lock written by `kernelguard lock`.")],
    script: Annotated[list[str], typer.Argument(metavar="-- SCRIPT ARGS", help="What to run: train.py, or -m MODULE.")],
    *,
    verdict: Annotated[
        Path | None, typer.Option(help="What `kernelguard verify -o` wrote. Default: LOCK with .verdict.json.")
    ] = None,
    on: Annotated[str, typer.Option(help="torchrun, slurm, kubeflow or air.")] = "torchrun",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print exactly what would be submitted, and write nothing.")
    ] = False,
    model: Annotated[str | None, typer.Option(help="The config.json that was locked. Default: the lock's own.")] = None,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter that trains. Default: $VIRTUAL_ENV's, else `python` on PATH.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="The image that the ranks run in, by digest.")] = None,
    transformers: Annotated[
        str | None, typer.Option(help="With --image: transformers' source, a folder or a version.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Machines.")] = 1,
    processes: Annotated[int | None, typer.Option(help="Ranks on each machine. Default: its GPUs.")] = None,
    max_restarts: Annotated[int, typer.Option(help="torchrun's; what must not be restarted is not.")] = 0,
    stop_within: Annotated[float, typer.Option(help="Seconds that ranks may take to save after SIGTERM.")] = 600.0,
    option: Annotated[
        list[str] | None, typer.Option("-o", "--option", help="KEY=VALUE for the engine: -o partition=gpu.")
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where ticket, outcome and attestation go. Default: runs/...")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The job's name.")] = None,
    warm_cache: Annotated[
        Path | None, typer.Option(help="What `verify --warm-cache` left: ranks are ready in seconds, not minutes.")
    ] = None,
    rendezvous: Annotated[float, typer.Option(help="Seconds until every rank has to have answered.")] = 90.0,
    probes: Annotated[float | None, typer.Option(help="Seconds for the probes of each rank.")] = None,
    collectives: Annotated[
        float, typer.Option(help="Seconds for the collectives that ranks try together; 0: none.", min=0.0)
    ] = 120.0,
    accept_older_driver_branch: Annotated[
        bool,
        typer.Option("--accept-older-driver-branch", help="Admit a driver older than the verdict's, above the floor."),
    ] = False,
    accept_unmeasured: Annotated[
        list[str] | None, typer.Option(help="Admit this kernel although the verdict cannot tell whether it is right.")
    ] = None,
    accept_other_dependencies: Annotated[
        bool, typer.Option("--accept-other-dependencies", help="Admit other versions of what holds no kernel.")
    ] = False,
    test_only_accept_level: Annotated[
        LevelName, typer.Option(help="For tests without a GPU: admit on a verdict of this level.")
    ] = LevelName.GPU,
    as_json: Annotated[bool, typer.Option("--json", help="With --dry-run: print one JSON object.")] = False,
) -> None:
    """Start training where a lock and a verdict say that it is right, with a guard in every rank.

    Example: kernelguard launch kernelguard.lock --verdict verdict.json --processes 8 -- train.py --lr 1e-5
    """
    from kernelguard.guard.question import Overrides
    from kernelguard.judge.values import Level, exit_code
    from kernelguard.launching import Request, run_launch, write_run

    overrides = Overrides(
        accept_level=Level[test_only_accept_level.name],
        accept_older_driver=accept_older_driver_branch,
        accept_unmeasured=tuple(accept_unmeasured or ()),
        accept_other_dependencies=accept_other_dependencies,
    )
    request = Request(
        lock=lock,
        script=tuple(script),
        verdict=verdict,
        model=model,
        python=python,
        image=image,
        transformers=transformers,
        engine=on,
        nodes=nodes,
        processes=processes,
        max_restarts=max_restarts,
        stop_within_s=stop_within,
        options=_options(option or []),
        overrides=overrides,
        run_dir=run_dir,
        name=name,
        warm_cache=warm_cache,
        probe_s=probes,
        collective_s=collectives,
        rendezvous_s=rendezvous,
    )
    with progress("asking for admission") as say:
        found = run_launch(request, dict(os.environ), say)
    if as_json:
        print_json(_document(found))
    else:
        _print(request, found, dry_run=dry_run)
    if not found.admission.admitted:
        raise typer.Exit(exit_code(found.admission.status))
    if not dry_run:
        write_run(found)
        raise typer.Exit(_submit(found))


def _options(given: list[str]) -> dict[str, str]:
    found = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"-o {text} is no KEY=VALUE", hint="-o partition=gpu")
        found[key] = value
    return found


def _submit(found: Launch) -> int:
    """Hand over. torchrun takes this process's place, so that every signal reaches its supervisor."""
    submission = found.submission
    if submission is None:
        raise AssertionError("only what was admitted is submitted")
    if submission.runs_here:
        tell(f"run directory {found.run_dir}")
        _replace_this_process(submission.argv)
    program = shutil.which(submission.argv[0])
    if program is None:
        raise ToolError(
            f"{submission.argv[0]} is not here, so {found.engine.name} cannot be asked",
            hint=f"where it is: {shlex.join(submission.argv)}",
        )
    done = subprocess.run([program, *submission.argv[1:]], check=False)
    if done.returncode:
        raise ToolError(f"{submission.argv[0]} ended with code {done.returncode}", hint=shlex.join(submission.argv))
    return 0


def _replace_this_process(argv: tuple[str, ...]) -> None:
    try:
        os.execvp(argv[0], list(argv))  # noqa: S606 - no shell, on purpose
    except OSError as error:
        raise ToolError(f"{argv[0]} cannot be started: {error.strerror}") from error


def _print(request: Request, found: Launch, *, dry_run: bool) -> None:
    """Why, and, in a dry run, everything that would be submitted; the talk goes to stderr."""
    from kernelguard.guard.question import order
    from kernelguard.judge.values import exit_code
    from kernelguard.lock import load_lock
    from kernelguard.report.lock import lock_header
    from kernelguard.report.terminal import print_findings, print_header

    admission = found.admission
    admitted = admission.admitted
    talk = console(stderr=admitted)
    findings = tuple(order(admission.findings if admitted else admission.refusals))
    print_header(talk, lock_header(load_lock(request.lock), request.lock, request.python))
    about = f"admitted to {found.engine.name}" if admitted else "not admitted, nothing was started"
    print_findings(talk, about, findings, code=None if admitted else exit_code(admission.status))
    for override in admission.overrides:
        tell(f"override: {override}")
    if admitted and dry_run and found.submission is not None:
        for name, text in found.submission.files:
            say(f"# {found.run_dir / name}")
            say(text, end="" if text.endswith("\n") else "\n")
        say("# command")
        say(shlex.join(found.submission.argv))


def _document(found: Launch) -> dict[str, object]:
    from kernelguard.judge.values import exit_code

    admission, submission = found.admission, found.submission
    return {
        "schema": 1,
        "status": str(admission.status),
        "exit_code": exit_code(admission.status),
        "admitted": admission.admitted,
        "overrides": list(admission.overrides),
        "findings": [
            {"code": f.code, "status": str(f.status), "reason": f.reason, "fix": f.fix} for f in admission.findings
        ],
        "engine": found.engine.name,
        "run_dir": str(found.run_dir),
        "files": dict(submission.files) if submission is not None else {},
        "command": list(submission.argv) if submission is not None else [],
    }
