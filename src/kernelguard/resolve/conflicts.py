"""Do the members of a set exclude each other by what they require?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelguard.resolve.values import Candidate


def conflicts(candidates: Sequence[Candidate]) -> Iterator[str]:
    """Requirements of these candidates that no single version of something can meet."""
    versions = {c.distribution: c.version for c in candidates}
    asked: dict[str, list[tuple[Candidate, str]]] = {}
    for candidate in candidates:
        for requirement in candidate.requires:
            name = requirement.name.lower().replace("_", "-")
            if name in versions and not requirement.specifier.contains(versions[name].public, prereleases=True):
                yield f"{candidate.label} requires {requirement}, the set has {name} {versions[name]}"
            asked.setdefault(name, []).append((candidate, str(requirement.specifier)))
    for name, wishes in sorted(asked.items()):
        if name not in versions and (text := _unsatisfiable(name, wishes)) is not None:
            yield text


def _unsatisfiable(name: str, wishes: Sequence[tuple[Candidate, str]]) -> str | None:
    """Whether no version meets all specifiers. With an inclusive lower bound the highest such bound decides."""
    joint = SpecifierSet(",".join(filter(None, (text for _, text in wishes))))
    floors = [Version(s.version.removesuffix(".*")) for s in joint if s.operator in {">=", "==", "~="}]
    if not floors or joint.contains(max(floors), prereleases=True):
        return None
    return " and ".join(f"{c.label} requires {name}{text}" for c, text in wishes if text) + ": no version is both"
