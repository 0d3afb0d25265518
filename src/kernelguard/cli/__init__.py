"""The command line: wires the rooms, prints, exits. Holds no decision.

Everything heavier than typer is imported by the command that needs it: a static check has to be over in a blink.
"""

from __future__ import annotations

import copy
import gc
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer
from typer.models import CommandInfo

from kernelguard import __version__
from kernelguard.cli import checks, images, launches, locks, looks, matrix, pages, proofs
from kernelguard.cli.shared import app, complain
from kernelguard.cli.streams import drop_stdout, flush, open_streams, say, tell
from kernelguard.errors import KernelguardError, OutputError

__all__ = ["app", "checks", "images", "launches", "locks", "looks", "main", "matrix", "pages", "proofs", "run"]


READER_GONE = 128 + 13
"""As a shell says it of a program that SIGPIPE ends: the answer was not read to its end, so no answer is given."""


def _version(value: bool) -> None:
    if value:
        say(f"kernelguard {__version__}")
        raise typer.Exit


@app.callback()
def _global(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def _only(arguments: Sequence[str]) -> typer.Typer:
    """The application with nothing but the command that is asked for: building all takes a fifth of a static check."""
    wanted = [c for c in app.registered_commands if arguments and _name(c) == arguments[0]]
    if not wanted:
        return app
    small = copy.copy(app)
    small.registered_commands, small.registered_groups = wanted, []
    return small


def _name(command: CommandInfo) -> str:
    return command.name or getattr(command.callback, "__name__", "").replace("_", "-")


def main() -> None:
    """Run the command line and exit with the documented code."""
    sys.exit(run())


def run(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit code; everything that is raised becomes a line and a code here."""
    # A command lives for a blink and keeps what it reads: looking for garbage would only cost time.
    gc.disable()
    open_streams()
    try:
        try:
            code = _only(sys.argv[1:] if arguments is None else arguments)(args=arguments, standalone_mode=False)
        finally:
            flush()
    except typer.TyperException as error:
        show = getattr(error, "show", None)
        show() if show is not None else complain(str(error))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        tell("interrupted")
        return 130
    except KernelguardError as error:
        complain(error.message, error.hint)
        if isinstance(error, OutputError):
            drop_stdout()
        return error.exit_code
    except (BrokenPipeError, SystemExit) as error:
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise  # typer's own, after it has installed the completion
        # The reader went away (`| head`), which click and rich turn into an exit with 1: that would be an answer.
        drop_stdout()
        return READER_GONE
    except Exception:  # noqa: BLE001 - the outermost handler: whatever gets here is a bug, and says so
        traceback.print_exc()
        complain(f"this is a bug in kernelguard {__version__}; please report it with the lines above")
        return 70
    return code if isinstance(code, int) else 0
