"""What is an admission asked, and what does it answer? Values only; the rules are in `admission.py`.

Runs where the job is submitted, never inside a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packaging.version import Version

from kernelguard.judge.values import Finding, Level, Status, worst
from kernelguard.lock.values import Lock
from kernelguard.observe.values import Environment
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What a person decided to accept. Each is named for what it does and ends up in the attestation."""

    accept_level: Level = Level.GPU
    """`--test-only-accept-level`: admit on a verdict of this level, and ask for no GPU."""
    accept_older_driver: bool = False
    """`--accept-older-driver-branch`: a driver of an older branch than the verdict's, still above the floor."""
    accept_unmeasured: tuple[str, ...] = ()
    """`--accept-unmeasured SYMBOL`: kernels of which the verdict cannot tell whether they are right."""
    accept_other_dependencies: bool = False
    """`--accept-other-dependencies`: distributions that hold no kernel may differ from the lock."""

    @property
    def texts(self) -> tuple[str, ...]:
        """As the command line has them; empty: none."""
        found = []
        if self.accept_level is not Level.GPU:
            found.append(f"test-only-accept-level {self.accept_level.name.lower()}")
        if self.accept_older_driver:
            found.append("accept-older-driver-branch")
        found += [f"accept-unmeasured {symbol}" for symbol in self.accept_unmeasured]
        if self.accept_other_dependencies:
            found.append("accept-other-dependencies")
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the ranks will run, as far as it can be seen from here."""

    environment: Environment | None = None
    """The interpreter that will train; None: it is not on this machine, and every rank compares it."""
    lock_findings: tuple[Finding, ...] = ()
    """What `check_lock` found in it."""
    check_findings: tuple[Finding, ...] = ()
    """What `check` at level import found in it, but for known bad combinations: those the verdict measured."""
    binaries: Mapping[str, str] = field(default_factory=dict)
    """sha256 of its compiled kernels now, as a verdict has them."""
    gpus_here: bool = True
    """The ranks run on this machine; False: GPU and driver are checked by every rank."""
    image: Image | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A container image that the ranks run in."""

    reference: str
    digest: str = ""
    """`sha256:...` from the reference; empty: it is named by a tag, which can move."""
    candidate: bool = False
    """It was built and not verified on a GPU yet."""
    foreign: bool = False
    """An engine has it, and it was not made by `kernelguard build`."""
    changed: bool = False
    """Its content is not the one that its labels were given to."""
    tag_is_all: bool = False
    """The engine can name images by tag only."""
    lock_digest: str = ""
    """The lock that its label names; empty: no engine was there to ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Everything that an admission rests on."""

    lock: Lock
    lock_digest: str
    verdict: Verdict | None
    requests: tuple[ProbeRequest, ...] | None
    """The kernels that this run calls; None: the model's configuration could not be read."""
    model_sha256: str
    """Of that configuration, in canonical form."""
    place: Place
    floor: Version | None = None
    """The oldest driver that the CUDA runtime works with; None: there is no CUDA, or it is not known."""
    overrides: Overrides = field(default_factory=Overrides)
    names: Mapping[str, str] = field(default_factory=dict)
    """Of `lock`, `model`, `python` and `verdict`, for the commands in fixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Allowed or not, with reasons."""

    findings: tuple[Finding, ...]
    overrides: tuple[str, ...] = ()
    level: Level = Level.GPU

    @property
    def status(self) -> Status:
        """The worst of all findings."""
        return worst(f.status for f in self.findings)

    @property
    def admitted(self) -> bool:
        """Only a pass or a warning admits; unknown never does."""
        return self.status in {Status.PASS, Status.WARN}

    @property
    def refusals(self) -> tuple[Finding, ...]:
        """What stands in the way."""
        return tuple(f for f in self.findings if f.status in {Status.FAIL, Status.UNKNOWN})

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it was admitted, or why not: one sentence each."""
        chosen = self.findings if self.admitted else self.refusals
        return tuple(f.reason for f in chosen)


def order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """What stands in the way first."""
    rank = {Status.FAIL: 0, Status.UNKNOWN: 1, Status.WARN: 2, Status.PASS: 3}
    return tuple(sorted(findings, key=lambda f: rank[f.status]))
