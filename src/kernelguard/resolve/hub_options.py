"""Which build variant of a hub repository would serve a need with one build of torch?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from packaging.version import Version

from kernelguard.resolve.archs import runs_on, text
from kernelguard.resolve.matrix import Hub, Repository
from kernelguard.resolve.request import Request
from kernelguard.resolve.values import Candidate, Known, Provider, RejectionCode, TorchBuild
from kernelguard.resolve.variants import System, choose_variant
from kernelguard.sources.values import Kind

Reason = tuple[RejectionCode, str]


def unusable_hub(provider: Provider, request: Request, hub: Hub) -> Reason | None:
    """Why nothing from this repository can be used with this transformers at all; None: something may."""
    repository = find_repository(provider.distribution, hub)
    if repository is not None and not repository.backward:
        return (
            RejectionCode.NO_BACKWARD,
            f"{repository.id} has no right backward ({repository.source}), the run trains",
        )
    if request.transformers is None:
        return None
    window = window_problem(request.transformers, hub)
    return (RejectionCode.WINDOW, window) if window else None


def window_problem(transformers: Version, hub: Hub) -> str:
    """Why this transformers can use no published `kernels`; empty: it can, or nothing is known about it."""
    window = next((w for w in hub.windows if w.transformers.contains(transformers, prereleases=True)), None)
    if window is None or any(window.kernels.contains(release) for release in hub.published):
        return ""
    newest = max(hub.published, default=None)
    return f"transformers {transformers} accepts kernels{window.kernels}, the newest published one is {newest}"


def kernels_package(request: Request, hub: Hub) -> Candidate | None:
    """The release of `kernels` that goes with this transformers: the newest one that it accepts."""
    window = next(
        (
            w
            for w in hub.windows
            if request.transformers is not None and w.transformers.contains(request.transformers, prereleases=True)
        ),
        None,
    )
    fitting = [r for r in hub.published if window is None or window.kernels.contains(r)]
    if not fitting:
        return None
    return Candidate(
        distribution="kernels",
        version=max(fitting),
        kind=Kind.WHEEL,
        source="package index",
        known=Known.OBSERVED,
        evidence=window.source if window is not None else "newest published",
    )


def find_repository(name: str, hub: Hub) -> Repository | None:
    """What is known about a repository."""
    return next((r for r in hub.repositories if r.id == name), None)


def wanted_version(repository: Repository | None, transformers: Version | None) -> int | None:
    """The version of the repository that this transformers asks for; None: not known, the newest will do."""
    if repository is None or transformers is None:
        return None
    return next((v for spec, v in repository.versions if spec.contains(transformers, prereleases=True)), None)


def system_of(build: TorchBuild, request: Request) -> System:
    """What `kernels` would see on the target with this torch."""
    return System(
        backend="cpu" if build.cuda is None or request.on_cpu else "cuda",
        backend_version=None if request.on_cpu else build.cuda,
        machine=build.machine,
        torch=build.version,
        cxx11_abi=build.cxx11_abi,
        python=request.environment.python,
    )


def pick_variant(
    candidates: Sequence[Candidate], build: TorchBuild, request: Request
) -> Iterator[tuple[Candidate, Reason | None]]:
    """Each variant with why it is not used, the one that `kernels` would load with None.

    `kernels` chooses one variant and only then looks at its archs; when those do not fit it does not try the next.
    """
    by_name = {c.filename: c for c in candidates}
    chosen, decisions = choose_variant(by_name, system_of(build, request))
    for decision in decisions:
        candidate = by_name[decision.name]
        if decision.name != chosen:
            reason = decision.reason or f"kernels prefers {chosen}"
            yield candidate, (RejectionCode.VARIANT, reason)
            continue
        archs = candidate.built_for.archs if candidate.built_for is not None else None
        unfit = next(
            (g for g in request.gpus if archs is not None and g.capability and not runs_on(archs, g.capability)), None
        )
        if unfit is not None and unfit.capability is not None and archs is not None:
            told = f"{decision.name} holds code for {', '.join(archs)}, {unfit.name} is {text(unfit.capability)}"
            yield candidate, (RejectionCode.GPU, told)
        else:
            yield candidate, None
