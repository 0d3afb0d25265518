"""The blocks of the tutorial, the how-to pages and the trainer's are run, and give what the page shows.

A block under `<!-- needs: ... -->` is not run here: a GPU, an engine or the package index is not everywhere, and a
measurement takes minutes. That the command line takes it is held by test_doc_commands.py. NOT_RUN names the pages of
which that is all, and what runs the same.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from documents import NEEDS, Block, blocks, not_seen, pages

import machines
from command import ROOT
from observed import environment

PAGES = [
    ROOT / "docs" / "tutorial.md",
    ROOT / "docs" / "profile.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "training").glob("*.md")),
]
RUN = {page: [b for b in blocks(page) if not b.needs and b.language in {"console", "yaml", "python"}] for page in PAGES}
NOT_RUN = {
    "README.md": "`make`, one line for each command, and what was said on an H200: held below and by tests/report",
    "docs/guard.md": "needs ranks that train: tests/guard starts them, with the same two lines and the same callback",
    "docs/image.md": "needs an engine and a GPU: tests/engine builds, verifies, promotes and lints",
    "docs/launch.md": "needs a lock that admits a launch, so a GPU: tests/launch does the same below that level",
    "docs/resolve.md": "needs an index with wheels for a GPU: tests/lock does the same with one of its own",
}
"""Pages whose blocks are only parsed (test_doc_commands.py), and where the same is run."""


def agrees(shown: str, printed: str) -> bool:
    """Whether `printed` is what is shown, where a line `...` stands for any lines.

    Of a computed number the first three decimals count: the last ones differ from one CPU to the next.
    """
    if not shown.strip():
        return True
    parts = [re.escape(part.strip("\n")) for part in re.split(r"(?m)^\.\.\.$", shown)]
    parts = [re.sub(r"(\d\\\.\d{3})\d{6,}", r"\1\\d+", part) for part in parts]
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


def at_hand(folder: Path) -> None:
    """The files that the commands of a page name."""
    results = ROOT / "benchmarks" / "results"
    (folder / "examples").symlink_to(ROOT / "examples")
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "docs").symlink_to(ROOT / "docs")
    (folder / "train").symlink_to(ROOT / "train")
    (folder / "runs").mkdir()
    for name in ("runs/mine", "fast", "slow"):
        (folder / name).symlink_to(ROOT / "tests" / "data" / "runs" / "demo-train")
    for name in ("trace.json.gz", "rank0.json.gz", "rank1.json.gz"):
        shutil.copy(results / "verify-h200-trace.json.gz", folder / name)
        (folder / name).chmod(0o644)
    shutil.move(machines.write_check(machines.H200_STOCK_TRITON, folder), folder / "check.json")


@pytest.mark.thorough
@pytest.mark.parametrize("page", [p for p in PAGES if RUN[p]], ids=lambda p: p.stem)
def test_a_page_gives_what_it_shows(page: Path, tmp_path: Path) -> None:
    active = environment(tmp_path / "env", "5.24.0", {})
    folder = tmp_path / "work"
    folder.mkdir()
    at_hand(folder)
    variables = {
        "PATH": f"{active.python.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(active.prefix),
        "HOME": str(tmp_path),
        "COLUMNS": "80",
    }
    if page.parent.name == "training":
        variables["PYTHONPATH"] = str(ROOT / "train")  # what `pip install ./train` does
    ran = 0
    for block in RUN[page]:
        if block.language == "yaml":
            if block.title:
                (folder / block.title).write_text(block.text + "\n")
            continue
        if block.language == "python":
            ran += 1
            done = subprocess.run(
                [active.python, "-c", block.text],
                cwd=folder,
                env={**variables, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{page.name}:{block.line}\n{done.stderr}"
            continue
        for (command, shown), printed in zip(block.steps, session(block, folder, variables), strict=True):
            ran += 1
            assert "Traceback" not in printed
            assert "error: " not in printed, f"{page.name}:{block.line}: $ {command}\n{printed}"
            assert agrees(shown, printed), f"{page.name}:{block.line}: $ {command}\n{printed}\nis shown as\n{shown}"
    assert ran or any(b.language == "yaml" for b in RUN[page])


def test_every_block_is_run_or_it_is_said_why_not() -> None:
    written = {page for page in pages() for block in blocks(page) if block.language != "{toctree}"}
    assert {str(page.relative_to(ROOT)) for page in written - set(PAGES)} == set(NOT_RUN)
    for page in PAGES:
        for block in blocks(page):
            run = block in RUN[page] or block.needs in NEEDS or block.language == "text"
            assert run, f"{page.name}:{block.line}"


@pytest.mark.observed
@pytest.mark.thorough
def test_the_readme_shows_what_is_said_of_the_h200_of_the_verdicts(tmp_path: Path) -> None:
    """Between the machine and the last line; those two say how it was looked at, here from a file."""
    command = "$ kernelguard check examples/qwen3.8-27b --level import\n"
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split(command)[1].split("```")[0]
    printed = machines.checked(machines.H200_STOCK_TRITON, tmp_path).out
    for text in ("torch  ", "gpu  "):
        (line,) = (one for one in shown.splitlines() if one.startswith(text))
        assert line in printed.splitlines()
    found = shown[shown.index("FAIL ") : shown.index("\nFAIL: ")]
    assert found.count("fix: ") == 2
    assert found in printed


def test_no_code_is_written_so_that_no_test_sees_it(tmp_path: Path) -> None:
    """Indented code, above all: `blocks` reads fences alone."""
    found = {str(page.relative_to(ROOT)): not_seen(page) for page in pages()}
    assert not any(found.values()), found
    page = tmp_path / "page.md"
    item, fence, text = "- a\n\n    of the item\n\n", "```console\n    $ x\n```\n\n", "text\n    goes on\n\n"
    page.write_text(f"{item}{fence}{text}    $ y\n\n~~~\n$ z\n~~~\n")
    assert not_seen(page) == (12, 14)


def test_what_is_shown_is_held_against_what_is_printed() -> None:
    assert agrees("one\n...\nlast\n", "one\ntwo\nthree\nlast\n")
    assert agrees("...\nlast\n", "one\nlast\n")
    assert agrees("one\n...\n", "one\ntwo\n")
    assert agrees("off by 1.8502187728881836\n", "off by 1.8502187728891\n")
    assert not agrees("off by 1.8502187728881836\n", "off by 1.8512187728881836\n")
    assert not agrees("took 1.850 s\n", "took 1.851 s\n")
    assert not agrees("one\n...\nlast\n", "one\ntwo\n")
    assert not agrees("one\n", "one\ntwo\n")
    assert not agrees("two\n...\n", "one\ntwo\n")
