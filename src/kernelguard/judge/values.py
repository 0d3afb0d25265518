"""What `judge` hands on: findings, and the assessment they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class Status(StrEnum):
    """The four answers. Unknown is never treated as pass."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"


class Level(IntEnum):
    """The claim that is asked for; each includes the ones before it."""

    RESOLVE = 0
    """A set of packages that fits this target exists; nothing is executed."""
    IMPORT = 1
    """The packages load, and the model is bound to them."""
    INTERPRETED = 2
    """Triton's CPU interpreter ran the kernels."""
    GPU = 3
    """The right output and gradients were computed on this GPU."""


_SEVERITY = {Status.PASS: 0, Status.WARN: 1, Status.UNKNOWN: 2, Status.FAIL: 3}


def worst(statuses: Iterable[Status]) -> Status:
    """The status that decides: a definite no, then unknown, then warn, then pass. An empty input is a pass."""
    return max(statuses, key=_SEVERITY.__getitem__, default=Status.PASS)


def exit_code(status: Status, *, strict: bool = False) -> int:
    """The process exit code for an overall status (DESIGN: 0 holds, 1 a definite no, 3 cannot be determined)."""
    if status is Status.FAIL or (strict and status is Status.WARN):
        return 1
    return 3 if status is Status.UNKNOWN else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found out, and what to do about it."""

    code: str
    """Stable identifier, `not-installed`; listed in docs/findings.md."""
    status: Status
    reason: str
    """One or two sentences that name both sides."""
    fast_path: str | None = None
    """The symbol it is about; None: the whole run."""
    fix: str = ""
    """A command that can be pasted, or the one change to make."""
    evidence: tuple[str, ...] = ()
    """Where this is known from: original exception, file and line, issue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPathAnswer:
    """The answer for one fast path that the run needs."""

    symbol: str
    package: str
    distribution: str
    model_type: str
    layers: int | None
    status: Status
    bound_to: str | None
    """Dotted name of the function that really runs; None: not observed."""
    reason: str
    fix: str
    codes: tuple[str, ...]
    """Codes of the findings behind the answer."""
    declared_at: str
    """`models/qwen3_5/modeling_qwen3_5.py:286`."""
    notice: str
    """What the run itself would have said about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotUsed:
    """A declared fast path that this run does not need, and why."""

    symbol: str
    model_type: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The whole answer."""

    level: Level
    """The claim that was asked for."""
    reached: Level
    """What was really executed."""
    fast_paths: tuple[FastPathAnswer, ...]
    not_used: tuple[NotUsed, ...]
    findings: tuple[Finding, ...]
    """All of them, those of the fast paths included."""

    @property
    def status(self) -> Status:
        """The worst of all findings; with nothing found, a pass."""
        return worst(f.status for f in self.findings)
