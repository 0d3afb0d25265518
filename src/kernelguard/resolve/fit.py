"""Does this candidate, or this build of torch, fit the target? Each no names both sides."""

from __future__ import annotations

from collections.abc import Iterator

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelguard.observe.values import Environment
from kernelguard.resolve.archs import runs_on, text
from kernelguard.resolve.matrix import Matrix
from kernelguard.resolve.request import Request
from kernelguard.resolve.values import Candidate, Kind, RejectionCode, TorchBuild

Reason = tuple[RejectionCode, str]
_OWN_NAME = "kernelguard"
CROSS_TORCH_MINORS = 2
"""How many minors newer the torch may be than the one a wheel was built for: as far as upstream tests were run."""


def unfit_torch(build: TorchBuild, request: Request, known: Matrix) -> Reason | None:
    """Why this build of torch cannot be used on the target; None: it can."""
    environment = request.environment
    if environment.torch is not None and not is_release(environment.torch, build.version):
        return RejectionCode.FIXED, f"the target fixes torch {environment.torch.public}"
    if request.on_cpu:
        if environment.torch is not None and environment.torch.local == "cpu" and build.cuda is not None:
            return RejectionCode.FIXED, f"{build.label} is a CUDA build, the target fixes torch {environment.torch}"
    elif build.cuda is None:
        return RejectionCode.CUDA, f"{build.label} is a CPU build, the target has {_gpu_names(environment)}"
    elif environment.torch_cuda is not None and build.cuda.release[:2] != environment.torch_cuda.release[:2]:
        return (
            RejectionCode.CUDA,
            f"{build.label} is built for CUDA {build.cuda}, the target fixes {environment.torch_cuda}",
        )
    if build.machine != environment.machine:
        return RejectionCode.PLATFORM, f"this build is for {build.machine}, the target is {environment.machine}"
    reason = _unfit_python(build.pythons, environment, str(build.requires_python)) or _below_transformers(
        build, request, known
    )
    triton = environment.triton
    if reason is None and triton is not None and build.triton and not build.triton.contains(triton, prereleases=True):
        reason = (RejectionCode.REQUIRES, f"{build.label} pins triton{build.triton}, the target fixes triton {triton}")
    return reason or _unfit_glibc(build.glibc, build.label, environment) or _unfit_gpu(build, request, known)


def _below_transformers(build: TorchBuild, request: Request, known: Matrix) -> Reason | None:
    wanted, python = request.transformers, request.environment.python
    for floor in known.floors if wanted is not None else ():
        if wanted is None or not floor.transformers.contains(wanted, prereleases=True):
            continue
        if not floor.torch.contains(build.version, prereleases=True):
            return RejectionCode.REQUIRES, f"transformers {wanted} requires torch{floor.torch}, this is {build.version}"
        if python is not None and not floor.python.contains(_full(python), prereleases=True):
            return (
                RejectionCode.PYTHON,
                f"transformers {wanted} requires Python {floor.python}, the target has {python}",
            )
    return None


def is_release(wanted: Version, version: Version) -> bool:
    """Whether `version` is what a target means: `2.12` is any 2.12.x, `2.12.1` that one; local parts play no part."""
    if len(wanted.release) < 3:
        return version.release[: len(wanted.release)] == wanted.release
    return wanted.public == version.public


def _unfit_gpu(build: TorchBuild, request: Request, known: Matrix) -> Reason | None:
    if build.cuda is None or request.on_cpu:
        return None
    environment = request.environment
    floor = known.drivers.floor(build.cuda)
    if environment.driver is not None and floor is not None and environment.driver < floor:
        return (
            RejectionCode.DRIVER,
            f"CUDA {build.cuda} needs driver {floor} or newer, the target has {environment.driver}",
        )
    return _unfit_archs(build.archs, build.label, request) or _unlike_index_build(build, request, known)


