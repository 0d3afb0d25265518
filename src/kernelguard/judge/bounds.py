"""Is a version inside a range, and what do several such answers say together? True, false, or unknown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from packaging.specifiers import InvalidSpecifier, Specifier, SpecifierSet
from packaging.version import Version


class Truth(StrEnum):
    """Kleene's three values."""

    TRUE = "true"
    FALSE = "false"
    UNKNOWN = "unknown"


def all_of(truths: Iterable[Truth]) -> Truth:
    """Kleene's and: one false decides; without one, one unknown keeps it open."""
    found = set(truths)
    return next((t for t in (Truth.FALSE, Truth.UNKNOWN) if t in found), Truth.TRUE)


def any_of(truths: Iterable[Truth]) -> Truth:
    """Kleene's or: one true decides; without one, one unknown keeps it open."""
    found = set(truths)
    return next((t for t in (Truth.TRUE, Truth.UNKNOWN) if t in found), Truth.FALSE)


def truth(value: bool) -> Truth:
    """The truth of something that is known."""
    return Truth.TRUE if value else Truth.FALSE


@dataclass(frozen=True, slots=True)
class Bounds:
    """A PEP 440 specifier that leaves no gaps.

    PEP 440 puts 3.7.1rc1 neither in `<3.7.1` nor in `>=3.7.1`. For "fixed in 3.7.1" such a version may or may not have
    the fix, so it is unknown here; every other pre-release is compared by its place in the order. Local versions
    (`+cu130`) never matter.
    """

    text: str
    clauses: tuple[Specifier, ...]

    @classmethod
    def parse(cls, text: str) -> Bounds:
        """Read a specifier; an empty one holds for every version.

        Raises:
            ValueError: it is none, or it uses `===`.
        """
        try:
            clauses = tuple(sorted(SpecifierSet(text), key=str))
        except InvalidSpecifier as error:
            raise ValueError(f"{text!r} is no version specifier") from error
        if any(clause.operator == "===" for clause in clauses):
            raise ValueError(f"{text!r} compares text, not versions")
        return cls(text, clauses)

    def hold(self, version: Version) -> Truth:
        """Whether a version is inside."""
        return all_of(_clause_holds(clause, version) for clause in self.clauses)

    @property
    def has_end(self) -> bool:
        """Whether it ends: a later release can get out of it."""
        return any(clause.operator in {"<", "<=", "==", "~="} for clause in self.clauses)


_ORDER: Mapping[str, Callable[[Version, Version], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def _clause_holds(clause: Specifier, version: Version) -> Truth:
    compare = _ORDER.get(clause.operator)
    if compare is None:
        return truth(clause.contains(version, prereleases=True))
    bound, plain = Version(clause.version), Version(version.public)
    if plain.is_prerelease and not bound.is_prerelease and Version(plain.base_version) == Version(bound.base_version):
        return Truth.UNKNOWN
    return truth(compare(plain, bound))
