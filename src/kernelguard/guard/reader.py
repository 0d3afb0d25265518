"""What does a JSON object hold, with which problems? Typed values out of it, and everything that does not fit.

Standard library only, Python 3.9 or newer: it runs in every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_MISSING: Any = object()


class Reader:
    """Reads typed values out of JSON objects and collects every problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def _get(
        self, table: Mapping[str, Any], key: str, place: str, default: Any, *, fits: Callable[[Any], bool], what: str
    ) -> Any:
        value = table.get(key, default)
        if value is _MISSING:
            self.problems.append(f"{place}{key}: missing")
        elif not fits(value):
            self.problems.append(f"{place}{key}: expected {what}, found {type(value).__name__}")
        else:
            return value
        return None

    def table(self, table: Mapping[str, Any], key: str, place: str = "", default: Any = _MISSING) -> Mapping[str, Any]:
        """An object."""
        found = self._get(table, key, place, default, fits=lambda v: isinstance(v, dict), what="an object")
        return found if found is not None else {}

    def optional_table(self, table: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
        """An object or null."""

        def fits(value: Any) -> bool:
            return value is None or isinstance(value, dict)

        found: Mapping[str, Any] | None = self._get(table, key, "", None, fits=fits, what="an object or null")
        return found

    def text(
        self,
        table: Mapping[str, Any],
        key: str,
        place: str = "",
        *,
        default: Any = _MISSING,
        one_of: tuple[str, ...] | None = None,
    ) -> str:
        """A text, perhaps one of a few."""
        found = self._get(table, key, place, default, fits=lambda v: isinstance(v, str), what="a text")
        if found is not None and one_of is not None and found not in one_of:
            self.problems.append(f"{place}{key}: expected one of {', '.join(one_of)}, found {found}")
        return found if found is not None else ""

    def boolean(self, table: Mapping[str, Any], key: str, place: str = "", *, default: Any = _MISSING) -> bool:
        """True or false."""
        return bool(self._get(table, key, place, default, fits=lambda v: isinstance(v, bool), what="true or false"))

    def texts(self, table: Mapping[str, Any], key: str, place: str = "") -> tuple[str, ...]:
        """A list of texts; none when it is not there."""
        found = self._get(table, key, place, [], fits=_is_texts, what="a list of texts")
        return tuple(found or ())

    def text_map(self, table: Mapping[str, Any], key: str, place: str = "") -> dict[str, str]:
        """Texts by name."""

        def fits(value: Any) -> bool:
            return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())

        return dict(self._get(table, key, place, {}, fits=fits, what="texts by name") or {})

    def text_lists(self, table: Mapping[str, Any], key: str) -> dict[str, tuple[str, ...]]:
        """Lists of texts by name."""

        def fits(value: Any) -> bool:
            return isinstance(value, dict) and all(_is_texts(item) for item in value.values())

        found = self._get(table, key, "", {}, fits=fits, what="lists of texts by name") or {}
        return {name: tuple(item) for name, item in found.items()}

    def rows(self, table: Mapping[str, Any], key: str) -> list[tuple[str, Mapping[str, Any]]]:
        """A list of objects, each with its place, for what is said of it."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(item, dict) for item in value)

        found = self._get(table, key, "", [], fits=fits, what="a list of objects") or []
        return [(f"{key}[{number}].", row) for number, row in enumerate(found)]

    def seconds(self, table: Mapping[str, Any], key: str, place: str, default: float, *, none: bool = False) -> float:
        """A length of time, above 0 and at most a day; with `none` also 0."""

        def fits(value: Any) -> bool:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return number and (0 < value < 86_400 or (none and value == 0))

        what = f"seconds of at most a day, {'at least' if none else 'above'} 0,"
        found = self._get(table, key, place, default, fits=fits, what=what)
        return float(found) if found is not None else default


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
