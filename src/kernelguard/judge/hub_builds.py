"""Can a kernel of the hub certainly not be loaded on this machine? Builds that do not exist, and hubs out of reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packaging.version import Version

from kernelguard.observe.values import Environment

_TRUE = frozenset({"1", "ON", "YES", "TRUE"})
"""What huggingface_hub takes for true in an environment variable."""
_ASKS_THE_HUB = Version("0.18")
"""Releases of `kernels` before it turn a version number into a commit by asking the hub, also for what is cached."""
_NAMED = re.compile(r"(?P<id>[^@:\s]+)(?:@(?P<revision>[^:\s]+))?(?::\S+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class NoBuild:
    """Why nothing can be loaded from a repository."""

    reason: str
    fix: str


def no_build(asked: str, transformers: Version, environment: Environment) -> NoBuild | None:
    """Why the repository of `org/name[@revision][:function]` has nothing for this machine; None: it may have."""
    named = _NAMED.fullmatch(asked.strip())
    if named is None or environment.torch is None:
        return None
    # Imported here: the matrix is validated when it is read, and few runs ask for a kernel of the hub.
    from kernelguard.resolve.archs import runs_on  # noqa: PLC0415
    from kernelguard.resolve.hub_options import find_repository, wanted_version  # noqa: PLC0415
    from kernelguard.resolve.matrix import matrix  # noqa: PLC0415

    repository = find_repository(named["id"], matrix().hub)
    if repository is None:
        return None
    revision = named["revision"]
    version = wanted_version(repository, transformers) if revision is None else _number(revision)
    builds = next((b for b in repository.builds if b.version == version), None)
    if builds is None:
        return None
    torch = Version(f"{environment.torch.major}.{environment.torch.minor}")
    if not builds.torch.contains(torch):
        others = [b.version for b in repository.builds if b.torch.contains(torch)]
        return NoBuild(
            reason=f"version {version} of {repository.id} has builds for torch {builds.torch}, the machine has torch "
            f"{environment.torch}",
            fix=f"attn_implementation={repository.id}@v{max(others)}" if others else "attn_implementation=sdpa",
        )
    unfit = next((g for g in environment.gpus if g.capability and not runs_on(builds.archs, g.capability)), None)
    if builds.archs and unfit is not None and unfit.capability is not None:
        return NoBuild(
            reason=f"version {version} of {repository.id} holds GPU code for {', '.join(builds.archs)}, {unfit.name} "
            f"has capability {unfit.capability[0]}.{unfit.capability[1]}",
            fix="attn_implementation=sdpa, or another kernel that is built for this GPU",
        )
    return None


def offline_problem(environment: Environment, repository: str = "") -> str:
    """Why a kernel that is asked for by version cannot be had without a network, cached or not; empty: it may be."""
    name = next(
        (n for n in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environment.variables.get(n, "").upper() in _TRUE), ""
    )
    found = (environment.distributions or {}).get("kernels")
    if not name or found is None or (repository and repository in environment.variables.get("LOCAL_KERNELS", "")):
        return ""
    from kernelguard.judge.hub import version_of  # noqa: PLC0415 - it asks here

    version = version_of(found.version)
    if version is None or version >= _ASKS_THE_HUB:
        return ""
    return (
        f"{name}={environment.variables[name]}, and kernels {version} asks the hub which commit a version is, so that "
        "not even a cached kernel is found"
    )


OFFLINE_FIX = "unset HF_HUB_OFFLINE, or name the folder: LOCAL_KERNELS=org/name=/path"


def _number(revision: str) -> int | None:
    """The version that a branch `v3` is."""
    found = re.fullmatch(r"v(\d+)", revision)
    return int(found[1]) if found is not None else None
