"""Which keys and values does a TOML, JSON or YAML file hold? Every way of being unusable is one clear error."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError

MAX_BYTES = 1024 * 1024
"""Configurations have a few kB. YAML of this size takes seconds to read, and what is larger is something else."""

_SUFFIXES = {".json": "JSON", ".toml": "TOML", ".yaml": "YAML", ".yml": "YAML"}
# Control characters that no text format allows; a pickle, a checkpoint or an UTF-16 text has them early on.
_BINARY = re.compile(r"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def read_mapping(path: Path, what: str, formats: tuple[str, ...], hint: str) -> dict[str, Any]:
    """The mapping that a file holds.

    Args:
        path: The file.
        what: What it should be, `an intent file`, for messages.
        formats: Those of JSON, TOML and YAML that it may be in; the last one is tried when the name does not tell.
        hint: The fix that is offered when it is something else.

    Raises:
        InputError: It cannot be read, is too large, is in none of the formats, or holds no mapping.
    """
    text = _text(path, what, hint)
    suffix = path.suffix.lower()
    kind = _SUFFIXES.get(suffix, "JSON" if text.lstrip().startswith("{") else formats[-1])
    if kind not in formats:
        raise InputError(f"{path} is {kind}, but {what} is {' or '.join(formats)}", hint=hint)
    try:
        document = _PARSERS[kind](text)
    except _NotParsedError as error:
        raise InputError(f"{path} is not {kind}, as {what} in a file of that name is: {error}", hint=hint) from error
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply for {what}", hint=hint) from error
    if not isinstance(document, dict):
        raise InputError(f"{path} holds {shown(document)}, but {what} is a mapping of keys to values", hint=hint)
    wrong = [key for key in document if not isinstance(key, str)]
    if wrong:
        raise InputError(f"{path} has the key {shown(wrong[0])}, but the keys of {what} are words", hint=hint)
    return document


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` when a known word is close, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """A value from a file for a message. Containers are only named: YAML aliases can make them as good as endless."""
    if isinstance(value, (list, tuple, set)):
        return "a list"
    if isinstance(value, Mapping):
        return "a mapping"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to write out the longest
        return "a huge number"
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + "...'"


def _text(path: Path, what: str, hint: str) -> str:
    try:
        if path.is_dir():
            raise InputError(f"{path} is a folder, but {what} is a file", hint=hint)
        if not path.exists():
            raise InputError(f"{path} does not exist; {what} was expected there", hint=hint)
        if not path.is_file():
            raise InputError(f"{path} is no regular file, but {what} is", hint=hint)
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"{path} is too large for {what}: {size / 1e6:.1f} MB, where a few kB are usual", hint=hint
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is binary or not UTF-8, but {what} is text", hint=hint) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}", hint=hint) from error
    if _BINARY.search(text):
        raise InputError(f"{path} is binary, but {what} is text", hint=hint)
    if not text.strip():
        raise InputError(f"{path} is empty, but {what} was expected", hint=hint)
    return text


class _NotParsedError(Exception):
    """The text is not in the format."""


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise _NotParsedError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    except ValueError as error:  # a number with thousands of digits, or a key that is there twice
        raise _NotParsedError(str(error)) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON readers silently keep the last of two equal keys; which one was meant cannot be told."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} is there twice")
        found[key] = value
    return found


def _toml(text: str) -> object:
    import tomllib  # noqa: PLC0415 - a static check without files does not need it

    try:
        return tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError is one; so is a number with thousands of digits
        raise _NotParsedError(str(error)) from error


def _yaml(text: str) -> object:
    import yaml  # noqa: PLC0415 - costs 20 ms, needed only when such a file is given

    # libyaml where it is there: ten times faster, and it bounds the nesting itself.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(text, Loader=loader)  # noqa: S506 - safe in both cases
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark is not None else ""
        raise _NotParsedError(place + str(getattr(error, "problem", None) or "malformed")) from error
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        # PyYAML's own failures on values that do not fit their tag: 2026-13-45, !!bool x, !!int '', !!timestamp x.
        raise _NotParsedError(f"a value does not fit its type ({error})") from error


_PARSERS = {"JSON": _json, "TOML": _toml, "YAML": _yaml}
