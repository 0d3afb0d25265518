"""What can a rule ask for? The closed grammar of `[rule.when]`: each key, the form of its value, its predicate."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packaging.utils import canonicalize_name

from kernelguard.judge.bounds import Bounds
from kernelguard.judge.predicates import (
    CHOICES,
    FLAGS,
    VERSIONS,
    VIA,
    Absent,
    AnyOf,
    Differ,
    Flag,
    GpuIs,
    HeadDim,
    Installed,
    OneOf,
    Predicate,
    Uses,
    Variable,
    VersionIn,
    Via,
)


def parse_when(table: Mapping[str, Any]) -> tuple[Predicate, ...]:
    """Read a `[rule.when]` table.

    Raises:
        ValueError: a key is none of the grammar, or its value is not of the right form; all problems are named.
    """
    predicates: list[Predicate] = []
    problems: list[str] = []
    for key, value in table.items():
        parser = _PARSERS.get(key)
        if parser is None:
            near = difflib.get_close_matches(key, _PARSERS, n=1)
            problems.append(f"unknown condition {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
            continue
        try:
            predicates.extend(parser(key, value))
        except ValueError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise ValueError("; ".join(problems))
    return tuple(predicates)


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise ValueError(f"expected a list of words, not {value!r}")
    return tuple(value)


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not value:
        raise ValueError(f"expected a table, not {value!r}")
    return value


def _bounds(value: Any) -> Bounds:
    if not isinstance(value, str):
        raise ValueError(f"expected a version specifier, not {value!r}")  # noqa: TRY004 - problems are one kind here
    return Bounds.parse(value)


def _flag(key: str, value: Any) -> Sequence[Predicate]:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, not {value!r}")  # noqa: TRY004 - as above
    return (Flag(key, value),)


def _gpu(_key: str, value: Any) -> Sequence[Predicate]:
    patterns = _words(value)
    if wrong := [p for p in patterns if not re.fullmatch(r"\d+\.(\d|\*)", p)]:
        raise ValueError(f"{wrong[0]!r} is no compute capability such as '9.0' or '10.*'")
    return (GpuIs(patterns),)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split("|"))
    if wrong := [name for name in names if name != canonicalize_name(name)]:
        raise ValueError(f"{wrong[0]!r} is no normalized distribution name")
    return names


def _packages(_key: str, value: Any) -> Sequence[Predicate]:
    return [Installed(_names(names), _bounds(spec)) for names, spec in _table(value).items()]


def _absent(_key: str, value: Any) -> Sequence[Predicate]:
    return [Absent(_names(name)[0]) for name in _words(value)]


def _differ(_key: str, value: Any) -> Sequence[Predicate]:
    names = _words(value)
    if len(names) != 2:
        raise ValueError(f"expected two distributions, not {len(names)}")
    return (Differ((names[0], names[1])),)


def _via(_key: str, value: Any) -> Sequence[Predicate]:
    rows = {_names(name)[0]: _words(values) for name, values in _table(value).items()}
    if wrong := [v for values in rows.values() for v in values if v not in VIA]:
        raise ValueError(f"{wrong[0]!r} is none of {', '.join(VIA)}")
    return [Via(name, values) for name, values in rows.items()]


def _any(_key: str, value: Any) -> Sequence[Predicate]:
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError("expected a list of two or more tables")
    return (AnyOf(tuple(parse_when(_table(group)) for group in value)),)


_Parser = Callable[[str, Any], Sequence[Predicate]]
_PARSERS: dict[str, _Parser] = {
    **dict.fromkeys(VERSIONS, lambda key, value: (VersionIn(key, _bounds(value)),)),
    **dict.fromkeys(CHOICES, lambda key, value: (OneOf(key, _words(value)),)),
    **dict.fromkeys(FLAGS, _flag),
    "head_dim": lambda _key, value: (HeadDim(_bounds(value)),),
    "gpu": _gpu,
    "symbols": lambda _key, value: (Uses(_words(value)),),
    "packages": _packages,
    "absent": _absent,
    "differ": _differ,
    "via": _via,
    "variables": lambda _key, value: [Variable(name, _words(values)) for name, values in _table(value).items()],
    "any": _any,
}
GRAMMAR = tuple(_PARSERS)
"""Every condition a rule can have."""
