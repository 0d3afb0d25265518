"""Which build of each kernel fits this target, what would newer have cost, and what would make a misfit fit?"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from packaging.version import Version

from kernelguard.observe.values import Environment
from kernelguard.resolve.hub_options import window_problem
from kernelguard.resolve.matrix import Matrix, matrix
from kernelguard.resolve.request import Options, Request, RuleAnswer, RuleCheck, complete_target, no_rules
from kernelguard.resolve.search import Found, Market, search
from kernelguard.resolve.values import (
    Candidate,
    Kind,
    Need,
    Rejected,
    RejectionCode,
    Resolution,
    SourceBuild,
    TorchBuild,
)

_PYTHONS = tuple(Version(f"3.{minor}") for minor in (13, 12, 11, 10, 14))
"""In the order in which another one is proposed."""


def resolve(
    *,
    needs: Sequence[Need],
    environment: Environment,
    transformers: Version | None = None,
    market: Market | None = None,
    rules: RuleCheck = no_rules,
    options: Options | None = None,
) -> Resolution:
    """Find the newest set that serves every need on the target, or the nearest one and what stands in its way. Pure.

    `environment` is the target: torch, CUDA and triton are fixed where it says them, and free where it does not.

    Raises:
        InputError: the target contradicts what is published (CUDA 11.8 for torch 2.12), or names an unknown torch.
    """
    market = market if market is not None else Market(known=matrix())
    target, assumed = complete_target(environment)
    request = Request(
        needs=tuple(needs),
        environment=target,
        transformers=transformers or environment.transformers_version,
        options=options or Options(),
    )
    remembered = _remember(rules)
    found = search(request, market, remembered)
    return Resolution(
        target=environment.origin,
        needs=request.needs,
        torch=found.build,
        triton=_triton(found.build, target),
        choices=found.choices,
        missing=found.missing,
        costs=found.costs,
        trace=found.trace,
        notes=(*assumed, *_notes(found, request, market.known)),
        cautions=found.cautions,
        builds=tuple(_source_builds(found, request, market.known)),
        fixes=() if found.complete else tuple(dict.fromkeys(_fixes(found, request, market, remembered))),
        admits_launch=not request.on_cpu,
    )


def _remember(rules: RuleCheck) -> RuleCheck:
    """The same rules, asked once for each hypothetical environment."""
    answers: dict[tuple[object, ...], RuleAnswer] = {}

    def ask(environment: Environment, via: Mapping[str, str]) -> RuleAnswer:
        installed = environment.distributions or {}
        key = (
            tuple(sorted((name, d.version) for name, d in installed.items())),
            environment.python,
            environment.machine,
            environment.glibc,
            environment.driver,
            environment.torch_cuda,
            environment.cxx11_abi,
            environment.gpus,
            tuple(sorted(via.items())),
        )
        if key not in answers:
            answers[key] = rules(environment, via)
        return answers[key]

    return ask


def _triton(build: TorchBuild | None, target: Environment) -> Version | None:
    if build is None:
        return None
    # A CPU build brings none, and what the target fixes is fixed: without one, no Triton kernel can be imported.
    return target.triton or build.triton_version


def _notes(found: Found, request: Request, known: Matrix) -> Iterator[str]:
    build = found.build
    heard = {no.distribution for no in found.trace if isinstance(no, Rejected)}
    for need in found.missing:
        if not heard & {p.distribution for p in need.providers}:
            yield f"{need.package}: nothing is known that has it"
    if request.transformers is not None and (problem := window_problem(request.transformers, known.hub)):
        yield f"no kernel from the hub can be used: {problem}"
    if build is None:
        return
    if request.on_cpu:
        yield "the target has no GPU: this set can be installed and tested, and never admits a launch"
        for need in request.needs:
            if need not in {choice.need for choice in found.choices}:
                yield f"{need.package} is left out: it is a CUDA extension"
        return
    cuda = build.cuda
    if cuda is not None and request.environment.driver is None:
        floor, toolkit = known.drivers.floor_text(cuda), known.drivers.toolkit.get(cuda)
        if not floor:
            yield f"which driver CUDA {cuda} needs is not known"
        else:
            own = f", {toolkit} is the one that CUDA {cuda} came with" if toolkit is not None else ""
            yield f"{build.label} needs NVIDIA driver {floor} or newer (minor-version compatibility){own}"
    if request.environment.glibc is None:
        yield f"{build.label} needs glibc {build.glibc} or newer"
    if build.archs is None and request.gpus:
        yield f"for which GPUs {build.label} from {build.channel} holds code is not known"
    if build.triton is not None and request.environment.triton is None and "~=" in str(build.triton):
        yield f"{build.label} allows triton{build.triton}; {build.triton_version} is taken"


def _source_builds(found: Found, request: Request, known: Matrix) -> Iterator[SourceBuild]:
    build = found.build
    for choice in found.choices:
        for accepted in choice.accepted:
            candidate = accepted.candidate
            if build is not None and candidate.kind in {Kind.SDIST, Kind.GIT}:
                yield _source_build(candidate, build, request, known)


def _source_build(candidate: Candidate, build: TorchBuild, request: Request, known: Matrix) -> SourceBuild:
    facts = known.packages.get(candidate.distribution)
    how = facts.build if facts is not None else None
    archs = tuple(sorted({f"{g.capability[0]}.{g.capability[1]}" for g in request.gpus if g.capability is not None}))
    variable = how.arch_variable if how is not None else "TORCH_CUDA_ARCH_LIST"
    if how is None:
        note = "how this package chooses its GPU archs is not known"
    elif how.hard_coded_archs:
        note = f"{candidate.distribution} lists its GPU archs in its own setup.py; an arch list does not reach it"
    else:
        note = f"set {variable}"
    cxx = int(how.std.removeprefix("c++")) if how is not None and how.std else build.min_cxx
    return SourceBuild(
        distribution=candidate.distribution,
        requires=how.requires if how is not None else (),
        archs=archs,
        arch_variable=variable,
        archs_note=note,
        nvcc=build.cuda,
        cxx=max(cxx, build.min_cxx),
    )


def _fixes(found: Found, request: Request, market: Market, rules: RuleCheck) -> Iterator[str]:
    """Changes to the target or the options, each of which makes the set complete."""
    names = {
        "torch",
        *(name for need in found.missing for p in need.providers for name in (p.distribution, *p.companions)),
    }
    codes = {no.code for no in found.trace if isinstance(no, Rejected) and no.distribution in names}
    fixed = False
    for text, relaxed in _relaxations(request, codes):
        relaxed_found = search(relaxed, market, rules, nearest=False)
        if relaxed_found.complete:
            fixed = True
            yield _say(text, relaxed_found, relaxed, market.known)
    if fixed:
        return
    # No single change is enough: what this GPU could have at all.
    bare = dataclasses.replace(
        request.environment, torch=None, torch_cuda=None, triton=None, driver=None, glibc=None, python=_PYTHONS[1]
    )
    relaxed = dataclasses.replace(request, environment=bare)
    relaxed_found = search(relaxed, market, rules, nearest=False)
    if relaxed_found.complete:
        text = "no single change is enough; nearest: torch={torch},cuda={cuda},python={python} with driver {driver} "
        yield _say(text + "and glibc {glibc} or newer", relaxed_found, relaxed, market.known)


def _say(text: str, found: Found, request: Request, known: Matrix) -> str:
    build = found.build
    if build is None:
        return text
    floors = [build.glibc, *(c.glibc for c in _pins(found) if c.glibc is not None)]
    return text.format(
        torch=build.version,
        cuda=build.cuda or "none",
        python=request.environment.python,
        driver=known.drivers.floor_text(build.cuda) if build.cuda is not None else "",
        glibc=max(floors),
    )


def _relaxations(request: Request, codes: AbstractSet[RejectionCode]) -> Iterator[tuple[str, Request]]:
    """What could be changed, as far as it is what something was rejected for."""
    environment, options = request.environment, request.options

    def other(**change: Any) -> Request:
        return dataclasses.replace(request, environment=dataclasses.replace(environment, **change))

    def wider(**change: Any) -> Request:
        return dataclasses.replace(request, options=dataclasses.replace(options, **change))

    if environment.torch is not None:
        free = other(torch=None, torch_cuda=None, triton=None)
        yield "torch={torch},cuda={cuda} in the target serves all", free
    if environment.torch_cuda is not None and RejectionCode.CUDA in codes:
        yield "cuda={cuda} in the target serves all, with torch {torch}", other(torch_cuda=None)
    if environment.triton is not None:
        yield "leave triton out of the target: torch {torch} serves all with its own", other(triton=None)
    for python in _PYTHONS if RejectionCode.PYTHON in codes else ():
        if python != environment.python:
            yield "python={python} in the target serves all, with torch {torch}", other(python=python)
    if environment.driver is not None and RejectionCode.DRIVER in codes:
        text = "driver {driver} or newer in the target serves all, with torch {torch} for CUDA {cuda}"
        yield text, other(driver=None)
    if environment.glibc is not None and RejectionCode.GLIBC in codes:
        yield "glibc={glibc} or newer in the target serves all, with torch {torch}", other(glibc=None)
    for shim in sorted({p.shim for need in request.needs for p in need.providers if p.shim} - options.shims):
        yield f"the shim {shim} serves all, with torch {{torch}}", wider(shims=options.shims | {shim})
    if not options.cross_torch and RejectionCode.TORCH in codes:
        yield "--cross-torch serves all with torch {torch}; it then has to be verified", wider(cross_torch=True)
    if not options.allow_source_build and RejectionCode.SOURCE_BUILD in codes:
        text = "--allow-source-build serves all with torch {torch} for CUDA {cuda}"
        yield text, wider(allow_source_build=True)


def _pins(found: Found) -> Iterator[Candidate]:
    return (a.candidate for choice in found.choices for a in choice.accepted)
