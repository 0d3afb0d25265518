"""Classes that run PyTorch code step by step whatever is installed: known from reading them, see model_notes.toml."""

from __future__ import annotations

from collections.abc import Iterable

from kernelguard.declare.modes import AlwaysSlow
from kernelguard.declare.notes import model_notes
from kernelguard.declare.reading import Reading

NAME = "always_slow"


def modes(reading: Reading) -> Iterable[AlwaysSlow]:
    """One value for each such class that the model can reach."""
    version = reading.source.tree.version
    for slow in model_notes().always_slow:
        holders = [part for part in reading.parts if slow.name in part.reached.get(slow.file, ())]
        if holders and slow.transformers.contains(version, prereleases=True):
            yield AlwaysSlow(
                model_type=holders[-1].sub.model_type, what=f"{slow.name}: {slow.what}", source=slow.source
            )
