"""What is wrong with the data files in a folder like `matrices/`? Every problem, each with file, row and place."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError

from kernelguard import data
from kernelguard.judge.bounds import Bounds
from kernelguard.judge.predicates import Installed, Predicate, VersionIn, walk
from kernelguard.judge.rules import Rule, parse_rule
from kernelguard.judge.values import Status


def problems_in(folder: Path) -> list[str]:
    """Hold every TOML file below `folder` against its schema, and rules and kernels against what a schema can't say.

    A file's schema is named like the file, or like the folder it lies in.
    """
    return [
        f"{file.relative_to(folder)}: {problem}"
        for file in sorted(folder.rglob("*.toml"))
        for problem in _file(file, folder)
    ]


def _file(file: Path, folder: Path) -> Iterator[str]:
    kind = file.stem if file.parent == folder else file.parent.name
    schema = next((path for name in (kind, f"{kind}-matrix") if (path := data.schema(name)).is_file()), None)
    if schema is None:
        yield f"there is no schema for {kind!r}"
        return
    try:
        document = _plain(tomllib.loads(file.read_text("utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        yield f"not TOML: {error}"
        return
    validator = Draft202012Validator(
        json.loads(schema.read_text("utf-8")), format_checker=Draft202012Validator.FORMAT_CHECKER
    )
    wrong = sorted(validator.iter_errors(document), key=lambda error: [str(part) for part in error.absolute_path])
    for mistake in wrong:
        yield f"{_row(mistake, document)}{_text(mistake)}"
    if kind == "rules":
        yield from _rules(document)
    elif kind == "kernels":
        yield from _kernels(file, document)


def _rules(document: Mapping[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    rows = document.get("rule")
    for row in rows if isinstance(rows, list) else ():
        name = row.get("id", "a rule without id")
        if name in seen:
            yield f"{name}: this id is used twice"
        seen.add(name)
        try:
            rule = parse_rule({**row, "retrieved": _date(row, "retrieved"), "expires": _date(row, "expires")})
        except (ValueError, TypeError) as error:
            yield f"{name}: {error}"
            continue
        yield from (f"{name}: {problem}" for problem in _rule(rule))


def _rule(rule: Rule) -> Iterator[str]:
    if not rule.bounds_established and rule.status is not Status.WARN:
        yield "bounds that are not established can only warn"
    if rule.expires is not None and rule.expires <= rule.retrieved:
        yield f"expires {rule.expires} is not after retrieved {rule.retrieved}"
    if rule.expires is None and not any(_ends(predicate) for predicate in walk(rule.when)):
        yield "it never ends: give a version range an upper end, or a day in `expires`"


def _ends(predicate: Predicate) -> bool:
    return isinstance(predicate, VersionIn | Installed) and predicate.bounds.has_end


def _kernels(file: Path, document: Mapping[str, Any]) -> Iterator[str]:
    if document.get("package") != file.stem:
        yield f"package is {document.get('package')!r}, but the file is called {file.name}"
    minimums = document.get("minimum")
    for row in minimums if isinstance(minimums, list) else ():
        for key in ("version", "when"):
            try:
                Bounds.parse(str(row.get(key, "")))
            except ValueError as error:
                yield f"minimum of {row.get('of')}: {key}: {error}"


def _date(row: Mapping[str, Any], key: str) -> date | None:
    """A date that `_plain` made a text of."""
    return date.fromisoformat(row[key]) if key in row else None


def _plain(value: Any) -> Any:
    """TOML's dates as texts, as a JSON schema knows them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, date | datetime) else value


def _row(error: ValidationError, document: Any) -> str:
    """Which row, by its id or name where it has one, and where in it."""
    words: list[str] = []
    here = document
    for part in error.absolute_path:
        here = here[part]
        label = here.get("id") or here.get("name") or here.get("of") if isinstance(here, dict) else None
        if isinstance(part, int) and words:
            words[-1] = f"{words[-1]} {label or part}"
        else:
            words.append(str(part))
    return ".".join(words) + ": " if words else ""


def _text(error: ValidationError) -> str:
    """The message; for an unknown key with the nearest known one."""
    if error.validator != "additionalProperties" or not isinstance(error.schema, Mapping):
        return error.message
    known = error.schema.get("properties", {})
    texts = []
    for key in error.instance if isinstance(error.instance, dict) else ():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            texts.append(f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else ""))
    return "; ".join(texts)
