"""A survey for a person: model types with equal answers share an entry."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kernelguard.declare.survey import NOTHING, SurveyRow
from kernelguard.declare.values import TransformersTree
from kernelguard.report.terminal import line, note


def print_survey(
    console: Console,
    tree: TransformersTree,
    rows: Sequence[SurveyRow],
    table: Sequence[tuple[str, str, str, str, str]],
) -> None:
    """Print the table; types that declare nothing are only counted."""
    for types, requirement, packages, symbols, rest in table:
        if requirement == NOTHING and not rest:
            continue
        line(console, Text(types, style="bold"))
        for label, value in (("needs", packages), ("symbols", symbols), ("", rest)):
            if value:
                note(console, label or requirement, value, width=11)
    silent = sum(row.requirement == NOTHING for row in rows)
    console.print()
    line(console, Text(f"transformers {tree.version}: {len(rows)} model types, {silent} of them without any fast path"))
