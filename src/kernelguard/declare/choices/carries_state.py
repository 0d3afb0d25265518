"""Classes that carry state from one packed sample into the next: known from reading them, see model_notes.toml."""

from __future__ import annotations

from collections.abc import Iterable

from kernelguard.declare.modes import CarriesState
from kernelguard.declare.notes import model_notes
from kernelguard.declare.reading import Reading

NAME = "carries_state"


def modes(reading: Reading) -> Iterable[CarriesState]:
    """One value for each such class that the model can reach."""
    version = reading.source.tree.version
    for noted in model_notes().carries_state:
        holders = [part for part in reading.parts if noted.name in part.reached.get(noted.file, ())]
        if holders and noted.transformers.contains(version, prereleases=True):
            yield CarriesState(
                model_type=holders[-1].sub.model_type, what=f"{noted.name}: {noted.what}", source=noted.source
            )
