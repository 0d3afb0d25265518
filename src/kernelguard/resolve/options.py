"""Which ways are there to serve one need with one build of torch? The best first; lazily, as most are not looked at."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from packaging.version import Version

from kernelguard.observe.values import Distribution, Environment
from kernelguard.resolve.fit import unfit_build, unmet_requirements
from kernelguard.resolve.hub_options import kernels_package, pick_variant, unusable_hub
from kernelguard.resolve.matrix import Matrix
from kernelguard.resolve.request import Request, RuleCheck
from kernelguard.resolve.values import (
    Accepted,
    Candidate,
    Caution,
    Kind,
    Need,
    Provider,
    Rejected,
    RejectionCode,
    TorchBuild,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What one pass of the search may use beyond exact wheels. Being allowed to is not a reason to."""

    cross_torch: bool = False
    source_build: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to serve a need."""

    need: Need
    provider: Provider
    candidates: tuple[Candidate, ...]
    """The provider's, then companions and helpers."""
    notes: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()

    def accepted(self, build: TorchBuild) -> tuple[Accepted, ...]:
        """As decisions."""
        first, *rest = self.candidates
        return (
            Accepted(candidate=first, torch=build.label, notes=self.notes, verify=self.verify),
            *(Accepted(candidate=c, torch=build.label) for c in rest),
        )


@dataclass(slots=True, kw_only=True)
class Scope:
    """What the search for one build of torch works with; `say` collects the trace."""

    request: Request
    build: TorchBuild
    known: Matrix
    fitting: Mapping[str, tuple[Candidate, ...]]
    """Candidates that fit the target, ranked, by distribution."""
    rules: RuleCheck
    allowed: Allowed
    say: Callable[[Rejected | Accepted], None]
    answers: dict[tuple[str, ...], tuple[bool, tuple[Caution, ...]]] = field(default_factory=dict)

    def reject(self, candidate: Candidate, code: RejectionCode, reason: str, rule: str = "") -> None:
        """Put one no into the trace."""
        self.say(
            Rejected(
                candidate=candidate.label,
                distribution=candidate.distribution,
                code=code,
                reason=reason,
                torch=self.build.label,
                source=candidate.source,
                rule=rule,
            )
        )


def options(need: Need, scope: Scope) -> Iterator[Option]:
    """Every acceptable way to serve `need`, judged alone, in order of preference."""
    for provider in need.providers:
        if provider.shim and provider.shim not in scope.request.options.shims:
            scope.say(
                Rejected(
                    candidate=provider.distribution,
                    distribution=provider.distribution,
                    code=RejectionCode.SHIM,
                    reason=f"the model does not bind it by itself; the shim {provider.shim} does, and is not asked for",
                    torch=scope.build.label,
                )
            )
            continue
        if provider.kind is Kind.HUB:
            yield from _of_hub(need, provider, scope)
            continue
        for candidate in _nearest_torch_first(scope.fitting.get(provider.distribution, ()), scope):
            yield from _of_candidate(need, provider, candidate, scope)


def may_serve(need: Need, scope: Scope) -> bool:
    """Whether anything could serve `need` with this torch before the rules are asked, which takes longest."""
    for provider in need.providers:
        if provider.shim and provider.shim not in scope.request.options.shims:
            continue
        if provider.kind is Kind.HUB and scope.fitting.get(provider.distribution):
            return True
        for candidate in scope.fitting.get(provider.distribution, ()):
            if candidate.kind in {Kind.SDIST, Kind.GIT} and not _may_build(candidate, scope):
                continue
            unfit = _unfit(candidate, scope)
            if unfit is None:
                return True
            scope.reject(candidate, *unfit)
    return False


def _unfit(candidate: Candidate, scope: Scope) -> tuple[RejectionCode, str] | None:
    unfit = unfit_build(candidate, scope.build, cross_torch=scope.allowed.cross_torch)
    if unfit is None and not scope.request.on_cpu:
        unmet = tuple(unmet_requirements(candidate, scope.build, scope.request))
        unfit = (RejectionCode.REQUIRES, "; ".join(unmet)) if unmet else None
    return unfit


