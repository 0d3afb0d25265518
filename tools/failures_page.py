"""Write docs/failures.md from tests/failures/rows.toml: `python tools/failures_page.py`."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "failures"
PAGE = ROOT / "docs" / "failures.md"
_HEAD = """\
# Public failures

Failures that people reported in public, each with the answer that kernelguard must give. *ok* and *warn* end with 0,
*fail* does not; a row whose answer differs today says so. This page is made by `tools/failures_page.py` from
`tests/failures/rows.toml`; a test keeps it in step.
"""


def rows() -> dict[str, Any]:
    """The table, as it is written."""
    return tomllib.loads((FOLDER / "rows.toml").read_text(encoding="utf-8"))


def tests_by_row() -> dict[str, tuple[str, ...]]:
    """For each id the tests of tests/failures that carry it: in their name, or as a key of a table `CASES`."""
    found: dict[str, list[str]] = {}
    for file in sorted(FOLDER.glob("test_*.py")):
        for row, test in _tests(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(row, []).append(f"{file.relative_to(ROOT).as_posix()}::{test}")
    return {row: tuple(tests) for row, tests in found.items()}


def _tests(module: ast.Module) -> Iterator[tuple[str, str]]:
    uses_table = [
        node.name for node in module.body if isinstance(node, ast.FunctionDef) and "CASES" in ast.unparse(node)
    ]
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for row in re.findall(r"(?<=_)([a-h]\d\d)(?=_)", node.name):
                yield row.upper(), node.name
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "CASES":
            table = node.value
            keys = [k.value for k in table.keys if isinstance(k, ast.Constant)] if isinstance(table, ast.Dict) else []
            for key in filter(lambda k: isinstance(k, str), keys):
                yield from ((str(key), f"{test}[{key!s}]") for test in uses_table or ["CASES"])


def page() -> str:
    """The page."""
    table = rows()
    tested = tests_by_row()
    lines = [_HEAD]
    for letter, title in table["groups"].items():
        lines += [f"## {letter}. {title}", "", "| id | situation | verdict | held by |", "|---|---|---|---|"]
        for row in table["row"]:
            if row["id"].startswith(letter):
                verdict = row["verdict"] + (f" (today {row['answer']})" if "answer" in row else "")
                lines.append(f"| {row['id']} | {row['situation']} | {verdict} | {_held(row, tested)} |")
        lines.append("")
    return "\n".join(lines)


def _held(row: dict[str, Any], tested: dict[str, tuple[str, ...]]) -> str:
    if "untested" in row:
        return f"not tested: {row['untested']}"
    names = (row["elsewhere"],) if "elsewhere" in row else tested.get(row["id"], ())
    return "<br>".join(f"`{name.removeprefix('tests/')}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE.relative_to(ROOT)} written\n")
