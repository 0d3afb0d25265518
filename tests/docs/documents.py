"""The documentation as tests see it: its console blocks, and what each needs to be run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from command import ROOT

_FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- needs: (?P<needs>[a-z ]+) -->\n+ *)?```(?P<info>[^\n`]*)\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)

NEEDS = {"index", "gpu", "engine", "minutes"}
"""Why a block is not run: a package index, a GPU, a container engine, or it takes minutes."""


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    fence: int
    """The line of its fence: `line`, or below it where the block says what it needs."""
    language: str
    title: str
    needs: str
    """One of NEEDS: it cannot be run everywhere. Empty: it can."""
    text: str

    @property
    def steps(self) -> tuple[tuple[str, str], ...]:
        """Each command with the output that is shown under it."""
        found: list[tuple[str, str]] = []
        for line in self.text.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], ""))
            elif found:
                command, shown = found[-1]
                found[-1] = (command, f"{shown}{line}\n")
        return tuple(found)


def pages() -> tuple[Path, ...]:
    """README, CONTRIBUTING and everything in docs/ that is written by hand."""
    written = sorted((ROOT / "docs").rglob("*.md"))  # docs/reference is made when the site is built
    return (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(p for p in written if p.parent.name != "reference"))


def not_seen(page: Path) -> tuple[int, ...]:
    """Lines at which code begins that a Markdown parser finds and `blocks` does not: indented code, above all.

    What no test sees is neither run nor parsed, so a page may not have any.
    """
    code = [t for t in MarkdownIt().parse(page.read_text(encoding="utf-8")) if t.type in {"fence", "code_block"}]
    return tuple(t.map[0] + 1 for t in code if t.map and t.map[0] + 1 not in {b.fence for b in blocks(page)})


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        language, _, rest = match["info"].strip().partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        indent = len(match["indent"])
        body = "\n".join(line[indent:] for line in match["body"].splitlines())
        yield Block(
            page=page,
            line=text.count("\n", 0, match.start()) + 1,
            fence=text.count("\n", 0, match.start("info")) + 1,
            language=language,
            title=title[1] if title else "",
            needs=match["needs"] or "",
            text=body,
        )
