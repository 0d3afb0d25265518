"""--help at 80 columns: every word of every description is there, nothing is cut off, nothing runs past the edge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer.main

from command import Command
from kernelguard.cli import app


def commands(group: Any, *words: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield words, group
    for name, command in getattr(group, "commands", {}).items():
        yield from commands(command, *words, name)


COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize(("words", "command"), COMMANDS, ids=[" ".join(words) or "all" for words, _ in COMMANDS])
def test_help_is_whole_at_80_columns(words: tuple[str, ...], command: Any) -> None:
    done = Command(*words, "--help", env={"COLUMNS": "80"})
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in done.out
    # A line may end behind a hyphen.
    text = "".join(done.out.split())
    told = [command.help, *(getattr(p, "help", None) for p in command.params)]
    told += [c.help.split("\n\n")[0] for c in getattr(command, "commands", {}).values()]
    for said in filter(None, told):
        assert "".join(said.replace("\b", "").split()) in text
    for parameter in command.params:
        for name in [*parameter.opts, *parameter.secondary_opts] if parameter.param_type_name == "option" else []:
            assert name in text
