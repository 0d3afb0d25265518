"""Does compiled code with these archs run on this GPU?"""

from __future__ import annotations

import re
from collections.abc import Iterable

Capability = tuple[int, int]


def runs_on(archs: Iterable[str], capability: Capability) -> bool:
    """Whether machine code for any of `archs` runs on a GPU of this compute capability.

    A plain arch runs on the same major and any equal or higher minor; `9.0a` on exactly that one; `10.0f` on its family
    (same major, higher minor); `9.0+PTX` is also compiled by the driver for anything newer.

    Raises:
        ValueError: an arch is written in a form that is not known.
    """
    return any(_runs(arch, capability) for arch in archs)


def _runs(arch: str, capability: Capability) -> bool:
    shape = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", arch)
    if shape is None:
        raise ValueError(f"{arch!r} is no GPU arch like 9.0, 9.0a, 10.0f or 9.0+PTX")
    built = (int(shape[1]), int(shape[2]))
    if shape[3] == "a":
        return built == capability
    if shape[4] and capability >= built:
        return True
    return built[0] == capability[0] and built[1] <= capability[1]


def text(capability: Capability) -> str:
    """`9.0`."""
    return f"{capability[0]}.{capability[1]}"