def _unlike_index_build(build: TorchBuild, request: Request, known: Matrix) -> Reason | None:
    """A channel's build with unknown archs is taken to hold at least what the index build of its release holds."""
    if build.archs is not None:
        return None
    like = [b for b in known.torch if b.version == build.version and b.machine == build.machine and b.archs is not None]
    for gpu in request.gpus:
        if gpu.capability is not None and not any(runs_on(b.archs or (), gpu.capability) for b in like):
            return (
                RejectionCode.GPU,
                (
                    f"for which GPUs {build.label} holds code is not known, and no build of torch {build.version} "
                    f"that is known runs on {gpu.name} ({text(gpu.capability)})"
                ),
            )
    return None


def _unfit_archs(archs: tuple[str, ...] | None, label: str, request: Request) -> Reason | None:
    if archs is None:
        return None
    for gpu in request.gpus:
        if gpu.capability is not None and not runs_on(archs, gpu.capability):
            return (
                RejectionCode.GPU,
                f"{label} holds code for {', '.join(archs)}, {gpu.name} is {text(gpu.capability)}",
            )
    return None


def unfit_target(candidate: Candidate, request: Request, known: Matrix) -> Reason | None:
    """Why this candidate cannot be used on the target, whatever torch is chosen; None: it can."""
    environment = request.environment
    if candidate.distribution == _OWN_NAME:
        return RejectionCode.LOOK_ALIKE, f"{_OWN_NAME} on the package index is an unrelated project"
    if _is_look_alike(candidate, known):
        return (
            RejectionCode.LOOK_ALIKE,
            f"{candidate.distribution} {candidate.version} on the package index is a placeholder without code",
        )
    if candidate.yanked:
        return RejectionCode.YANKED, f"{candidate.label} was withdrawn by its publisher: {candidate.yanked}"
    if candidate.version.is_prerelease and not request.options.pre_releases:
        return RejectionCode.PRE_RELEASE, f"{candidate.version} is a pre-release, and pre-releases are not asked for"
    reason = _unfit_python(candidate.pythons, environment, str(candidate.requires_python))
    if reason is not None:
        return reason
    if candidate.machines is not None and environment.machine not in candidate.machines:
        return (
            RejectionCode.PLATFORM,
            f"{candidate.label} is for {', '.join(candidate.machines)}, the target is {environment.machine}",
        )
    if candidate.glibc is not None and (reason := _unfit_glibc(candidate.glibc, candidate.label, environment)):
        return reason
    if candidate.built_for is not None and candidate.kind is not Kind.HUB:
        if request.on_cpu:
            return RejectionCode.CUDA, f"{candidate.label} is a CUDA extension, the target has no GPU"
        if (reason := _unfit_archs(_archs_of(candidate, known), candidate.label, request)) is not None:
            return reason
    if candidate.needs_nvcc and candidate.kind is Kind.WHEEL and environment.cuda_toolkit is None:
        return (
            RejectionCode.NVCC,
            f"{candidate.label} compiles on the training machine with nvcc; the target does not say that it has one",
        )
    return None


def _archs_of(candidate: Candidate, known: Matrix) -> tuple[str, ...] | None:
    """Its archs; where it does not say, those of its publisher's own wheels of this version for the same CUDA major."""
    made = candidate.built_for
    if made is None or made.archs is not None or made.cuda is None:
        return made.archs if made is not None else None
    facts = known.packages.get(candidate.distribution)
    return facts.archs.get((candidate.version.public, made.cuda.major)) if facts is not None else None


def _is_look_alike(candidate: Candidate, known: Matrix) -> bool:
    facts = known.packages.get(candidate.distribution)
    if facts is None or facts.look_alikes is None or candidate.index_url or candidate.direct:
        return False
    return facts.look_alikes.contains(candidate.version, prereleases=True)


