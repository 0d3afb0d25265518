"""Commands that make pages to look at: profile, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kernelguard.cli.shared import app, console, print_json, takes_stdout, write


@app.command()
def profile(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="TRACE|RUN...",
            help="A torch.profiler trace (.json or .json.gz; one for each rank), or a training run's folder.",
        ),
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the page to this HTML file; - is stdout.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one object (schemas/profile.schema.json).")] = False,
) -> None:
    """Say what bounds a training step and what would help most, from a trace of any training script.

    Example: kernelguard profile trace.json.gz -o profile.html
    """
    from kernelguard.report.profile import print_profile, to_document
    from kernelguard.trace.sources import understand_sources

    to_stderr = takes_stdout("-o", output, as_json=as_json)
    with _reading() as tell:
        found, run, ranks = understand_sources(sources, tell)
    document = to_document(found, run, ranks)
    code = 0 if document["verdict"]["known"] else 3
    if output is not None:
        from kernelguard.report.html.profile_page import render_profile

        write(output, render_profile(document))
    if as_json:
        print_json(document)
    else:
        print_profile(console(stderr=to_stderr), document, code=code)
    raise typer.Exit(code)


@app.command()
def report(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN [RUN]",
            help="A check, verdict, profile or build record (JSON), or a folder that holds some; two: what changed.",
        ),
    ],
    *,
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write; - is stdout.")] = Path(
        "report.html"
    ),
) -> None:
    """Draw a check, a verdict, a build or a training run as one page that needs no network.

    Example: kernelguard report check.json -o report.html
    """
    from kernelguard.errors import InputError
    from kernelguard.report.html.gather import gather
    from kernelguard.report.html.report_page import render_report

    if len(sources) > 2:
        raise InputError(f"{len(sources)} runs were given, at most two can be compared", hint="kernelguard report A B")
    found = []
    for source in sources:
        try:
            found.append(gather(source))
        except InputError as error:
            if _is_trace(source):
                fix = f"kernelguard profile {shlex.quote(str(source))}"
                raise InputError(f"{source} is a profiler trace, and not a report", hint=fix) from error
            raise
    write(output, render_report(found))


def _is_trace(path: Path) -> bool:
    """Whether a file begins as torch.profiler's do; only asked of one that is no report."""
    import gzip
    import zlib

    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            head = file.read(1 << 20)
    except (OSError, EOFError, zlib.error):
        return False
    return b'"traceEvents"' in head or (head.lstrip()[:1] == b"[" and b'"ph"' in head)


@contextmanager
def _reading() -> Iterator[Callable[[Path, int], None]]:
    """A progress bar over the bytes of each file, on stderr, on a terminal only."""
    if not sys.stderr.isatty():
        yield lambda _path, _bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks = {}

        def tell(path: Path, behind: int) -> None:
            if path not in tasks:
                tasks[path] = bar.add_task(f"reading {path.name}", total=path.stat().st_size)
            bar.update(tasks[path], completed=behind)

        yield tell
