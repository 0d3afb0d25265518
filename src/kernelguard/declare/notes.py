"""What is known about models that no source says? Reads matrices/model_notes.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelguard import data
from kernelguard.errors import InputError

FILE = "model_notes.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedClass:
    """A class of a modeling file about which something is known that nothing in its source says."""

    name: str
    file: str
    transformers: SpecifierSet
    what: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LigerTypes:
    """The model types that liger-kernel knows."""

    minimum: Version
    read: tuple[Version, ...]
    """The releases that were looked at, oldest first."""
    since: dict[str, Version]
    """By model_type: the first of them that knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNotes:
    """The whole file."""

    always_slow: tuple[NotedClass, ...]
    """They run PyTorch code step by step on every machine."""
    carries_state: tuple[NotedClass, ...]
    """They carry state from one sample of a packed row into the next, and take no boundaries."""
    wrong_gradients: Mapping[str, str]
    """By hub repository: what is wrong with its backward."""
    liger: LigerTypes


@cache
def model_notes() -> ModelNotes:
    """The notes that ship with kernelguard.

    Raises:
        InputError: The file is not in the agreed form.
    """
    try:
        table = tomllib.loads((data.matrices() / FILE).read_text("utf-8"))
        liger = table["liger"]
        return ModelNotes(
            always_slow=_classes(table["always_slow"]),
            carries_state=_classes(table["carries_state"]),
            wrong_gradients={row["repository"]: row["what"] for row in table["wrong_gradient"]},
            liger=LigerTypes(
                minimum=Version(liger["minimum"]),
                read=tuple(map(Version, liger["read"])),
                since={name: Version(row["liger"]) for row in liger["added"] for name in row["model_types"]},
            ),
        )
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"{FILE} in matrices is not as agreed: {error!r}.") from error


def _classes(rows: Iterable[Mapping[str, Any]]) -> tuple[NotedClass, ...]:
    return tuple(
        NotedClass(
            name=row["class"],
            file=row["file"],
            transformers=SpecifierSet(row["transformers"]),
            what=row["what"],
            source=row["source"],
        )
        for row in rows
    )
