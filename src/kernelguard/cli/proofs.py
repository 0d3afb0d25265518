"""Commands that execute kernels: verify."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelguard.cli.shared import LevelName, app, console, intent_flags, print_json, progress, takes_stdout, write
from kernelguard.writing import is_file

if TYPE_CHECKING:
    from kernelguard.judge.values import Level

TRACE_FILE = "kernelguard-trace.json.gz"
"""Beside the verdict, or here."""


@app.command()
def verify(
    model: Annotated[
        str, typer.Argument(metavar="MODEL|LOCK", help="A config.json, a folder that holds one, a hub id, or a lock.")
    ],
    *,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter to look into. Default: $VIRTUAL_ENV's, else `python` on PATH.")
    ] = None,
    image: Annotated[str | None, typer.Option(help="Verify inside this container image, with its interpreter.")] = None,
    packed: Annotated[
        bool | None, typer.Option("--packed/--no-packed", help="Batches hold several samples in one row.")
    ] = None,
    signals: Annotated[
        str | None,
        typer.Option(help="Boundary signals that packed batches carry: position_ids,cu_seq_lens_q,seq_idx."),
    ] = None,
    intent: Annotated[Path | None, typer.Option(help="A TOML or JSON file that says what the run will do.")] = None,
    train_config: Annotated[
        Path | None,
        typer.Option(help="Read the intent from a configuration of Trainer, TRL, axolotl or kernelguard_train."),
    ] = None,
    level: Annotated[LevelName, typer.Option(help="How far to go.")] = LevelName.GPU,
    length: Annotated[
        int | None,
        typer.Option(
            help="The training length in tokens. Default: what a configuration of kernelguard_train says, else 4096.",
            metavar="<int>",
            min=1,
        ),
    ] = None,
    warm_cache: Annotated[
        Path | None,
        typer.Option(help="Leave in this folder what was compiled and tuned, the bundled trainer's first step too."),
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record one training step too, and say which kernels the GPU ran.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="A verdict of this environment whose time was up: measure only what it lacks.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the verdict to this file; - is stdout.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a no.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that it may take.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict (schemas/verdict.schema.json).")] = False,
) -> None:
    """Run each kernel forward and backward against a reference in fp64, at this model's shapes.

    Example: kernelguard verify examples/qwen3.8-27b --level import
    """
    import json

    from kernelguard.check import Request
    from kernelguard.judge.values import Level, exit_code
    from kernelguard.proof import of_lock, run_verify
    from kernelguard.verify.files import to_document

    to_stderr = takes_stdout("-o", output, as_json=as_json)
    flags = intent_flags(decode=False, packed=packed, signals=signals)
    lock = Path(model) if is_lock(Path(model)) else None
    if image is not None:
        here = {"--intent": intent, "--train-config": train_config, "--warm-cache": warm_cache, "--resume": resume}
        _refuse({**here, "--trace": trace or None})
        _inside(
            image,
            Path(model),
            lock,
            flags=flags,
            level=Level[level.name],
            python=str(python or ""),
            length=length,
            timeout=timeout,
            output=output,
            strict=strict,
            as_json=as_json,
        )
        return
    if lock is not None:
        run = of_lock(lock)
        # What the lock was made for; only what is said here and now goes before it.
        model, flags = run.model, {**run.flags, **flags}
    request = Request(
        model=model, python=python, flags=flags, intent_file=intent, train_config=train_config, timeout=timeout
    )
    with progress("measuring") as say:
        proof = run_verify(
            request,
            dict(os.environ),
            level=Level[level.name],
            length=length,
            warm_cache=warm_cache,
            say=say,
            lock=lock,
            trace=(output if output and is_file(output) else Path()).parent / TRACE_FILE if trace else None,
            resume=resume,
        )
    if output is not None:
        write(output, json.dumps(to_document(proof.verdict), indent=1) + "\n", quiet=True)
    if as_json:
        print_json(to_document(proof.verdict))
    else:
        from kernelguard.report.terminal import print_check
        from kernelguard.report.verdict import print_verdict

        out = console(stderr=to_stderr)
        print_check(out, proof.check, closes=False)
        out.print()
        paths = [path.status for path in proof.check.assessment.fast_paths]
        print_verdict(out, proof.verdict, proof.findings, status=proof.status, strict=strict, paths=paths)
    raise typer.Exit(exit_code(proof.status, strict=strict))


def is_lock(path: Path) -> bool:
    """A lock is a file that is no config.json; whether it is a good one is told when it is read."""
    return path.suffix in {".lock", ".toml"} and path.is_file()


def _refuse(options: Mapping[str, object]) -> None:
    """Options that name files of this machine, or that the image's own verification does not know."""
    from kernelguard.errors import InputError

    given = [name for name, value in options.items() if value is not None]
    if given:
        raise InputError(
            f"{given[0]} cannot be combined with --image: it names something outside the container",
            hint="a lock carries its intent; a warm cache is what `kernelguard build` leaves in its image",
        )


def _inside(
    image: str,
    model: Path,
    lock: Path | None,
    *,
    flags: Mapping[str, Any],
    level: Level,
    python: str,
    length: int | None,
    timeout: float,
    output: Path | None,
    strict: bool,
    as_json: bool,
) -> None:
    """The same in a container of that image; the verdict says which content it is about."""
    from kernelguard.check import cache_folder
    from kernelguard.errors import InputError
    from kernelguard.image.engine import connect
    from kernelguard.image.evidence import dumps, make_evidence
    from kernelguard.image.recipe import digest_of
    from kernelguard.image.running import Subject, image_python, verify_inside
    from kernelguard.image.subject import subject_of
    from kernelguard.judge.values import exit_code, worst
    from kernelguard.verify.plan import TRAINING_LENGTH

    if lock is None:
        said = {name: list(v) if isinstance(v, tuple) else v for name, v in flags.items()}
        subject, digest = Subject(model=model, intent=said or None, length=length or TRAINING_LENGTH), ""
    else:
        from kernelguard.lock import load_lock

        read = load_lock(lock)
        subject, digest = subject_of(read, lock, length=length or TRAINING_LENGTH), digest_of(read)
    with connect(dict(os.environ)) as engine, progress("measuring in the image") as say:
        facts = engine.image(image)
        if facts is None:
            raise InputError(f"the engine has no image {image}", hint=f"docker pull {image}, or docker image ls")
        answer, _ = verify_inside(
            engine,
            facts,
            subject,
            level=level,
            python=image_python(facts, python),
            cache=cache_folder(os.environ),
            timeout=timeout,
            say=say,
        )
        evidence = make_evidence(answer, content=facts.content, name=image, lock=digest)
    status = worst(finding.status for finding in evidence.findings)
    if output is not None:
        write(output, dumps(evidence.document), quiet=True)
    if as_json:
        print_json(dict(evidence.document))
    else:
        from kernelguard.report.terminal import print_header
        from kernelguard.report.verdict import print_verdict, verdict_header

        out = console(stderr=takes_stdout("-o", output))
        print_header(out, verdict_header(evidence.verdict, image))
        print_verdict(out, evidence.verdict, evidence.findings, status=status, strict=strict)
    raise typer.Exit(exit_code(status, strict=strict))
