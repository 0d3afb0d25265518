"""Every `kernelguard` command that the documentation shows is one that the command line takes.

Of this repository's other programs that are shown, benchmarks and demos, the file is there and has the options.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer.main
from documents import Block, blocks, pages

from command import ROOT
from kernelguard.cli import app

GROUP: Any = typer.main.get_command(app)


def shown() -> Iterator[tuple[str, str]]:
    """(where, command line) of each that is shown."""
    for page in pages():
        for block in blocks(page):
            lines = block.text.replace("\\\n", " ").splitlines()
            for number, line in enumerate(lines, 1):
                words = line.strip().removeprefix("$ ")
                if block.language in {"console", "bash", "sh", ""} and words.startswith("kernelguard "):
                    yield f"{page.relative_to(ROOT)}:{block.line + number}", words


def programs() -> Iterator[tuple[str, str, str]]:
    """(where, path in this repository, options) of each program that is shown, in a block or in a sentence."""
    for page in pages():
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for found in re.finditer(r"(?<![\w/])((?:benchmarks|docs|tools|tests)/[\w/-]+\.(?:py|sh))([^\n`#]*)", text):
            line = text.count("\n", 0, found.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", found[1], " ".join(re.findall(r"--[a-z-]+", found[2]))


def parse(line: str) -> None:
    """Walk the words through the command line's own parser, without running anything."""
    words = shlex.split(line, comments=True)
    for stop in ("|", "&&", ">", "||", ";", "&"):
        words = words[: words.index(stop)] if stop in words else words
    command, name, words = GROUP, "kernelguard", words[1:]
    while hasattr(command, "commands"):
        assert words, line
        if words[0].startswith("-"):
            command.make_context(name, [*words], resilient_parsing=True)
            return
        name, words = words[0].rstrip(";"), words[1:]
        assert name in command.commands, f"there is no command {name!r}"
        command = command.commands[name]
    # `...` and [ ] stand for what a reader fills in.
    command.make_context(name, [w for w in words if w != "..."])


SHOWN = list(shown())


def test_there_is_something_to_hold() -> None:
    assert len(SHOWN) > 30


@pytest.mark.parametrize(("where", "line"), SHOWN, ids=[where for where, _ in SHOWN])
def test_a_command_that_is_shown_is_taken(where: str, line: str) -> None:
    try:
        parse(line)
    except typer.TyperException as error:
        pytest.fail(f"{where}: {line}: {error.format_message()}")


PROGRAMS = sorted(set(programs()))


@pytest.mark.parametrize(("where", "path", "options"), PROGRAMS, ids=[f"{where}-{path}" for where, path, _ in PROGRAMS])
def test_a_program_that_is_shown_is_there_and_has_the_options(where: str, path: str, options: str) -> None:
    """Read from its text: some import what only a GPU machine has."""
    assert (ROOT / path).is_file(), where
    text = (ROOT / path).read_text(encoding="utf-8")
    assert [option for option in options.split() if f'"{option}"' not in text] == [], where


def test_the_parser_refuses_what_is_not_there() -> None:
    with pytest.raises(typer.TyperException):
        parse("kernelguard check MODEL --no-such-option")
    with pytest.raises(AssertionError):
        parse("kernelguard no-such-command")


def test_every_command_has_an_example_that_is_taken_and_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, command in GROUP.commands.items():
        assert f"kernelguard {name}" in readme, f"README does not name {name}"
        members = command.commands.values() if hasattr(command, "commands") else (command,)
        for member in members:
            examples = [x for x in (member.help or "").splitlines() if "Example: " in x]
            assert examples or hasattr(command, "commands"), f"{name} --help has no example"
            for example in examples:
                parse(example.split("Example: ", 1)[1])


def test_blocks_are_read_as_they_are_written(tmp_path: Any) -> None:
    page = tmp_path / "p.md"
    page.write_text(
        '1. x\n\n    <!-- needs: gpu -->\n    ```console title="a"\n    $ one\n    out\n    $ two\n    ```\n'
    )
    (block,) = blocks(page)
    assert isinstance(block, Block)
    assert (block.needs, block.title, block.steps) == ("gpu", "a", (("one", "out\n"), ("two", "")))
