"""Which is the newest set that serves every need? A pure search over torch x CUDA x kernel versions, with its trace."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.resolve.conflicts import conflicts
from kernelguard.resolve.fit import is_release, unfit_target, unfit_torch
from kernelguard.resolve.matrix import Matrix
from kernelguard.resolve.options import Allowed, Option, Scope, allowed_by_rules, may_serve, options
from kernelguard.resolve.rank import rank_candidates, rank_torch
from kernelguard.resolve.request import Request, RuleCheck
from kernelguard.resolve.values import (
    Candidate,
    Caution,
    Choice,
    Cost,
    Decision,
    Kind,
    Known,
    Need,
    Rejected,
    RejectionCode,
    TorchBuild,
)

_MOST_COMBINATIONS = 5_000
"""Per build of torch. Only a set whose members exclude each other comes near it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What can be had: the matrix, and what sources found in this run."""

    known: Matrix
    candidates: tuple[Candidate, ...] = ()
    torch: tuple[TorchBuild, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the search came to."""

    build: TorchBuild | None
    choices: tuple[Choice, ...]
    missing: tuple[Need, ...]
    costs: tuple[Cost, ...]
    trace: tuple[Decision, ...]
    cautions: tuple[Caution, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every need is served."""
        return self.build is not None and not self.missing


def search(request: Request, market: Market, rules: RuleCheck, *, nearest: bool = True) -> Found:
    """Find the newest complete set, else (`nearest`) the set that serves the most needs.

    Torch is the outermost choice. Wheels for exactly one torch are tried with every torch before anything that the
    options merely allow.

    Raises:
        InputError: the target names a torch, or a CUDA for it, that does not exist.
    """
    check_target(request, market)
    trace: list[Decision] = []
    builds = _fitting_torch(request, market, trace)
    fitting = _fitting_candidates(request, market, trace)
    # What no candidate fits on this target is missing whatever torch is chosen; the rest still gets its newest set.
    hopeless = () if request.on_cpu else tuple(need for need in request.needs if not _any_fits(need, request, fitting))
    needs = tuple(need for need in request.needs if need not in hopeless)
    trace += _unbuilt(hopeless, fitting)

    def scope_of(build: TorchBuild, allowed: Allowed, say: Callable[[Decision], None]) -> Scope:
        return Scope(
            request=request,
            build=build,
            known=market.known,
            fitting=fitting,
            rules=rules,
            allowed=allowed,
            say=say,
        )

    passes = _passes(request)
    for allowed in passes:
        costs: dict[Version, Cost] = {}
        for build in builds:
            here: list[Decision] = []
            scope = scope_of(build, allowed, here.append)
            # The rules take longest, so they are asked only where every need has something to ask them about.
            short = () if request.on_cpu else tuple(need for need in needs if not may_serve(need, scope))
            best = None if short else _best_set(needs, scope)
            trace += here
            if best is not None and not best.missing:
                newer = tuple(cost for version, cost in costs.items() if version != build.version)
                return _found(best, request, hopeless, newer, trace)
            missing = short if best is None else best.missing
            costs.setdefault(build.version, Cost(torch=build.label, lost=_lost(missing, here, scope)))
    if not nearest:
        return _found(None, request, (), (), trace)
    ranked = (_best_set(needs, scope_of(build, allowed, trace.append)) for allowed in passes for build in builds)
    # The first of those that lack the fewest: min keeps the newest torch.
    best = min(ranked, key=lambda found: len(found.missing), default=None)
    return _found(best, request, hopeless, (), trace)


def _passes(request: Request) -> list[Allowed]:
    """From what needs no permission to all that is permitted."""
    options = request.options
    passes = [Allowed()]
    if options.cross_torch:
        passes.append(Allowed(cross_torch=True))
    if options.allow_source_build:
        passes.append(Allowed(cross_torch=options.cross_torch, source_build=True))
    return passes


def _any_fits(need: Need, request: Request, fitting: Mapping[str, tuple[Candidate, ...]]) -> bool:
    usable = [p for p in need.providers if not p.shim or p.shim in request.options.shims]
    kinds = {c.kind for p in usable for c in fitting.get(p.distribution, ())}
    return bool(kinds - ({Kind.SDIST, Kind.GIT} if not request.options.allow_source_build else set()))


def _unbuilt(needs: Sequence[Need], fitting: Mapping[str, tuple[Candidate, ...]]) -> Iterator[Rejected]:
    """What could be built from source for needs that no wheel fits at all."""
    for name in dict.fromkeys(p.distribution for need in needs for p in need.providers):
        for candidate in fitting.get(name, ()):
            yield Rejected(
                candidate=candidate.label,
                distribution=name,
                code=RejectionCode.SOURCE_BUILD,
                reason=f"{name} {candidate.version} has to be built from source, which nobody allowed",
                source=candidate.source,
            )


def _found(
    best: _Set | None,
    request: Request,
    hopeless: tuple[Need, ...],
    costs: tuple[Cost, ...],
    trace: Sequence[Decision],
) -> Found:
    return Found(
        build=best.build if best is not None else None,
        choices=best.choices if best is not None else (),
        missing=(*best.missing, *hopeless) if best is not None else request.needs,
        cautions=best.cautions if best is not None else (),
        costs=costs,
        trace=tuple(dict.fromkeys(trace)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Set:
    build: TorchBuild
    choices: tuple[Choice, ...]
    missing: tuple[Need, ...]
    cautions: tuple[Caution, ...] = ()


def check_target(request: Request, market: Market) -> None:
    """Refuse a target that contradicts what is published.

    Raises:
        InputError: it names an unknown torch, or a CUDA that this torch is not published for.
    """
    builds = [*market.torch, *market.known.torch]
    torch, cuda = request.environment.torch, request.environment.torch_cuda
    releases = sorted({b.version for b in builds})
    if torch is not None and not any(is_release(torch, r) for r in releases):
        nearest = max((r for r in releases if r <= torch), default=releases[0])
        raise InputError(
            f"torch {torch.public} is not known; known are {releases[0]} to {releases[-1]}",
            hint=f"nearest: torch={nearest} (kernelguard matrix refresh looks for newer ones)",
        )
    if cuda is None:
        return
    of_machine = [b for b in builds if b.machine in {request.environment.machine, None}]
    of_torch = [b for b in of_machine if torch is None or is_release(torch, b.version)]
    offered = sorted({b.cuda for b in of_torch if b.cuda is not None})
    if cuda.release[:2] not in {c.release[:2] for c in offered}:
        name = f"torch {torch.public}" if torch is not None else "any known torch"
        listed = ", ".join(map(str, offered)) or "none"
        having = sorted(
            {b.version for b in of_machine if b.cuda is not None and b.cuda.release[:2] == cuda.release[:2]}
        )
        hint = (
            f"CUDA {cuda} is there with torch {having[0]} to {having[-1]}" if having else "leave cuda out of the target"
        )
        raise InputError(
            f"CUDA {cuda} contradicts {name}: on {request.environment.machine} it is published for {listed}", hint=hint
        )


def _fitting_torch(request: Request, market: Market, trace: list[Decision]) -> tuple[TorchBuild, ...]:
    fitting = []
    for build in rank_torch([*market.torch, *market.known.torch], on_cpu=request.on_cpu):
        reason = unfit_torch(build, request, market.known)
        if reason is None:
            fitting.append(build)
        else:
            trace.append(
                Rejected(
                    candidate=f"{build.label} ({build.channel}, {build.machine})",
                    distribution="torch",
                    code=reason[0],
                    reason=reason[1],
                    source=build.channel,
                )
            )
    return tuple(fitting)


def _fitting_candidates(request: Request, market: Market, trace: list[Decision]) -> Mapping[str, tuple[Candidate, ...]]:
    """The candidates of every distribution that plays a part and fits the target, ranked."""
    wanted = {name for need in request.needs for p in need.providers for name in (p.distribution, *p.companions)}
    packages = {need.package for need in request.needs}
    wanted |= {n for n, facts in market.known.packages.items() if packages & set(facts.helps)}
    all_known = itertools.chain.from_iterable(
        facts.candidates for name, facts in market.known.packages.items() if name in wanted
    )
    fitting: dict[str, list[Candidate]] = {}
    for candidate in rank_candidates(_merged([*market.candidates, *all_known])):
        if candidate.distribution not in wanted:
            continue
        reason = unfit_target(candidate, request, market.known)
        if reason is None:
            fitting.setdefault(candidate.distribution, []).append(candidate)
        else:
            trace.append(
                Rejected(
                    candidate=candidate.label,
                    distribution=candidate.distribution,
                    code=reason[0],
                    reason=reason[1],
                    source=candidate.source,
                )
            )
    return {name: tuple(candidates) for name, candidates in fitting.items()}


def _merged(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """What sources listed in this run replaces what the matrix knows of the same file, but for what it requires.

    The matrix counts what the extra for training adds; a file's bare metadata does not.
    """
    known = {_identity(c): c for c in candidates if c.known is not Known.SEEN}
    listed = {_identity(c) for c in candidates if c.known is Known.SEEN}
    for candidate in candidates:
        mine = _identity(candidate)
        if candidate.known is Known.SEEN:
            curated = known.get(mine)
            yield candidate if curated is None else dataclasses.replace(candidate, requires=curated.requires)
        elif mine not in listed:
            yield candidate


def _identity(candidate: Candidate) -> tuple[str, ...]:
    return candidate.distribution, str(candidate.version), candidate.kind, candidate.index_url


def _best_set(needs: Sequence[Need], scope: Scope) -> _Set:
    """The best complete set for one build of torch, else one that serves as many needs as can be served together."""
    ways = {need: _Lazy(options(need, scope)) for need in needs}
    served = [need for need in needs if ways[need].first() is not None]
    # A CUDA extension cannot be had without a GPU; a CPU set is what remains, and it never admits a launch.
    missing = () if scope.request.on_cpu else tuple(need for need in needs if need not in served)
    while True:
        combinations = itertools.islice(_combinations([ways[need] for need in served]), _MOST_COMBINATIONS)
        for together in combinations:
            cautions = _fit_together(together, scope)
            if cautions is not None:
                choices = tuple(_choice(option, scope) for option in together)
                return _Set(build=scope.build, choices=choices, missing=missing, cautions=cautions)
        # Each fits alone, but no ways to serve all of them fit together: do without the last one.
        missing = (served.pop(), *missing)


class _Lazy:
    """An iterator that can be walked again from the start."""

    def __init__(self, source: Iterator[Option]) -> None:
        self._source = source
        self._seen: list[Option] = []

    def first(self) -> Option | None:
        return next(iter(self), None)

    def __iter__(self) -> Iterator[Option]:
        position = 0
        while True:
            if position == len(self._seen):
                following = next(self._source, None)
                if following is None:
                    return
                self._seen.append(following)
            yield self._seen[position]
            position += 1


def _combinations(ways: Sequence[_Lazy]) -> Iterator[tuple[Option, ...]]:
    """All combinations, the first need's preference changing slowest."""
    if not ways:
        yield ()
        return
    for option in ways[0]:
        for rest in _combinations(ways[1:]):
            yield (option, *rest)


def _fit_together(together: Sequence[Option], scope: Scope) -> tuple[Caution, ...] | None:
    """What the rules say about the whole set; None: its members exclude each other."""
    candidates = tuple({c.distribution: c for option in together for c in option.candidates}.values())
    for one in together:
        for mine in one.candidates:
            chosen = next(c for c in candidates if c.distribution == mine.distribution)
            if chosen != mine:
                scope.reject(mine, RejectionCode.REQUIRES, f"another need of the model wants {chosen.label}")
                return None
    if not candidates:
        return ()
    for conflict in conflicts(candidates):
        scope.reject(candidates[0], RejectionCode.REQUIRES, conflict)
        return None
    allowed, cautions = allowed_by_rules(candidates, scope)
    return cautions if allowed else None


def _choice(option: Option, scope: Scope) -> Choice:
    accepted = option.accepted(scope.build)
    for decision in accepted:
        scope.say(decision)
    others = []
    for provider in option.need.providers:
        if provider == option.provider:
            continue
        if provider.shim and provider.shim not in scope.request.options.shims:
            others.append(f"{provider.distribution}: {provider.why}; it counts only with the shim {provider.shim}")
        else:
            others.append(f"{provider.distribution}: {provider.why}; {option.provider.distribution} comes first")
    return Choice(need=option.need, provider=option.provider, accepted=accepted, others=tuple(others))


def _lost(missing: Sequence[Need], trace: Sequence[Decision], scope: Scope) -> dict[str, str]:
    """For each missing need the reason that was nearest to a yes."""
    lost = {}
    for need in missing:
        names = {p.distribution for p in need.providers}
        built_for = {
            c.label: c.built_for.torch for name in names for c in scope.fitting.get(name, ()) if c.built_for is not None
        }

        def nearness(no: Rejected, torches: Mapping[str, Version | None] = built_for) -> tuple[int, int]:
            torch = torches.get(no.candidate)
            away = abs(torch.minor - scope.build.version.minor) if torch is not None else 0
            return _DISTANCE[no.code], away

        reasons = [no for no in trace if isinstance(no, Rejected) and no.distribution in names]
        best = min(reasons, key=nearness, default=None)
        lost[need.package] = f"{best.candidate}: {best.reason}" if best is not None else "nothing is known that has it"
    return lost


_NEAR_FIRST = (
    RejectionCode.RULE,
    RejectionCode.REQUIRES,
    RejectionCode.CXX,
    RejectionCode.ABI,
    RejectionCode.CUDA,
    RejectionCode.TORCH,
)
_DISTANCE = {code: _NEAR_FIRST.index(code) if code in _NEAR_FIRST else len(_NEAR_FIRST) for code in RejectionCode}
