"""What `resolve` hands on: why each candidate was taken or not, and the resolution with its whole trace."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from packaging.version import Version

from kernelguard.sources.values import BuiltFor, Candidate, Kind, Known, TorchBuild

__all__ = [
    "Accepted",
    "BuiltFor",
    "Candidate",
    "Caution",
    "Choice",
    "Cost",
    "Decision",
    "Kind",
    "Known",
    "Need",
    "Provider",
    "Rejected",
    "RejectionCode",
    "Resolution",
    "SourceBuild",
    "TorchBuild",
]


class RejectionCode(StrEnum):
    """Why a candidate cannot be used; stable, for machines."""

    TORCH = "torch"
    CUDA = "cuda"
    ABI = "abi"
    PYTHON = "python"
    PLATFORM = "platform"
    GLIBC = "glibc"
    GPU = "gpu"
    DRIVER = "driver"
    REQUIRES = "requires"
    """Its metadata asks for another version of something in the set."""
    RULE = "rule"
    """A row of `matrices/rules.toml` speaks against it."""
    RULE_OPEN = "rule-open"
    """A rule may speak against it, and the target does not say enough to tell."""
    YANKED = "yanked"
    LOOK_ALIKE = "look-alike"
    PRE_RELEASE = "pre-release"
    SOURCE_BUILD = "source-build"
    UNSTATED = "unstated"
    """It does not say for which torch it was built."""
    NVCC = "nvcc"
    CXX = "cxx"
    """Its build sets a C++ standard that this torch refuses."""
    SHIM = "shim"
    """The model is not bound to it without a shim."""
    WINDOW = "window"
    """transformers does not accept the `kernels` package that it comes through."""
    VARIANT = "variant"
    """A hub variant for another system."""
    NO_BACKWARD = "no-backward"
    FIXED = "fixed"
    """The target fixes another version."""
    UNVERIFIABLE = "unverifiable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that was looked at and not taken; `reason` names both sides."""

    candidate: str
    distribution: str
    code: RejectionCode
    reason: str
    torch: str = ""
    """Under which torch build; empty: whatever torch is chosen."""
    source: str = ""
    rule: str = ""
    """Id of the rule, with `rule` and `rule-open`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A candidate that fits."""

    candidate: Candidate
    torch: str
    notes: tuple[str, ...] = ()
    """What a person has to know: not stated, or not verified."""
    verify: tuple[str, ...] = ()
    """What has to be measured before this may be trusted (a wheel of another torch minor)."""


Decision = Accepted | Rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Caution:
    """What a row of `matrices/rules.toml` says about the chosen set without speaking against it."""

    rule: str
    reason: str
    certain: bool
    """False: the rule may speak against the set, and the target does not say enough to tell."""

    def __str__(self) -> str:
        return f"{self.rule}: {self.reason}" if self.certain else f"{self.rule}: cannot tell, {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One distribution, or hub repository, that has the wanted symbols."""

    distribution: str
    """Normalized name, or `org/repository` on the hub."""
    kind: Kind = Kind.WHEEL
    companions: tuple[str, ...] = ()
    """Installed with it at the same version."""
    shim: str = ""
    """What has to bind the model to it; empty: the model's own code does. `--shim NAME` or the bundled trainer."""
    why: str = ""
    """One sentence for the report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one or more fast paths of the model want from one import package."""

    package: str
    """Import name, `fla`."""
    symbols: tuple[str, ...]
    providers: tuple[Provider, ...]
    """All that could serve it, the recommended one first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for one need."""

    need: Need
    provider: Provider
    accepted: tuple[Accepted, ...]
    """The provider itself first, then companions and helpers."""
    others: tuple[str, ...] = ()
    """The other providers, each with why it was not taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a newer torch than the chosen one would have cost."""

    torch: str
    lost: Mapping[str, str]
    """Need (import package) -> the nearest candidate's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceBuild:
    """What the image's build stage needs to build one candidate."""

    distribution: str
    requires: tuple[str, ...]
    archs: tuple[str, ...]
    arch_variable: str
    """The environment variable that sets the arch list; empty: the package hard-codes its own."""
    archs_note: str
    nvcc: Version | None
    cxx: int
    isolation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """The answer: a set that serves every need, or what stands in its way."""

    target: str
    needs: tuple[Need, ...]
    torch: TorchBuild | None
    triton: Version | None
    choices: tuple[Choice, ...]
    missing: tuple[Need, ...]
    """Needs that nothing serves in the returned set; with a complete set empty."""
    costs: tuple[Cost, ...]
    trace: tuple[Decision, ...]
    notes: tuple[str, ...] = ()
    cautions: tuple[Caution, ...] = ()
    builds: tuple[SourceBuild, ...] = ()
    fixes: tuple[str, ...] = ()
    """What would make an incomplete set complete, each a change to the target or a flag."""
    admits_launch: bool = True
    """False: a CPU set; it can be installed and tested, never launched."""

    @property
    def complete(self) -> bool:
        """Whether every need is served."""
        return self.torch is not None and not self.missing

    @property
    def pins(self) -> tuple[Candidate, ...]:
        """Every chosen candidate, each once, in the order of the choices."""
        return tuple(dict.fromkeys(a.candidate for choice in self.choices for a in choice.accepted))
