"""Commands on the data files: matrix list, show, check."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelguard.cli.shared import Group, app, console, progress
from kernelguard.cli.streams import say, tell
from kernelguard.errors import InputError

matrix_app = typer.Typer(cls=Group, no_args_is_help=True, rich_markup_mode=None, help="The facts about what fits what.")
app.add_typer(matrix_app, name="matrix")


@matrix_app.command("list")
def matrix_list() -> None:
    """List every rule and every known kernel package.

    Example: kernelguard matrix list
    """
    from kernelguard.data import matrices
    from kernelguard.judge.rules import load_rules
    from kernelguard.matrix import kernel_packages
    from kernelguard.report.terminal import print_matrix

    print_matrix(console(), load_rules(matrices() / "rules.toml"), kernel_packages().values())


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
    say(known[name].read_text("utf-8"), end="")


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
        say(problem)
    tell(f"{len(problems)} problem{'s' if len(problems) != 1 else ''} in {where}")
    raise typer.Exit(1 if problems else 0)


@matrix_app.command("refresh")
def matrix_refresh(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Also read every wheel's GPU code lists.")] = False,
) -> None:
    """Compare the data files with the package index and show what differs; nothing is overwritten.

    Example: kernelguard matrix refresh
    """
    import os
    import sys

    from kernelguard.check import cache_folder
    from kernelguard.data import matrices
    from kernelguard.sources.http import Http
    from kernelguard.sources.index import IndexSource
    from kernelguard.sources.pipconfig import pip_config
    from kernelguard.sources.refresh import refresh

    http = Http(timeout=30, cache=cache_folder(os.environ) / "http")
    index = IndexSource(pip_config(Path(sys.executable)).index_url, http)
    with progress("asking the package index"):
        difference = refresh(matrices(), index, http, deep=deep)
    for change in difference.changes:
        say(str(change))
    tell(f"{len(difference.changes)} differences")
    raise typer.Exit(1 if difference.changes else 0)
