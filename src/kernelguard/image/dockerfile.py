"""Read a Dockerfile: stages, and in each what it runs and sets. Nothing is executed. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kernelguard.errors import InputError

_FROM = re.compile(r"^(?:--\S+\s+)*(?P<image>\S+)(?:\s+AS\s+(?P<name>\S+))?$", re.IGNORECASE)
_VARIABLE = re.compile(r"(?<!\\)\$(?:\{(?P<braced>\w+)(?P<op>:?[-+])?(?P<word>[^}]*)\}|(?P<bare>\w+))")
_PAIR = re.compile(r"""(?P<name>[\w.-]+)=(?P<value>"(?:\\.|[^"])*"|'[^']*'|(?:\\.|[^\s\\])*)""")
_HEREDOC = re.compile(r"<<-?\s*(?P<quote>['\"]?)(?P<word>\w+)(?P=quote)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    line: int
    """Where it begins, from 1."""
    word: str
    """Upper case: `RUN`."""
    text: str
    """With the stage's variables filled in where they are known."""
    environment: Mapping[str, str]
    """ENV and ARG as they are at this point; an ARG without a value is empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """From one FROM to the next."""

    line: int
    base: str
    """The image, or the name of an earlier stage, with ARG values filled in."""
    name: str
    instructions: tuple[Instruction, ...]
    environment: Mapping[str, str]
    """ENV alone at its end."""


def read_dockerfile(text: str, *, source: str = "Dockerfile") -> tuple[Stage, ...]:
    """The stages of a Dockerfile, in their order.

    Raises:
        InputError: it has no FROM, or begins with something else.
    """
    stages: list[Stage] = []
    outer: dict[str, str] = {}
    current: _Open | None = None
    for line, word, raw in _instructions(text):
        if word == "FROM":
            if current is not None:
                stages.append(current.close())
            filled = fill(raw, outer)
            shape = _FROM.match(filled)
            if shape is None:
                raise InputError(f"{source}:{line}: FROM {raw} cannot be read", hint="FROM image[:tag] [AS name]")
            inherited = next((s for s in reversed(stages) if s.name == shape["image"].lower()), None)
            environment = dict(inherited.environment) if inherited is not None else {}
            current = _Open(line=line, base=shape["image"], name=(shape["name"] or "").lower(), environment=environment)
        elif word == "ARG" and current is None:
            outer.update(_arguments(raw, outer))
        elif current is None:
            raise InputError(f"{source}:{line}: {word} comes before any FROM", hint="begin with FROM image")
        else:
            current.take(line, word, raw, outer)
    if current is None:
        raise InputError(f"{source} has no FROM", hint="name a Dockerfile")
    return (*stages, current.close())


class _Open:
    """A stage that is being read."""

    def __init__(self, *, line: int, base: str, name: str, environment: dict[str, str]) -> None:
        self.line, self.base, self.name = line, base, name
        self._set = environment
        self._arguments: dict[str, str] = {}
        self._found: list[Instruction] = []

    def take(self, line: int, word: str, raw: str, outer: Mapping[str, str]) -> None:
        known = {**self._arguments, **self._set}
        text = fill(raw, known) if word != "RUN" else raw
        if word == "ENV":
            self._set.update(_environment(text))
        elif word == "ARG":
            self._arguments.update(_arguments(raw, {**outer, **known}, defaults=outer))
        seen = {**self._arguments, **self._set}
        self._found.append(Instruction(line=line, word=word, text=text, environment=seen))

    def close(self) -> Stage:
        return Stage(
            line=self.line,
            base=self.base,
            name=self.name,
            instructions=tuple(self._found),
            environment=dict(self._set),
        )


def chain(stages: tuple[Stage, ...], stage: Stage) -> tuple[Stage, ...]:
    """A stage and the stages that it starts from, the first one first."""
    before = stages[: stages.index(stage)]
    parent = next((s for s in reversed(before) if s.name and s.name == stage.base.lower()), None)
    return (*(chain(stages, parent) if parent is not None else ()), stage)


def fill(text: str, known: Mapping[str, str]) -> str:
    """With variables filled in; unknown ones stay as they are."""

    def value(found: re.Match[str]) -> str:
        name = found["braced"] or found["bare"]
        given = known.get(name, "")
        operator, word = found["op"] or "", found["word"] or ""
        if operator.endswith("-"):
            return given or word
        if operator.endswith("+"):
            return word if given else ""
        return given if name in known else found[0]

    return _VARIABLE.sub(value, text)


def _arguments(raw: str, known: Mapping[str, str], defaults: Mapping[str, str] | None = None) -> dict[str, str]:
    found = {}
    for part in raw.split():
        name, equals, value = part.partition("=")
        found[name] = fill(_unquoted(value), known) if equals else (defaults or {}).get(name, "")
    return found


def _environment(text: str) -> dict[str, str]:
    pairs = {m["name"]: _unquoted(m["value"]) for m in _PAIR.finditer(text)}
    if pairs and _PAIR.match(text):
        return pairs
    name, _, value = text.partition(" ")
    return {name: value.strip()}


def _unquoted(value: str) -> str:
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    escape = "\\"
    directive = re.match(r"(?:#.*\n)*?#\s*escape\s*=\s*(\S)", text)
    if directive is not None:
        escape = directive[1]
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        begin = number
        line = lines[number].strip()
        number += 1
        if not line or line.startswith("#"):
            continue
        parts = [line]
        while parts[-1].endswith(escape) and number < len(lines):
            parts[-1] = parts[-1][:-1].rstrip()
            following = lines[number].strip()
            number += 1
            # Comments and empty lines do not end a continuation.
            parts.append(escape if not following or following.startswith("#") else following)
        joined = " ".join(part for part in parts if part and part != escape).removesuffix(escape)
        word, _, rest = joined.partition(" ")
        if word.upper() in {"RUN", "COPY", "ADD"}:
            for found in _HEREDOC.finditer(rest):
                body = []
                while number < len(lines) and lines[number].strip() != found["word"]:
                    body.append(lines[number].strip())
                    number += 1
                number += 1
                if word.upper() == "RUN":
                    rest += " ; " + " ; ".join(body)
        yield begin + 1, word.upper(), rest.strip()