def _of_hub(need: Need, provider: Provider, scope: Scope) -> Iterator[Option]:
    variants = scope.fitting.get(provider.distribution, ())
    unusable = unusable_hub(provider, scope.request, scope.known.hub)
    loader = kernels_package(scope.request, scope.known.hub)
    for candidate, unfit in pick_variant(variants, scope.build, scope.request):
        if (reason := unusable or unfit) is not None:
            scope.reject(candidate, *reason)
        elif loader is not None and allowed_by_rules((candidate, loader), scope)[0]:
            declared = candidate.built_for is not None and candidate.built_for.archs is not None
            notes = () if declared or scope.request.on_cpu else ("its metadata.json does not say for which GPUs it is",)
            yield Option(need=need, provider=provider, candidates=(candidate, loader), notes=notes)


def _nearest_torch_first(candidates: tuple[Candidate, ...], scope: Scope) -> Iterator[Candidate]:
    """The same order, but of one release the wheel whose torch is nearest comes first."""

    def away(candidate: Candidate) -> int:
        made = candidate.built_for
        return 0 if made is None or made.torch is None else abs(made.torch.minor - scope.build.version.minor)

    for _, release in itertools.groupby(candidates, key=lambda c: (c.kind, c.version.public)):
        yield from sorted(release, key=away)


def _of_candidate(need: Need, provider: Provider, candidate: Candidate, scope: Scope) -> Iterator[Option]:
    if candidate.kind in {Kind.SDIST, Kind.GIT} and not _may_build(candidate, scope):
        return
    unfit = _unfit(candidate, scope)
    if unfit is not None:
        scope.reject(candidate, *unfit)
        return
    together = [candidate]
    for name in provider.companions:
        same = [c for c in scope.fitting.get(name, ()) if c.version.public == candidate.version.public]
        fits = [c for c in same if scope.request.on_cpu or not any(unmet_requirements(c, scope.build, scope.request))]
        if not fits:
            unmet = tuple(unmet_requirements(same[0], scope.build, scope.request)) if same else ()
            why = "; ".join(unmet) or "no such release fits the target"
            scope.reject(candidate, RejectionCode.REQUIRES, f"it needs {name} {candidate.version.public}: {why}")
            return
        together.append(fits[0])
    plain = Option(
        need=need,
        provider=provider,
        candidates=tuple(together),
        notes=tuple(_notes(candidate, scope)),
        verify=tuple(_to_verify(candidate, scope)),
    )
    if allowed_by_rules(plain.candidates, scope)[0]:
        yield plain
    for helper in _helpers(need, scope):
        helped = dataclasses.replace(plain, candidates=(*together, helper))
        if allowed_by_rules(helped.candidates, scope)[0]:
            yield helped


def _may_build(candidate: Candidate, scope: Scope) -> bool:
    facts = scope.known.packages.get(candidate.distribution)
    if not scope.allowed.source_build:
        # Said once per torch, also in the passes before the one in which it is allowed.
        if not scope.request.options.allow_source_build:
            scope.reject(
                candidate,
                RejectionCode.SOURCE_BUILD,
                f"{candidate.distribution} {candidate.version} has to be built from source, which nobody allowed",
            )
        return False
    std = facts.build.std if facts is not None and facts.build is not None else ""
    if std and int(std.removeprefix("c++")) < scope.build.min_cxx:
        scope.reject(
            candidate,
            RejectionCode.CXX,
            f"its setup.py passes -std={std}, the headers of {scope.build.label} need C++{scope.build.min_cxx}",
        )
        return False
    return True


def _helpers(need: Need, scope: Scope) -> Iterator[Candidate]:
    for name, facts in sorted(scope.known.packages.items()):
        if need.package in facts.helps:
            yield from scope.fitting.get(name, ())


