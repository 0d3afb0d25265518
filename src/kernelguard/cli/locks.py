"""Commands that pin: lock, sync."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelguard.cli.shared import app, console, intent_flags, progress
from kernelguard.cli.streams import tell
from kernelguard.errors import InputError
from kernelguard.writing import is_file

if TYPE_CHECKING:
    from kernelguard.judge.values import Finding


@app.command()
def lock(
    model: Annotated[str | None, typer.Argument(help="A config.json, a folder that holds one, or a hub id.")] = None,
    *,
    target: Annotated[
        list[str] | None, typer.Option(help="A machine, as for check; several times for a fleet that one set serves.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the lock.")] = Path("kernelguard.lock"),
    transformers: Annotated[
        str | None, typer.Option(help="The transformers to read and to lock: a folder or a version.")
    ] = None,
    packed: Annotated[
        bool | None, typer.Option("--packed/--no-packed", help="Batches hold several samples in one row.")
    ] = None,
    intent: Annotated[Path | None, typer.Option(help="A TOML or JSON file that says what the run will do.")] = None,
    train_config: Annotated[
        Path | None,
        typer.Option(help="Read the intent from a configuration of Trainer, TRL, axolotl or kernelguard_train."),
    ] = None,
    index: Annotated[list[str] | None, typer.Option(help="A further package index, by URL.")] = None,
    find_links: Annotated[list[Path] | None, typer.Option(help="A folder with wheels.")] = None,
    allow_source_build: Annotated[
        bool, typer.Option("--allow-source-build", help="Where no wheel fits, pin a source to be built in the image.")
    ] = False,
    cross_torch: Annotated[
        bool, typer.Option("--cross-torch", help="A wheel for a torch up to two minors older may be used.")
    ] = False,
    record: Annotated[
        bool, typer.Option("--record", help="Instead of resolving: pin what --python has installed, as it is.")
    ] = False,
    check: Annotated[Path | None, typer.Option(help="Instead: hold an environment against this lock.")] = None,
    python: Annotated[Path | None, typer.Option(help="With --check or --record: its interpreter.")] = None,
) -> None:
    """Pin the newest set of builds that serves every fast path of a model on a machine, down to the byte.

    Example: kernelguard lock examples/qwen3.8-27b --target h100 --transformers 5.24.0
    """
    from kernelguard.locking import Request, run_lock, run_lock_check
    from kernelguard.resolve import Options

    if check is not None:
        interpreter = _interpreter(python)
        raise typer.Exit(_report(check, interpreter, run_lock_check(check, interpreter)))
    if not is_file(output):
        raise InputError(
            f"-o {output} is no place for a lock: requirements.txt and pylock.toml are written beside it",
            hint="name a file: -o kernelguard.lock",
        )
    if model is None:
        raise InputError("no model was given", hint="kernelguard lock MODEL --target h100")
    request = Request(
        model=model,
        targets=tuple(target or ()),
        transformers=transformers,
        flags=intent_flags(decode=False, packed=packed, signals=None),
        intent_file=intent,
        train_config=train_config,
        indexes=tuple(index or ()),
        find_links=tuple(find_links or ()),
        options=Options(allow_source_build=allow_source_build, cross_torch=cross_torch),
    )
    if record:
        from kernelguard.locking import run_record

        with progress("reading and hashing"):
            recorded = run_record(request, python, output, dict(os.environ))
        admits = "" if recorded.admits_launch else "; it admits no launch, because no GPU runs every fast path"
        tell(f"wrote {output}: {len(recorded.pins)} distributions as installed{admits}")
        return
    with progress("resolving and hashing"):
        made, files = run_lock(request, output, dict(os.environ))
    from kernelguard.report.lock import print_lock

    print_lock(console(), made, output)
    for file in files:
        tell(f"wrote {file}")


@app.command()
def sync(
    lock_file: Annotated[Path, typer.Argument(metavar="LOCK", help="A lock written by `kernelguard lock`.")],
    *,
    python: Annotated[Path, typer.Option(help="The interpreter of the environment to make exactly that.")],
    keep_extra: Annotated[
        bool, typer.Option("--keep-extra", help="Leave distributions that are not in the lock.")
    ] = False,
) -> None:
    """Put exactly the lock's bytes into an environment, then hold it against the lock.

    Example: kernelguard sync kernelguard.lock --python env/bin/python
    """
    from kernelguard.locking import run_sync

    interpreter = _interpreter(python)
    with progress("installing"):
        findings = run_sync(lock_file, interpreter, dict(os.environ), keep_extra=keep_extra)
    raise typer.Exit(_report(lock_file, interpreter, findings))


def _interpreter(python: Path | None) -> Path:
    from kernelguard.observe.interpreter import find_interpreter

    return Path(find_interpreter(python, os.environ))


def _report(path: Path, python: Path, findings: Sequence[Finding]) -> int:
    """Print what was found when an interpreter was held against a lock; the exit code that it makes."""
    from kernelguard.judge.values import exit_code, worst
    from kernelguard.lock import load_lock
    from kernelguard.report.lock import lock_header
    from kernelguard.report.terminal import print_findings, print_header

    code = exit_code(worst(f.status for f in findings))
    print_header(console(), lock_header(load_lock(path), path, python))
    print_findings(console(), path.name, findings, code=code)
    return code
