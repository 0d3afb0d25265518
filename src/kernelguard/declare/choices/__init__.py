"""What is chosen after the import: when a model is built, or when it is called. One file each; adding one adds a file.

`mechanisms/` has what binds a kernel to a name of the modeling module, where a worker can look at it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Protocol, cast

from kernelguard.declare.modes import ModeFact
from kernelguard.declare.reading import Reading
from kernelguard.declare.values import Intent


class Choice(Protocol):
    """What each file of this package offers at module level."""

    NAME: str

    def modes(self, reading: Reading) -> Iterable[ModeFact]:
        """What the code can choose between, for the whole model."""


def unasked(intent: Intent) -> frozenset[str]:
    """The choices that this run does not make: reading them would be a good part of a static check."""
    asked = {"hub_layers": intent.use_kernels, "liger": intent.liger}
    asked |= dict.fromkeys(("sample_mask", "flash_boundary"), intent.packed)
    return frozenset(name for name, wanted in asked.items() if not wanted)


@cache
def names() -> tuple[str, ...]:
    """The names of the choices: their files' names, sorted."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")))


def read_modes(reading: Reading, *, leave_out: AbstractSet[str] = frozenset()) -> tuple[ModeFact, ...]:
    """What every choice says about the model, but for those that are left out: they are not even imported."""
    return tuple(
        fact
        for name in names()
        if name not in leave_out
        for fact in cast("Choice", importlib.import_module(f"{__name__}.{name}")).modes(reading)
    )
