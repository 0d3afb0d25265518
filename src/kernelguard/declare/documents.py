"""What does a TOML, JSON or YAML file that a person hands over hold? One clear error for each way of being unusable."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError

MAX_BYTES = 4 * 1024 * 1024


def read_document(path: Path, what: str) -> dict[str, Any]:
    """The mapping that a file holds; `what` says what it should be, `an intent file`.

    Raises:
        InputError: It cannot be read, is too large, is not in its format, or holds no mapping.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise InputError(f"{path} is a folder, not {what}.", hint="give the file")
        if size > MAX_BYTES:
            raise InputError(
                f"{path} has {size / 1024 / 1024:.0f} MB, far too much for {what}.", hint="give another file"
            )
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist.", hint=f"give the path of {what}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text (UTF-8), so it is not {what}.", hint="give another file") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", hint=f"chmod u+r {path}") from error
    if not text.strip():
        raise InputError(f"{path} is empty.", hint=f"give {what}")
    try:
        document = _parse(path, text)
    except RecursionError as error:
        raise InputError(f"{path} is nested too deeply.", hint=f"give {what}") from error
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise InputError(f"{path} holds no table of named settings, so it is not {what}.", hint=f"give {what}")
    return document


def _parse(path: Path, text: str) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".json" or (suffix not in {".toml", ".yaml", ".yml"} and text.lstrip().startswith("{")):
        try:
            return json.loads(text)
        except ValueError as error:
            place = f" at line {error.lineno}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise InputError(f"{path} is not JSON: {reason}{place}.", hint="check the file at that place") from error
    if suffix == ".toml":
        import tomllib  # noqa: PLC0415 - one of three formats

        try:
            return tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path} is not TOML: {error}.", hint="check the file at that place") from error
    import yaml  # noqa: PLC0415 - one of three formats, and it costs 20 ms

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        reason = getattr(error, "problem", None) or "it cannot be parsed"
        raise InputError(f"{path} is not YAML: {reason}{place}.", hint="check the file at that place") from error
    except ValueError as error:  # a date such as 2026-02-31
        raise InputError(f"{path} is not YAML: {error}.", hint="check the file") from error


def nearest(word: str, known: Iterable[str]) -> str:
    """`, did you mean x?` when one of the known words is close, else nothing."""
    import difflib  # noqa: PLC0415 - only for an error text, and it costs 10 ms

    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" (did you mean {near[0]}?)" if near else ""
