"""The command line: wires the rooms, prints, exits. Holds no decision.

Everything heavier than typer is imported by the command that needs it: a static check has to be over in a blink.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelguard import __version__
from kernelguard.errors import InputError, KernelguardError

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="kernelguard",
    help="Will this model train on its fused kernels here, and do they compute the right thing?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 the claims hold, 1 a definite no, 2 unusable input, 3 cannot be determined here, "
    "4 another tool failed, 70 a bug in kernelguard.",
)
matrix_app = typer.Typer(no_args_is_help=True, help="The facts about what fits what.")
app.add_typer(matrix_app, name="matrix")


class LevelName(StrEnum):
    """The claims that can be asked for (`judge.values.Level`), as words of the command line."""

    RESOLVE = "resolve"
    IMPORT = "import"
    INTERPRETED = "interpreted"
    GPU = "gpu"


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kernelguard {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


@app.command()
def check(
    model: Annotated[str, typer.Argument(help="A config.json, a folder that holds one, or a hub id.")],
    *,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter to look into. Default: $VIRTUAL_ENV's, else `python` on PATH.")
    ] = None,
    environment: Annotated[
        Path | None, typer.Option(help="An environment captured by `kernelguard observe`, instead of an interpreter.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A machine by name or keys, for example h100 or h100,torch=2.12.1,driver=580.")
    ] = None,
    transformers: Annotated[
        str | None, typer.Option(help="The transformers to read: a folder or a version. Default: the interpreter's.")
    ] = None,
    decode: Annotated[bool, typer.Option("--decode", help="Judge decoding with a cache instead of training.")] = False,
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
    level: Annotated[
        LevelName | None,
        typer.Option(help="The claim. Default: gpu on an interpreter, resolve with --target or --environment."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a no.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that all observing may take together.")] = 300.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (schemas/report.schema.json).")
    ] = False,
    junit: Annotated[Path | None, typer.Option(help="Also write JUnit XML to this file.")] = None,
) -> None:
    """Tell the truth about a model's fast paths: what it needs, what it is bound to, what to do about it.

    Example: kernelguard check examples/qwen3.8-27b --target h100
    """
    from kernelguard.check import Request, run_check

    request = Request(
        model=model,
        python=python,
        environment=environment,
        target=target,
        transformers=transformers,
        flags=_intent_flags(decode=decode, packed=packed, signals=signals),
        intent_file=intent,
        train_config=train_config,
        level=level,
        strict=strict,
        timeout=timeout,
    )
    with _progress("looking into the interpreter"):
        result = run_check(request, dict(os.environ))
    if junit is not None:
        from kernelguard.report.junit import to_junit

        _write(junit, to_junit(result))
    if as_json:
        from kernelguard.report.document import to_document

        _print_json(to_document(result))
    else:
        from kernelguard.report.terminal import print_check

        print_check(_console(), result)
    raise typer.Exit(result.exit_code)


@app.command()
def observe(
    *,
    python: Annotated[
        Path | None, typer.Option(help="The interpreter to look into. Default: $VIRTUAL_ENV's, else `python` on PATH.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write to this file, not to stdout.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds it may take.")] = 120.0,
) -> None:
    """Capture an environment: for `check --environment` elsewhere, and to paste into a support request.

    Example: kernelguard observe -o fast-machine.json
    """
    from kernelguard.observe.files import environment_to_json
    from kernelguard.observe.interpreter import find_interpreter
    from kernelguard.observe.interpreter import observe as observe_interpreter

    interpreter = find_interpreter(python, os.environ)
    with _progress(f"looking into {interpreter}"):
        captured = observe_interpreter(interpreter, timeout=timeout)
    text = environment_to_json(captured)
    if output is None:
        typer.echo(text)
    else:
        _write(output, text + "\n")
        typer.echo(f"wrote {output}", err=True)


@app.command()
def explain(
    rule: Annotated[str, typer.Argument(help="A rule id, as printed by `check` and `matrix list`.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain one rule: when it applies, what happens, how to fix it, and where that is known from.

    Example: kernelguard explain fla-hopper-dqkwg
    """
    from dataclasses import asdict

    from kernelguard.data import matrices
    from kernelguard.judge.rules import explain as explain_rule
    from kernelguard.judge.rules import load_rules

    explanation = explain_rule(rule, load_rules(matrices() / "rules.toml"))
    if as_json:
        _print_json(asdict(explanation))
        return
    from kernelguard.report.terminal import print_explanation

    print_explanation(_console(), explanation)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help="An environment (`observe -o`) or a report (`check --json`).")],
    b: Annotated[Path, typer.Argument(help="Another one of the same kind.")],
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what changed between two machines or two checks, most suspicious first.

    Example: kernelguard diff fast-machine.json slow-machine.json
    """
    from dataclasses import asdict

    from kernelguard.matrix import kernel_packages
    from kernelguard.report.difference import compare, load_document

    differences = compare(load_document(a), load_document(b), kernel_packages().values())
    if as_json:
        rows = [{**asdict(d), "suspicion": d.suspicion.name.lower()} for d in differences]
        _print_json({"schema": 1, "kind": "diff", "a": str(a), "b": str(b), "differences": rows})
        return
    from kernelguard.report.terminal import print_differences

    print_differences(_console(), str(a), str(b), differences)


@matrix_app.command("list")
def matrix_list() -> None:
    """List every rule and every known kernel package.

    Example: kernelguard matrix list
    """
    from kernelguard.data import matrices
    from kernelguard.judge.rules import load_rules
    from kernelguard.matrix import kernel_packages
    from kernelguard.report.terminal import print_matrix

    print_matrix(_console(), load_rules(matrices() / "rules.toml"), kernel_packages().values())


@matrix_app.command("show")
def matrix_show(
    name: Annotated[str, typer.Argument(help="A file below matrices/, for example rules or kernels/fla.")],
) -> None:
    """Print one data file as it is.

    Example: kernelguard matrix show kernels/fla
    """
    from kernelguard.data import matrices

    folder = matrices()
    known = {str(f.relative_to(folder).with_suffix("")): f for f in sorted(folder.rglob("*.toml"))}
    if name not in known:
        raise InputError(f"no matrix is called {name!r}", hint=f"one of: {', '.join(known)}")
    typer.echo(known[name].read_text("utf-8"), nl=False)


@matrix_app.command("check")
def matrix_check(
    folder: Annotated[Path | None, typer.Argument(help="A folder like matrices/. Default: the one that ships.")] = None,
) -> None:
    """Check the data files against their schemas and list every problem.

    Example: kernelguard matrix check matrices
    """
    from kernelguard.data import matrices
    from kernelguard.judge.rules import check_matrices

    where = folder or matrices()
    if not where.is_dir():
        raise InputError(f"{where} is not a folder", hint="kernelguard matrix check matrices")
    problems = check_matrices(where)
    for problem in problems:
        typer.echo(problem)
    typer.echo(f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in {where}", err=True)
    raise typer.Exit(1 if problems else 0)


def main() -> None:
    """Run the command line and exit with the documented code."""
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; everything that is raised becomes a line and a code here."""
    # A command lives for a blink and keeps what it reads: looking for garbage would only cost time.
    gc.disable()
    try:
        code = app(args=arguments, standalone_mode=False)
    except typer.TyperException as error:
        show = getattr(error, "show", None)
        show() if show is not None else typer.echo(f"error: {error}", err=True)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        typer.echo("interrupted", err=True)
        return 130
    except KernelguardError as error:
        typer.echo(f"error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"  fix: {error.hint}", err=True)
        return error.exit_code
    except BrokenPipeError:
        # The reader went away (`| head`); Python would complain again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:  # noqa: BLE001 - the outermost handler: whatever gets here is a bug, and says so
        traceback.print_exc()
        typer.echo(
            f"error: this is a bug in kernelguard {__version__}; please report it with the lines above", err=True
        )
        return 70
    return code if isinstance(code, int) else 0


def _intent_flags(*, decode: bool, packed: bool | None, signals: str | None) -> dict[str, Any]:
    """Only what was said on the command line."""
    flags: dict[str, Any] = {}
    if decode:
        flags["phase"] = "decoding"
    if packed is not None:
        flags["packed"] = packed
    if signals is not None:
        flags["signals"] = tuple(s.strip() for s in signals.split(",") if s.strip())
    return flags


def _console() -> Console:
    """Standard output; rich honours NO_COLOR and FORCE_COLOR."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


@contextlib.contextmanager
def _progress(text: str) -> Iterator[None]:
    """A spinner on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _print_json(document: dict[str, Any]) -> None:
    typer.echo(json.dumps(document, indent=2, default=str))


def _write(path: Path, text: str) -> None:
    """Write beside the file, then rename: a full disk leaves the old file whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(
            f"cannot write {path}: {error.strerror}", hint="name a file in a folder that exists"
        ) from error