def _unfit_python(pythons: tuple[str, ...] | None, environment: Environment, requires: str) -> Reason | None:
    python = environment.python
    if python is None:
        return None
    # `python=3.12` means some 3.12: its floor is compared, as a requirement like >=3.12.4 is rare and pip checks it.
    if requires and not SpecifierSet(requires).contains(_full(python), prereleases=True):
        return RejectionCode.PYTHON, f"it requires Python {requires}, the target has {python}"
    tag = f"cp{python.major}{python.minor}"
    if pythons is not None and tag not in pythons:
        return RejectionCode.PYTHON, f"it is built for {', '.join(pythons)}, the target is {tag}"
    return None


def _full(python: Version) -> Version:
    """The newest patch release that `3.12` can mean, so that `>=3.8.0` and `>=3.12.1` both hold for it."""
    return python if len(python.release) > 2 else Version(f"{python.major}.{python.minor}.99")


def _unfit_glibc(floor: Version, label: str, environment: Environment) -> Reason | None:
    if environment.glibc is not None and environment.glibc < floor:
        return RejectionCode.GLIBC, f"{label} needs glibc {floor} or newer, the target has {environment.glibc}"
    return None


def unfit_build(candidate: Candidate, build: TorchBuild, *, cross_torch: bool = False) -> Reason | None:
    """Why a compiled candidate cannot be used with this build of torch; None: it can."""
    made = candidate.built_for
    if made is None:
        return None
    if made.torch is None:
        return RejectionCode.UNSTATED, f"{candidate.label} does not say for which torch it was built"
    if made.torch.release[:2] != build.version.release[:2]:
        behind = build.version.minor - made.torch.minor
        if not (cross_torch and made.torch.major == build.version.major and 0 < behind <= CROSS_TORCH_MINORS):
            return (
                RejectionCode.TORCH,
                f"built for torch {made.torch}, the set has torch {build.version.major}.{build.version.minor}",
            )
    if made.cuda is not None:
        if build.cuda is None:
            return RejectionCode.CUDA, f"built for CUDA {made.cuda}, {build.label} is a CPU build"
        if made.cuda.major != build.cuda.major:
            return RejectionCode.CUDA, f"built for CUDA {made.cuda}, {build.label} is CUDA {build.cuda}"
        if len(made.cuda.release) > 1 and made.cuda.minor > build.cuda.minor:
            return RejectionCode.CUDA, f"built with CUDA {made.cuda}, newer than the {build.cuda} of {build.label}"
    if made.cxx11_abi is not None and made.cxx11_abi != build.cxx11_abi:
        return (
            RejectionCode.ABI,
            f"built with the {_abi(made.cxx11_abi)} C++ ABI, {build.label} has the {_abi(build.cxx11_abi)} one",
        )
    return None


def _abi(new: bool) -> str:
    return "new" if new else "old"


def unmet_requirements(candidate: Candidate, build: TorchBuild, request: Request) -> Iterator[str]:
    """Which of the candidate's requirements the torch family, triton, transformers or Python of the set do not meet."""
    have = {"torch": build.version, "triton": build.triton_version, "transformers": request.transformers}
    for requirement in candidate.requires:
        if requirement.marker is not None and not requirement.marker.evaluate(_markers(request)):
            continue
        name = requirement.name.lower()
        version = have.get(name)
        if name == "triton" and version is None and not request.on_cpu:
            yield f"it requires {requirement}, {build.label} brings none"
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"it requires {requirement}, the set has {name} {version}"


def _markers(request: Request) -> dict[str, str]:
    """The target's values of environment markers; the running interpreter's must play no part."""
    python = request.environment.python or Version("3.12")
    return {
        "extra": "",
        "implementation_name": "cpython",
        "implementation_version": str(_full(python)),
        "os_name": "posix",
        "platform_machine": request.environment.machine or "x86_64",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": str(_full(python)),
        "python_version": f"{python.major}.{python.minor}",
        "sys_platform": "linux",
    }


def _gpu_names(environment: Environment) -> str:
    names = ", ".join(dict.fromkeys(gpu.name for gpu in environment.gpus))
    return names or "a GPU"
