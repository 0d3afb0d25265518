"""The documentation as tests see it: its console blocks, and what each needs to be run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from command import ROOT

_FENCE = re.compile(
    r"^(?P<indent> *)(?:<!-- needs: (?P<needs>[a-z ]+) -->\n+ *)?```(?P<info>[^\n`]*)\n(?P<body>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    title: str
    needs: str
    """`index`, `gpu`, `engine`: it cannot be run everywhere. Empty: it can."""
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
            language=language,
            title=title[1] if title else "",
            needs=match["needs"] or "",
            text=body,
        )
