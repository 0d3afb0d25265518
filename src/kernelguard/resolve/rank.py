"""In which order are builds of torch and candidates tried? A total order that does not depend on how they came in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from packaging.version import Version

from kernelguard.resolve.values import Candidate, Kind, Known, TorchBuild

_KNOWN = {Known.SEEN: 0, Known.OBSERVED: 1, Known.REPORTED: 2, Known.PLANNED: 3}
_KIND = {Kind.WHEEL: 0, Kind.HUB: 1, Kind.SDIST: 2, Kind.GIT: 3}
_CHANNEL = {"folder": 0, "index": 1}


def rank_torch(builds: Iterable[TorchBuild], *, on_cpu: bool) -> tuple[TorchBuild, ...]:
    """Newest release first; of one release the file at hand, then the package index's own build, then newest CUDA.

    On a machine without a GPU the CPU build of a release comes first: it brings no CUDA libraries.
    """
    ordered = sorted(
        builds, key=lambda b: (b.label, b.channel, b.machine, b.url, b.sha256, _KNOWN[b.known], b.evidence)
    )
    ordered.sort(key=lambda b: b.cuda or Version("0"), reverse=True)
    ordered.sort(key=lambda b: _CHANNEL.get(b.channel, 2))
    if on_cpu:
        ordered.sort(key=lambda b: b.cuda is not None)
    ordered.sort(key=lambda b: b.version, reverse=True)
    return tuple(ordered)


def rank_candidates(candidates: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Prebuilt before to-be-built; then newest version; then what is known best, with the newest CUDA."""
    ordered = list(_settled(candidates))
    ordered.sort(key=_cuda, reverse=True)
    ordered.sort(key=lambda c: _KNOWN[c.known])
    ordered.sort(key=lambda c: Version(c.version.public), reverse=True)
    ordered.sort(key=lambda c: _KIND[c.kind])
    return tuple(ordered)


def _settled(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """In an order of their own. Spelling a candidate out costs most, and few are alike in everything else."""

    def names(c: Candidate) -> tuple[str, ...]:
        return c.distribution, c.filename, str(c.version), c.source, c.url, c.index_url, c.sha256

    for _, alike in itertools.groupby(sorted(candidates, key=names), key=names):
        first, *others = alike
        yield from sorted([first, *others], key=repr) if others else (first,)


def _cuda(candidate: Candidate) -> Version:
    made = candidate.built_for
    return made.cuda if made is not None and made.cuda is not None else Version("0")
