"""Does liger-kernel know this model's type? For any other type it does nothing, and says so to nobody."""

from __future__ import annotations

from collections.abc import Iterable

from kernelguard.declare.modes import LigerSupport
from kernelguard.declare.notes import model_notes
from kernelguard.declare.reading import Reading

NAME = "liger"


def modes(reading: Reading) -> Iterable[LigerSupport]:
    """One value: liger looks at the type of the configuration that the built model holds."""
    known = model_notes().liger
    model_type = _built_type(reading)
    since = known.since.get(model_type)
    yield LigerSupport(
        model_type=model_type,
        releases=tuple((release, since is not None and since <= release) for release in known.read),
        minimum=known.minimum,
    )


def _built_type(reading: Reading) -> str:
    """A class that takes the text configuration alone (`XForCausalLM` of a composite) holds that one."""
    top = reading.parts[0]
    if not top.roots:
        return top.sub.model_type
    module, name = top.roots[0]
    for part in reading.parts[1:]:
        # An inner part that names this very class as its own is the one that is built.
        if any(root == (module, name) for root in part.roots) and part.entry.config_class != top.entry.config_class:
            return part.sub.model_type
    return top.sub.model_type
