"""The walk of `kernelguard verify`: a check at level import, then the kernels themselves. Wires the rooms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kernelguard.check import Request, run_check
from kernelguard.judge.values import Finding, Level, Status, worst
from kernelguard.report.document import Check
from kernelguard.verify.findings import findings
from kernelguard.verify.run import verify
from kernelguard.verify.values import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found out about the model's kernels by running them."""

    check: Check
    """At level import: a kernel that the model is not bound to need not be measured, and is a no already."""
    verdict: Verdict
    findings: tuple[Finding, ...]
    """Those of the verdict."""

    @property
    def status(self) -> Status:
        """The worst of everything that was found."""
        return worst([self.check.status, *(f.status for f in self.findings)])


def run_verify(
    request: Request,
    environ: Mapping[str, str],
    *,
    level: Level,
    length: int,
    warm_cache: Path | None,
    say: Callable[[str], None],
) -> Proof:
    """Measure the kernels that the model is bound to, within `request.timeout` seconds.

    Raises:
        InputError: an argument or a file is unusable.
        UndeterminedError: nothing can be executed in that interpreter.
    """
    deadline = time.monotonic() + request.timeout
    say("reading what the model is bound to")
    check = run_check(replace(request, level="import"), environ)
    verdict = verify(
        check.declaration,
        check.intent,
        check.environment,
        bindings=check.bindings,
        level=level,
        timeout=max(deadline - time.monotonic(), 1.0),
        length=length,
        warm_cache=warm_cache,
        progress=say,
    )
    fixes = {f.fast_path: f.fix for f in check.assessment.findings if f.fast_path and f.fix}
    return Proof(check=check, verdict=verdict, findings=findings(verdict, fixes))
