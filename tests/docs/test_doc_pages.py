"""The blocks of the tutorial and the how-to pages are run, and give what the page shows.

A block under `<!-- needs: ... -->` is not run here: a GPU, an engine or the package index is not everywhere. That the
command line takes it is held by test_doc_commands.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import Block, blocks

from command import ROOT
from observed import environment

PAGES = [ROOT / "docs" / "tutorial.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
RUN = {page: [b for b in blocks(page) if not b.needs and b.language in {"console", "yaml"}] for page in PAGES}


def agrees(shown: str, printed: str) -> bool:
    """Whether `printed` is what is shown, where a line `...` stands for any lines."""
    if not shown.strip():
        return True
    parts = [re.escape(part.strip("\n")) for part in re.split(r"(?m)^\.\.\.$", shown)]
    return re.fullmatch(r"(?s)\n*" + r"(?:.*\n)?".join(f"{part}\n*" for part in parts) + r"\n*", printed) is not None


def session(block: Block, folder: Path, variables: dict[str, str]) -> list[str]:
    """Run the commands of one block in one shell, as a person would; what each printed."""
    mark = "--- next command ---"
    # A command may fail, that is what some are shown for, and the next may ask for its code.
    lines = [f'{command}\ncode=$?; printf "%s\\n" "{mark}"; (exit "$code")' for command, _ in block.steps]
    done = subprocess.run(
        ["bash", "-c", "exec 2>&1\n" + "\n".join(lines)],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return [part.lstrip("\n") for part in done.stdout.split(mark)][: len(block.steps)]


@pytest.mark.thorough
@pytest.mark.parametrize("page", [p for p in PAGES if RUN[p]], ids=lambda p: p.stem)
def test_a_page_gives_what_it_shows(page: Path, tmp_path: Path) -> None:
    active = environment(tmp_path / "env", "5.24.0", {})
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    variables = {
        "PATH": f"{active.python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(active.prefix),
        "HOME": str(tmp_path),
        "COLUMNS": "80",
    }
    ran = 0
    for block in RUN[page]:
        if block.language == "yaml":
            if block.title:
                (folder / block.title).write_text(block.text + "\n")
            continue
        for (command, shown), printed in zip(block.steps, session(block, folder, variables), strict=True):
            ran += 1
            assert "Traceback" not in printed
            assert "error: " not in printed, f"{page.name}:{block.line}: $ {command}\n{printed}"
            assert agrees(shown, printed), f"{page.name}:{block.line}: $ {command}\n{printed}\nis shown as\n{shown}"
    assert ran or any(b.language == "yaml" for b in RUN[page])


def test_what_is_shown_is_held_against_what_is_printed() -> None:
    assert agrees("one\n...\nlast\n", "one\ntwo\nthree\nlast\n")
    assert agrees("...\nlast\n", "one\nlast\n")
    assert agrees("one\n...\n", "one\ntwo\n")
    assert not agrees("one\n...\nlast\n", "one\ntwo\n")
    assert not agrees("one\n", "one\ntwo\n")
    assert not agrees("two\n...\n", "one\ntwo\n")
