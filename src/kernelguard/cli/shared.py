"""What the commands share: the application object, the console, and writing files whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from kernelguard.cli.streams import say, tell
from kernelguard.errors import InputError
from kernelguard.writing import is_stdout, write_file

if TYPE_CHECKING:
    from rich.console import Console


class Group(TyperGroup):
    """Lists its commands with all that their first paragraph says; click cuts it off at the terminal's edge."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the section `Commands` of --help."""
        del ctx
        rows = [(name, (command.help or "").split("\n\n")[0]) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl([(name, " ".join(text.split())) for name, text in rows])


app = typer.Typer(
    cls=Group,
    name="kernelguard",
    help="Will this model train on its fused kernels here, and do they compute the right thing?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # Its boxes leave a description 16 of 80 columns, and cut words off that are to be copied.
    rich_markup_mode=None,
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


def console(*, stderr: bool = False) -> Console:
    """Standard output, or what stands for it while a file goes there; rich honours NO_COLOR and FORCE_COLOR."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, emoji=False, markup=False)


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
    say(json.dumps(document, indent=2, default=str))


def complain(message: str, hint: str | None = None) -> None:
    """Say on stderr why there is no answer, and what to do; wrapped for whoever looks at it, whole lines in a log."""
    seen = sys.stderr is not None and (sys.stderr.isatty() or os.environ.get("COLUMNS", "").isdigit())
    for label, text in (("error: ", message), ("  fix: ", hint)):
        if text:
            tell(label + (_beside(label, text) if seen else text))


def _beside(label: str, text: str) -> str:
    from kernelguard.report.lines import filled

    return f"\n{' ' * len(label)}".join(filled(text, max(20, shutil.get_terminal_size().columns - len(label))))


def write(path: Path, content: str | bytes, *, quiet: bool = False) -> None:
    """Write what an option such as -o names, and say so; `-` is stdout."""
    write_file(path, content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)
    if not quiet and not is_stdout(path):
        tell(f"wrote {path}")


def takes_stdout(option: str, path: Path | None, *, as_json: bool = False) -> bool:
    """Whether this file goes to stdout, so that what is meant for a person has to go to stderr.

    Raises:
        InputError: one JSON object is to go there as well.
    """
    if path is None or not is_stdout(path):
        return False
    if as_json:
        raise InputError(f"{option} {path} and --json both write to stdout", hint=f"{option} FILE, or leave one out")
    return True


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
