"""Commands that execute kernels: verify."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kernelguard.cli.shared import LevelName, app, console, intent_flags, print_json, progress, write

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
    packed: Annotated[
        bool | None, typer.Option("--packed/--no-packed", help="Batches hold several samples in one row.")
    ] = None,
    signals: Annotated[
        str | None,
        typer.Option(help="Boundary signals that packed batches carry: position_ids,cu_seq_lens_q,seq_idx."),
    ] = None,
    intent: Annotated[Path | None, typer.Option(help="A TOML or JSON file that says what the run will do.")] = None,
    train_config: Annotated[
        Path | None, typer.Option(help="Read the intent from Trainer arguments, a TRL or an axolotl configuration.")
    ] = None,
    level: Annotated[LevelName, typer.Option(help="How far to go.")] = LevelName.GPU,
    length: Annotated[int, typer.Option(help="The training length in tokens.", min=1)] = 4096,
    warm_cache: Annotated[
        Path | None, typer.Option(help="Leave what Triton compiled and tuned for these shapes in this folder.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="Record one training step too, and say which kernels the GPU ran.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="A verdict of this environment whose time was up: measure only what it lacks.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the verdict to this file.")] = None,
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

    flags = intent_flags(decode=False, packed=packed, signals=signals)
    lock = Path(model) if is_lock(Path(model)) else None
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
            trace=(output or Path()).parent / TRACE_FILE if trace else None,
            resume=resume,
        )
    if output is not None:
        write(output, json.dumps(to_document(proof.verdict), indent=1) + "\n")
    if as_json:
        print_json(to_document(proof.verdict))
    else:
        from kernelguard.report.terminal import print_check
        from kernelguard.report.verdict import print_verdict

        print_check(console(), proof.check)
        print_verdict(console(), proof.verdict, proof.findings)
    raise typer.Exit(exit_code(proof.status, strict=strict))


def is_lock(path: Path) -> bool:
    """A lock is a file that is no config.json; whether it is a good one is told when it is read."""
    return path.suffix in {".lock", ".toml"} and path.is_file()