def _notes(candidate: Candidate, scope: Scope) -> Iterator[str]:
    made = candidate.built_for
    if candidate.glibc is not None and scope.request.environment.glibc is None:
        yield f"needs glibc {candidate.glibc} or newer"
    if made is not None and made.archs is None and scope.request.gpus and candidate.kind is Kind.WHEEL:
        yield "for which GPUs it holds code is not stated; taken to be those of the publisher's own wheels, if any"
    if made is not None and made.cxx11_abi is None and made.torch is not None and candidate.kind is Kind.WHEEL:
        yield "its C++ ABI is not stated; it is taken to be that of the torch it names"


def _to_verify(candidate: Candidate, scope: Scope) -> Iterator[str]:
    made = candidate.built_for
    if made is not None and made.torch is not None and made.torch.release[:2] != scope.build.version.release[:2]:
        yield f"built for torch {made.torch}, used with {scope.build.label}: forward and backward have to be verified"


def allowed_by_rules(candidates: tuple[Candidate, ...], scope: Scope) -> tuple[bool, tuple[Caution, ...]]:
    """Whether no rule speaks against these candidates together, and what the rules say all the same."""
    key = tuple(f"{c.distribution}=={c.version}@{c.kind}" for c in candidates)
    if key in scope.answers:
        return scope.answers[key]
    against: dict[str, str] = {}
    cautions: dict[str, Caution] = {}
    for environment in _machines(hypothetical(scope.request, scope.build, candidates)):
        answer = scope.rules(environment, via(candidates))
        against.update(answer.against)
        for certain, said in ((False, answer.unknown), (True, answer.warnings)):
            cautions.update((rule, Caution(rule=rule, reason=text, certain=certain)) for rule, text in said)
        if against:
            # One kind of GPU of the fleet is enough for a no.
            break
    for rule, reason in sorted(against.items()):
        label = " + ".join(c.label for c in candidates[1:])
        told = f"{reason.rstrip('.')} (with {label})" if label else reason
        scope.reject(candidates[0], RejectionCode.RULE, told, rule)
    scope.answers[key] = (not against, tuple(cautions[rule] for rule in sorted(cautions)))
    return scope.answers[key]


def _machines(environment: Environment) -> Iterator[Environment]:
    """One machine of each kind in the fleet: a rule speaks about the GPUs of one machine."""
    if not environment.gpus:
        yield environment
        return
    for gpu in dict.fromkeys(environment.gpus):
        yield dataclasses.replace(environment, gpus=(gpu,))


def hypothetical(request: Request, build: TorchBuild, candidates: Iterable[Candidate]) -> Environment:
    """The target as it would be with this torch and these candidates installed."""
    installed: dict[str, Version] = {"torch": build.version}
    if build.triton_version is not None:
        installed["triton"] = request.environment.triton or build.triton_version
    if request.transformers is not None:
        installed["transformers"] = request.transformers
    for candidate in candidates:
        installed[candidate.distribution] = Version(candidate.version.public)
        for requirement in candidate.requires:
            exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
            if exact and not exact[0].endswith(".*"):
                installed.setdefault(requirement.name.lower(), Version(exact[0]))
    return dataclasses.replace(
        request.environment,
        torch=build.version,
        torch_cuda=build.cuda,
        torch_is_cpu=build.cuda is None,
        cxx11_abi=build.cxx11_abi,
        triton=installed.get("triton"),
        distributions={
            name: Distribution(name=name, version=str(version), location="") for name, version in installed.items()
        },
        transformers_version=request.transformers,
    )


def via(candidates: Iterable[Candidate]) -> dict[str, str]:
    """How each distribution would get there, in the words of the rules."""
    return {c.distribution: _via(c) for c in candidates}


def _via(candidate: Candidate) -> str:
    if candidate.kind is Kind.SDIST:
        return "sdist"
    if candidate.kind is Kind.GIT:
        return "source"
    return "release-wheel" if candidate.direct else "index-wheel"
