"""Does a build exist that serves this kernel on the machine that was described? From a resolution to a finding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from kernelguard.declare.values import FastPath
from kernelguard.judge.rules import Rule
from kernelguard.judge.values import Finding, Status
from kernelguard.resolve.values import Candidate, Choice, Known, Need, Rejected, RejectionCode, Resolution

_OPEN = frozenset(
    {
        RejectionCode.RULE_OPEN,
        RejectionCode.SOURCE_BUILD,
        RejectionCode.UNSTATED,
        RejectionCode.SHIM,
        RejectionCode.UNVERIFIABLE,
        RejectionCode.PRE_RELEASE,
        RejectionCode.LOOK_ALIKE,
    }
)
"""Refused for a reason that somebody may lift: that is no proof that nothing can serve."""
_LOOKED_AT = frozenset({Known.SEEN, Known.OBSERVED})


def judge_fit(path: FastPath, resolution: Resolution | str, lock: str) -> Finding:
    """What the search says about one fast path.

    `resolution` may be the reason why there was no search. `lock` is the command that asks the package index.
    """
    if isinstance(resolution, str):
        return _unknown(path, f"no build was looked for: {resolution}", "")
    need = next((n for n in resolution.needs if path.symbol in n.symbols and n.package == path.package), None)
    if need is None:
        return _unknown(
            path, f"this run needs {path.symbol} from {path.distribution}, of whose builds nothing is known", ""
        )
    chosen = next((c for c in resolution.choices if c.need == need), None)
    if chosen is not None and resolution.torch is not None:
        return _chosen(path, chosen, resolution, lock)
    if need not in resolution.missing and resolution.torch is not None:
        return _no(path, f"{path.distribution} needs a GPU, and the target has none", "")
    return _missing(path, need, resolution, lock)


def judge_cautions(resolution: Resolution, rules: Iterable[Rule]) -> Iterator[Finding]:
    """What the rules certainly say about the set that was found, without speaking against it."""
    by_id = {rule.id: rule for rule in rules}
    for caution in resolution.cautions:
        rule = by_id.get(caution.rule)
        if rule is not None and caution.certain:
            yield Finding(
                code=rule.id,
                status=Status.WARN,
                reason=f"Of the builds that were found: {caution.reason}",
                fix=rule.fix,
                evidence=rule.evidence,
            )


def judge_locked(path: FastPath, locked: Mapping[str, str], lock: str) -> Finding:
    """What a lock says about one fast path; `locked` has what serves each symbol, empty where nothing does."""
    served = locked.get(path.symbol)
    if served:
        return Finding(code="locked", status=Status.PASS, fast_path=path.symbol, reason=f"{served} is pinned for it")
    told = "names nothing that serves it" if served is not None else "was not made for a run that needs it"
    return Finding(
        code="not-locked",
        status=Status.FAIL,
        fast_path=path.symbol,
        reason=f"the lock {told}: the model runs {path.fallback}",
        fix=lock,
    )


def judge_locked_model(locked: str, given: str, lock: str) -> Iterator[Finding]:
    """Whether a lock was made for this very configuration; both are sha256 of the canonical config.json."""
    if locked != given:
        yield Finding(
            code="lock-other-model",
            status=Status.FAIL,
            reason=f"the lock was made for another configuration (sha256 {locked[:12]}, this one has {given[:12]}): "
            "head counts and layers may differ, and with them what was verified",
            fix=lock,
        )


def _chosen(path: FastPath, chosen: Choice, resolution: Resolution, lock: str) -> Finding:
    torch = resolution.torch.label if resolution.torch is not None else ""
    candidates = [accepted.candidate for accepted in chosen.accepted]
    triton = f" and triton {resolution.triton}" if resolution.triton is not None else ""
    what = f"{candidates[0].label} fits torch {torch.removeprefix('torch ')}{triton}"
    unseen = [c for c in candidates if c.known not in _LOOKED_AT]
    evidence = tuple(dict.fromkeys([*(_source(c) for c in candidates), *chosen.accepted[0].notes]))
    if unseen:
        return Finding(
            code="build-unknown",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"{what}, but that it exists is only {unseen[0].known}: nobody has looked",
            fix=lock,
            evidence=evidence,
        )
    return Finding(code="fits", status=Status.PASS, fast_path=path.symbol, reason=what, fix=lock, evidence=evidence)


def _missing(path: FastPath, need: Need, resolution: Resolution, lock: str) -> Finding:
    build = resolution.torch
    fix = "; ".join(resolution.fixes) or lock
    if build is None:
        refused = [d for d in resolution.trace if isinstance(d, Rejected) and d.distribution == "torch"]
        # Builds for other machines are always among them; what this machine lacks tells more.
        refused.sort(key=lambda d: d.code in {RejectionCode.PLATFORM, RejectionCode.PYTHON, RejectionCode.FIXED})
        return _no(path, "no torch fits this target" + (f": {refused[0].reason}" if refused else ""), fix)
    names = {name for provider in need.providers for name in (provider.distribution, *provider.companions)}
    against = [
        d
        for d in resolution.trace
        if isinstance(d, Rejected) and d.distribution in names and d.torch in {"", build.label}
    ]
    words = f"no build of {path.distribution} serves torch {build.label.removeprefix('torch ')}"
    if not against:
        return _unknown(path, f"{words}, as far as is known", lock)
    told = next((d for d in against if d.code is RejectionCode.RULE), against[0])
    if any(d.code in _OPEN for d in against):
        lifted = next(d for d in against if d.code in _OPEN)
        return _unknown(path, f"{words} as it is; {lifted.candidate}: {lifted.reason}", fix)
    return _no(path, f"{words}; {told.candidate}: {told.reason}", fix)


def _source(candidate: Candidate) -> str:
    return f"{candidate.label}: {candidate.known}, {candidate.evidence}"


def _no(path: FastPath, reason: str, fix: str) -> Finding:
    return Finding(
        code="no-build",
        status=Status.FAIL,
        fast_path=path.symbol,
        reason=f"{reason.rstrip('.')}. Without it the model runs {path.fallback}",
        fix=fix,
    )


def _unknown(path: FastPath, reason: str, fix: str) -> Finding:
    return Finding(code="build-unknown", status=Status.UNKNOWN, fast_path=path.symbol, reason=reason, fix=fix)
