"""An image for a person: what it is called, what is in it, how long it took, and what comes next."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from kernelguard.image.values import Outcome
from kernelguard.judge.values import Status
from kernelguard.report.terminal import close, line, note, print_header


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print what became of a build or a promotion."""
    if not outcome.unchanged:
        print_header(console, _header(outcome))
        for layer in outcome.layers:
            note(console, f"{layer.size / 1e6:>9.1f} MB", layer.made_by[:90], width=14)
        if outcome.layers:
            line(console, Text(f"{sum(layer.size for layer in outcome.layers) / 1e6:>9.1f} MB  in all"))
        if outcome.seconds:
            note(console, "seconds", ", ".join(f"{name} {seconds:.1f}" for name, seconds in outcome.seconds.items()))
        if outcome.fix:
            note(console, "next", outcome.fix)
    close(console, Status.PASS, outcome.text, code=outcome.exit_code, apart=not outcome.unchanged)


def _header(outcome: Outcome) -> Iterator[tuple[str, str]]:
    if outcome.image:
        yield "image", outcome.image
    if outcome.facts is not None:
        yield "id", outcome.facts.id
        yield "content", outcome.facts.content
    if outcome.verdict is not None:
        yield "verdict", str(outcome.verdict)
    if outcome.pushed is not None:
        yield "pushed", outcome.pushed.image
        yield "proof", outcome.pushed.artifact
