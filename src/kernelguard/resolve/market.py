"""What do the sources have of everything that plays a part? The step between asking around and the pure search."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelguard.errors import UndeterminedError
from kernelguard.resolve.matrix import Matrix
from kernelguard.resolve.search import Market
from kernelguard.resolve.values import Candidate, Known, Need, Resolution, TorchBuild
from kernelguard.sources.folder import FolderSource
from kernelguard.sources.http import Http
from kernelguard.sources.index import IndexSource
from kernelguard.sources.names import cuda_of_tag
from kernelguard.sources.pipconfig import PipConfig, local_folder
from kernelguard.sources.release import Presence, look
from kernelguard.sources.values import Kind, Source


def gather(needs: Sequence[Need], known: Matrix, sources: Sequence[Source]) -> Market:
    """Ask every source about every distribution that could serve a need, and about torch.

    Raises:
        UndeterminedError: a source cannot be asked. What it has might be the answer, so nothing is decided without it.
        InputError: a folder holds a damaged file.
    """
    packages = {need.package for need in needs}
    names = {name for need in needs for p in need.providers for name in (p.distribution, *p.companions)}
    names |= {n for n, facts in known.packages.items() if packages & set(facts.helps)}
    candidates = tuple(c for source in sources for name in sorted(names) for c in source.find(name))
    torch = tuple(b for s in sources for c in s.find("torch") if (b := torch_build(c, known)) is not None)
    return Market(known=known, candidates=candidates, torch=torch)


def sources_for(
    known: Matrix,
    config: PipConfig,
    http: Http,
    *,
    indexes: Sequence[str] = (),
    folders: Sequence[Path] = (),
) -> tuple[Source, ...]:
    """Every place to ask: the user's folders and indexes, then what pip itself is configured with.

    Raises:
        InputError: a folder that the user named is not there.
    """
    compiled = frozenset(name for name, facts in known.packages.items() if facts.kind == "extension")

    def unknown(distribution: str, version: str) -> bool:
        facts = known.packages.get(distribution)
        if facts is None:
            return distribution != "torch"
        return facts.kind == "pure" and Version(version) not in {c.version for c in facts.candidates}

    def index(url: str, *, extra: bool) -> IndexSource:
        return IndexSource(url, http, extra=extra, compiled=compiled, needs_metadata=unknown)

    configured = [folder for place in config.find_links if (folder := local_folder(place)) is not None]
    return (
        *(FolderSource(folder, compiled=compiled) for folder in folders),
        *(FolderSource(folder, compiled=compiled, configured=True) for folder in configured),
        *(index(url, extra=True) for url in indexes),
        index(config.index_url, extra=False),
    )


def torch_build(candidate: Candidate, known: Matrix) -> TorchBuild | None:
    """A wheel of torch that a source has, with what is known about its release.

    None: it is one of the package index's own, which the matrix has already; or one whose build cannot be told.
    """
    if candidate.kind is not Kind.WHEEL or candidate.machines is None or candidate.yanked:
        return None
    local = candidate.version.local or ""
    in_folder = candidate.url.startswith("file:")
    if not in_folder and not candidate.index_url:
        return None
    release = Version(candidate.version.public)
    for row in known.torch:
        if row.version == release and row.machine in candidate.machines and row.channel == "index":
            if local == "cpu":
                cuda: Version | None = None
            elif local.startswith("cu") and local[2:].isdigit():
                cuda = cuda_of_tag(local[2:])
            elif not local:
                cuda = row.cuda
            else:
                return None
            same = row.cuda == cuda
            return dataclasses.replace(
                row,
                cuda=cuda,
                channel="folder" if in_folder else candidate.index_url,
                triton=row.triton if cuda is not None else None,
                archs=row.archs if same else None,
                pythons=candidate.pythons or row.pythons,
                glibc=candidate.glibc or row.glibc,
                requires_python=candidate.requires_python & SpecifierSet(),
                known=Known.SEEN,
                evidence=candidate.evidence,
                url=candidate.url if in_folder else candidate.index_url,
                sha256=candidate.sha256,
            )
    return None


def verified(resolve: Callable[[Market], Resolution], market: Market, http: Http) -> tuple[Resolution, Market]:
    """Resolve, and look whether each chosen asset that was only planned or reported is really there.

    One that is not is dropped, and the search is done again without it. One whose server cannot be asked stays as it
    is: `known` says that nobody has seen it.
    """
    while True:
        resolution = resolve(market)
        absent: list[Candidate] = []
        seen: list[Candidate] = []
        for pin in resolution.pins:
            if pin.known is Known.SEEN:
                continue
            if pin.index_url:
                listed = _listed(pin, http)
                if listed is not None:
                    absent += [c for c in _all(market) if c.index_url == pin.index_url and _same(c, pin)]
                    seen += listed
                continue
            if not pin.url.startswith(("http://", "https://")):
                continue
            asset = look(pin.url, http)
            if asset.presence is Presence.ABSENT:
                absent.append(pin)
            elif asset.presence is Presence.PRESENT:
                seen.append(dataclasses.replace(pin, known=Known.SEEN, size=asset.size))
        if not absent and not seen:
            return resolution, market
        market = dataclasses.replace(
            market,
            known=_without(market.known, [*absent, *seen]),
            candidates=(
                *(c for c in market.candidates if c not in absent),
                *(c for c in seen if c not in market.candidates),
            ),
        )


def _listed(pin: Candidate, http: Http) -> tuple[Candidate, ...] | None:
    """What an extra index really has of something that was only reported; None: it cannot be asked."""
    index = IndexSource(
        pin.index_url, http, extra=True, compiled={pin.distribution}, needs_metadata=lambda _d, _v: False
    )
    try:
        return index.find(pin.distribution)
    except UndeterminedError:
        return None


def _all(market: Market) -> Iterator[Candidate]:
    for facts in market.known.packages.values():
        yield from facts.candidates
    yield from market.candidates


def _same(one: Candidate, other: Candidate) -> bool:
    return one.distribution == other.distribution and one.known is not Known.SEEN


def _without(known: Matrix, gone: Sequence[Candidate]) -> Matrix:
    return dataclasses.replace(
        known,
        packages={
            name: dataclasses.replace(facts, candidates=tuple(c for c in facts.candidates if c not in gone))
            for name, facts in known.packages.items()
        },
    )


def unverified(resolution: Resolution) -> Iterator[str]:
    """One sentence for every pin that nobody has seen."""
    for pin in resolution.pins:
        if pin.known is not Known.SEEN and (pin.url or pin.index_url):
            yield f"{pin.label} from {pin.source} is {pin.known} and was not seen ({pin.evidence})"
