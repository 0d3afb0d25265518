"""Commands that execute kernels: verify."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kernelguard.cli.shared import LevelName, app, console, intent_flags, print_json, progress, write


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="A config.json, a folder that holds one, or a hub id.")],
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
    level: Annotated[LevelName, typer.Option(help="How far to go.")] = LevelName.GPU,
    length: Annotated[int, typer.Option(help="The training length in tokens.", min=1)] = 4096,
    warm_cache: Annotated[
        Path | None, typer.Option(help="Leave what Triton compiled and tuned for these shapes in this folder.")
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
    from kernelguard.proof import run_verify
    from kernelguard.verify.files import to_document

    request = Request(
        model=model,
        python=python,
        flags=intent_flags(decode=False, packed=packed, signals=signals),
        timeout=timeout,
    )
    with progress("measuring") as say:
        proof = run_verify(
            request, dict(os.environ), level=Level[level.name], length=length, warm_cache=warm_cache, say=say
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
