"""What the commands share: the application object, the console, and writing files whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kernelguard.errors import InputError

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


class LevelName(StrEnum):
    """The claims that can be asked for (`judge.values.Level`), as words of the command line."""

    RESOLVE = "resolve"
    IMPORT = "import"
    INTERPRETED = "interpreted"
    GPU = "gpu"


def console() -> Console:
    """Standard output; rich honours NO_COLOR and FORCE_COLOR."""
    from rich.console import Console

    return Console(highlight=False, emoji=False, markup=False)


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr, on a terminal only; what it yields changes its text."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    with Console(stderr=True).status(text) as status:
        yield status.update


def print_json(document: dict[str, Any]) -> None:
    """Print one JSON object to stdout."""
    typer.echo(json.dumps(document, indent=2, default=str))


def write(path: Path, text: str) -> None:
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


def intent_flags(*, decode: bool, packed: bool | None, signals: str | None) -> dict[str, Any]:
    """Only what was said on the command line."""
    flags: dict[str, Any] = {}
    if decode:
        flags["phase"] = "decoding"
    if packed is not None:
        flags["packed"] = packed
    if signals is not None:
        flags["signals"] = tuple(s.strip() for s in signals.split(",") if s.strip())
    return flags
