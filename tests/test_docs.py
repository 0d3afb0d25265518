"""The documentation names what the code says: every code of a finding, and nothing that is gone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from command import ROOT

SOURCES = [
    *(ROOT / "src/kernelguard/judge").glob("*.py"),
    ROOT / "src/kernelguard/verify/findings.py",
    ROOT / "src/kernelguard/lock/check.py",
]
CODE = re.compile(
    r"[a-z0-9]+(-[a-z0-9]+)+|bound|broken|crashes|hangs|exits|ignored|shadowed|replaced|loads|isolated|locked|fits"
)


def emitted(path: Path) -> Iterator[str]:
    """Codes that stand in the source as the `code` of a finding."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            for keyword in node.keywords:
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    yield str(keyword.value.value)


def documented() -> set[str]:
    """Codes in the first column of the tables of docs/findings.md."""
    found = set()
    for line in (ROOT / "docs/findings.md").read_text().splitlines():
        if line.startswith("| `"):
            found.update(re.findall(r"`([^`]+)`", line.split("|")[1]))
    return found


def test_every_code_of_a_finding_is_documented() -> None:
    codes = {code for path in SOURCES for code in emitted(path)}
    assert len(codes) > 50
    assert codes <= documented()


def test_no_documented_code_is_gone() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    words = set(re.findall(r'"([a-z0-9-]+)"', text))
    for code in documented():
        assert CODE.fullmatch(code) or code.endswith("-*") or code in {"verified", "interpreted"}, code
        assert code in words or code.endswith("-*"), code
