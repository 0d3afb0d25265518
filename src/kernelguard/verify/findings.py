"""What does a verdict mean? One finding for each kernel and one for packed isolation; unknown is never a pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from kernelguard.judge.values import Finding, Level, Status
from kernelguard.verify.values import UNTOLD, Outcome, ProbeResult, SignalCheck, Verdict

_UPGRADE = re.compile(r"[Uu]pgrade (?P<name>[A-Za-z][\w-]*) to (?P<bound>[><=~!]+ ?[\d.]+\d)")
_UNTOLD_FIX = {
    Outcome.HUNG: "give it more time: kernelguard verify --timeout 1800 (Triton compiles for minutes the first time)",
    Outcome.OUT_OF_MEMORY: "free the GPU's memory, or give the process more, and verify again",
    Outcome.NO_DRIVER: "verify on the machine that will train",
    Outcome.UNREACHABLE: "verify where the hub can be reached, or put the kernel into the cache: the run needs it too",
}

_FILL = "mend what it says, or give it more --timeout, and verify again: what is in the folder is used"


def findings(verdict: Verdict, fixes: Mapping[str, str] | None = None) -> tuple[Finding, ...]:
    """Everything the verdict says, for the assessment.

    `fixes` holds, by symbol, the fix that a known rule names; it is preferred to what the exception itself advises.
    """
    known = fixes or {}
    found = [f for probe in verdict.probes for f in _of_probe(probe, verdict.level, known.get(probe.symbol, ""))]
    found += _of_isolation(verdict)
    found += _of_trace(verdict)
    found += [Finding(code="verify-problem", status=Status.UNKNOWN, reason=problem) for problem in verdict.problems]
    found += [
        Finding(code="cache-incomplete", status=Status.WARN, reason=text, fix=_FILL) for text in verdict.cache_problems
    ]
    return tuple(found)


def numbers(probe: ProbeResult, level: Level) -> Status:
    """What is known about the numbers of this kernel on the GPU. Below the gpu level that is never a pass."""
    if _only_not_interpretable(probe, level):
        return Status.UNKNOWN
    if probe.outcome in {Outcome.WRONG, Outcome.RAISED, Outcome.CRASHED}:
        return Status.FAIL
    if level is not Level.GPU or probe.outcome in UNTOLD or probe.outcome is Outcome.LOADED:
        return Status.UNKNOWN
    return Status.UNKNOWN if probe.unmeasured_configurations else Status.PASS


def _only_not_interpretable(probe: ProbeResult, level: Level) -> bool:
    """It was imported, and ended in an exception or a crash where there is no GPU for it.

    Compiled kernels need one, and Triton's interpreter does not know all of the language: that is no fault of theirs.
    """
    return level is Level.INTERPRETED and bool(probe.target) and probe.outcome in {Outcome.RAISED, Outcome.CRASHED}


def _of_probe(probe: ProbeResult, level: Level, fix: str) -> Iterator[Finding]:
    def finding(code: str, status: Status, reason: str, fix: str = "") -> Finding:
        return Finding(
            code=code, status=status, fast_path=probe.symbol, reason=reason, fix=fix, evidence=_evidence(probe)
        )

    if probe.outcome in UNTOLD:
        yield finding(
            f"could-not-verify-{probe.outcome}",
            Status.UNKNOWN,
            f"{probe.symbol} could not be verified: {probe.reason}",
            _UNTOLD_FIX.get(probe.outcome, ""),
        )
    elif _only_not_interpretable(probe, level):
        reason = f"{probe.symbol} could not be run without a GPU: {probe.reason}"
        yield finding("could-not-interpret", Status.UNKNOWN, reason, "verify it on a GPU")
    elif probe.outcome is Outcome.WRONG:
        guilty = probe.wrong_configurations and not any(c.outcome is Outcome.WRONG for c in probe.cases)
        code = "wrong-configuration" if guilty else "wrong-result"
        yield finding(code, Status.FAIL, f"{probe.symbol} computes the wrong thing here: {probe.reason}", fix)
    elif probe.outcome is Outcome.CRASHED:
        yield finding("kernel-crashes", Status.FAIL, f"{probe.symbol} crashes here: {probe.reason}", fix)
    elif probe.outcome is Outcome.RAISED:
        advice = fix or _advice(probe.error)
        yield finding("kernel-raises", Status.FAIL, f"{probe.symbol} cannot be used here: {probe.reason}", advice)
    elif probe.outcome is Outcome.LOADED:
        reason = f"{probe.symbol} can be imported; it was not executed"
        yield finding("loads", Status.PASS if level <= Level.IMPORT else Status.UNKNOWN, reason)
    elif level is not Level.GPU:
        # The claim of this level is that Triton's interpreter ran it; what a GPU computes is another one.
        status = Status.PASS if level is Level.INTERPRETED else Status.UNKNOWN
        reason = f"{probe.symbol} ran without a GPU; what it computes on one was not measured"
        yield finding("interpreted", status, reason)
    else:
        yield from _of_right(probe, finding)


def _of_right(probe: ProbeResult, make: Callable[..., Finding]) -> Iterator[Finding]:
    left = probe.unmeasured_configurations
    total = len(probe.configurations)
    if left:
        names = ", ".join(sorted({c.kernel for c in left}))
        yield make(
            "configurations-not-measured",
            Status.UNKNOWN,
            f"{probe.symbol} is right with what the autotuner picked today; {len(left)} of {total} configurations "
            f"that it may pick another day were not measured ({names})",
            "give it more time: kernelguard verify --timeout 1800",
        )
        return
    every = f", with each of {total} configurations that the autotuner may pick" if total else ""
    what = "output" if probe.outcome is Outcome.NO_BACKWARD else "output and every gradient"
    design = "; it has no backward, by design" if probe.outcome is Outcome.NO_BACKWARD else ""
    yield make("verified", Status.PASS, f"{probe.symbol}: {what} right on this GPU{every}{design}")
    if probe.deterministic is False:
        worst = max((value for case in probe.cases for value in case.differing.values()), default=0.0)
        yield make(
            "not-deterministic",
            Status.WARN,
            f"{probe.symbol} gives other bits from run to run (by {worst:.1g} at most), within its tolerance",
        )


def _of_isolation(verdict: Verdict) -> Iterator[Finding]:
    for check in verdict.isolation:
        if check.left_out:
            continue
        sent = ", ".join(check.signals) or "no boundary signal"
        if check.isolated is None:
            reason = f"whether packed samples stay apart could not be told: {check.detail}"
            yield Finding(code="isolation-not-verified", status=Status.UNKNOWN, reason=reason)
        elif not check.isolated:
            yield Finding(
                code="packed-samples-leak",
                status=Status.FAIL,
                reason=f"with {sent}, packed samples leak into each other: {_leak(check)}",
                fix=_signal_fix(verdict, check),
            )
        elif verdict.level is not Level.GPU:
            reason = f"with {sent}, packed samples stay apart without a GPU; on one it was not measured"
            yield Finding(code="isolation-not-verified", status=Status.UNKNOWN, reason=reason)
        else:
            yield Finding(
                code="isolated",
                status=Status.PASS,
                reason=f"with {sent}, packed samples stay apart: {_apart(check)}",
            )


def _of_trace(verdict: Verdict) -> Iterator[Finding]:
    """What one real training step says about each fast path; whether its numbers are right is another matter."""
    for path in verdict.trace.fast_paths if verdict.trace else ():
        instead = f"; the slow path ran: {', '.join(path.fallbacks)}" if path.fallbacks else ""
        launches = sum(run.count for run in path.kernels)
        if path.package == "torch":
            # Which of torch's kernels attention takes depends on its mask; only the slow one is a finding.
            if path.fallbacks:
                reason = f"{path.symbol} took torch's slow path in a training step: {', '.join(path.fallbacks)}"
                yield Finding(code="fallback-ran", status=Status.WARN, fast_path=path.symbol, reason=reason)
        elif not path.known and not path.fallbacks:
            reason = f"whether {path.symbol} ran in a training step cannot be told: its kernels have no known names"
            yield Finding(code="kernel-names-unknown", status=Status.UNKNOWN, fast_path=path.symbol, reason=reason)
        elif not path.forward:
            reason = f"no kernel of {path.symbol} ran in a training step{instead}"
            yield Finding(code="kernel-did-not-run", status=Status.FAIL, fast_path=path.symbol, reason=reason)
        elif path.fallbacks:
            reason = (
                f"kernels of {path.symbol} ran in a training step ({launches} launches), and not only they{instead}"
            )
            yield Finding(code="fallback-ran", status=Status.WARN, fast_path=path.symbol, reason=reason)
        else:
            both = "forward and backward" if path.backward else "forward"
            reason = f"{path.symbol}: its kernels ran in a training step ({both}, {launches} launches)"
            yield Finding(code="kernel-ran", status=Status.PASS, fast_path=path.symbol, reason=reason)


def _apart(check: SignalCheck) -> str:
    if not check.leak_logit:
        return "no gradient and no bit of a logit crosses a boundary"
    return (
        f"no gradient crosses a boundary, and logits move by no more than rounding when another sample changes "
        f"({check.leak_logit:.2g}, allowed {check.allowed_logit:.2g})"
    )


def _leak(check: SignalCheck) -> str:
    parts = []
    if check.leak_gradient:
        parts.append(f"a gradient of {check.leak_gradient:.2g} crosses a boundary")
    if (check.leak_logit or 0.0) > check.allowed_logit:
        parts.append(f"logits move by {check.leak_logit:.2g} when another sample changes")
    if check.worst_error is not None and check.allowed is not None and check.worst_error > check.allowed:
        parts.append(
            f"the gradient of {check.worst_parameter} is off by {check.worst_error:.2g} from one sample at a time"
        )
    if check.leaking_layers:
        parts.append(f"in {', '.join(check.leaking_layers)}")
    return "; ".join(parts)


def _signal_fix(verdict: Verdict, check: SignalCheck) -> str:
    clean = next((c for c in verdict.isolation if c.isolated and set(c.signals) > set(check.signals)), None)
    if clean is None:
        return ""
    missing = ", ".join(s for s in clean.signals if s not in check.signals)
    return f"have the collator send {missing} as well"


def _advice(error: str) -> str:
    found = _UPGRADE.search(error)
    return f"pip install '{found['name'].lower()}{found['bound'].replace(' ', '')}'" if found else ""


def _evidence(probe: ProbeResult) -> tuple[str, ...]:
    lines = []
    if probe.error:
        lines.append(f"{probe.error_type}: {probe.error}")
    if probe.file:
        lines.append(probe.file)
    for case in probe.cases:
        measured = [t for t in case.tensors if t.error is not None]
        if measured:
            worst = max(measured, key=lambda t: (t.error or 0.0) / (t.allowed or 1.0))
            lines.append(
                f"{case.name}: worst is {worst.label}, {worst.error:.2g} beside {worst.plain:.2g} of plain torch "
                f"({worst.allowed:.2g} allowed)"
            )
    return tuple(lines)
