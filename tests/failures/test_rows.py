"""The table of public failures is complete: each row has a test or a reason, and the page says the same."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
COUNT = 95
"""Rows of the catalogue; kept here so that none is lost."""


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGE = _load(ROOT / "tools" / "failures_page.py")
TABLE = PAGE.rows()
ROWS = {row["id"]: row for row in TABLE["row"]}


def test_every_row_is_there_once() -> None:
    assert len(ROWS) == len(TABLE["row"]) == COUNT
    assert {name[0] for name in ROWS} == set(TABLE["groups"])
    assert Counter(len(set(row) & {"untested", "elsewhere"}) for row in ROWS.values()).keys() <= {0, 1}


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_a_test_or_a_reason(name: str) -> None:
    row = ROWS[name]
    assert set(row) <= {"id", "situation", "verdict", "answer", "untested", "elsewhere"}
    assert row["verdict"] in {"ok", "warn", "fail"}
    assert len(row["situation"]) > 15
    tests = PAGE.tests_by_row().get(name, ())
    if "untested" in row:
        assert not tests
        assert re.search(r"issue \d|needs a GPU|not yet", row["untested"])
    elif "elsewhere" in row:
        file, _, test = row["elsewhere"].partition("::")
        functions = [n.name for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef)]
        assert test in functions
    else:
        assert tests


def test_every_id_of_a_test_is_a_row() -> None:
    assert set(PAGE.tests_by_row()) <= set(ROWS)


def test_the_page_is_in_step() -> None:
    assert PAGE.PAGE.read_text(encoding="utf-8") == PAGE.page(), "run: python tools/failures_page.py"


def test_an_answer_that_differs_says_how_and_why() -> None:
    for row in ROWS.values():
        assert ("answer" not in row) or len(row["answer"].split()) > 3, row["id"]
