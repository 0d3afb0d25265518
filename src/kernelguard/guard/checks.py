"""Do the kernels compute the right thing on this rank's device, and do packed samples stay apart?"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kernelguard.guard.children import ChildResult, Stopwatch, run_worker
from kernelguard.guard.fingerprint import Report
from kernelguard.guard.ticket import Ticket

# What an exception in the probe itself says nothing about: the kernel may be right.
_SAYS_NOTHING = frozenset({"memory"})


# Most of a check is importing torch and what it probes, on one core; the GPU holds several of these processes.
_MOST_AT_ONCE = 4


@dataclass(frozen=True)
class _Check:
    """One worker to run, and who says what its result means."""

    name: str
    worker: str
    request: Mapping[str, Any]
    judge: Callable[[Mapping[str, Any], ChildResult], tuple[str, str]]


def run_checks(report: Report, ticket: Ticket, environ: Mapping[str, str], *, limit_s: float) -> None:
    """Run every probe of the ticket, and the isolation check when the run packs, within `limit_s` seconds.

    Several run side by side where this rank's share of the cores allows it.
    """
    checks = [_Check(f"probe of {p.get('symbol', '?')}", "probe", p, judge_probe) for p in ticket.probes]
    if ticket.isolation is not None:
        checks.append(_Check("packed samples", "isolation", ticket.isolation, judge_isolation))
    watch, at_once = Stopwatch(), checks_at_once(environ)

    def run(number: int) -> ChildResult:
        # One that hangs must not take the time of those behind it.
        limit = max(watch.left(limit_s) / -(-(len(checks) - number) // at_once), 1.0)
        request = {**checks[number].request, "device": ticket.device, "budget_s": limit * 0.85}
        return run_worker(checks[number].worker, request, timeout=limit, environ=environ)

    with ThreadPoolExecutor(at_once) as pool:
        results = list(pool.map(run, range(len(checks))))
    for number, check in enumerate(checks):
        result = results[number]
        if at_once > 1 and any(error.get("sort") == "memory" for error in result.of_kind("error")):
            # It may only have been the others' memory.
            result = run(number)
        _file(report, check.name, *check.judge(check.request, result))


def checks_at_once(environ: Mapping[str, str]) -> int:
    """How many processes of this rank may run side by side: one for each two of its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        ranks = max(int(environ.get("LOCAL_WORLD_SIZE") or 1), 1)
    except ValueError:
        ranks = 1
    return min(max(cores // ranks // 2, 1), _MOST_AT_ONCE)


def _file(report: Report, name: str, state: str, text: str) -> None:
    if state == "right":
        report.passed.append(name)
    elif state == "fault":
        report.faults[name] = text
    else:
        report.unknown.append(f"{name}: {text}")


def judge_probe(request: Mapping[str, Any], result: ChildResult) -> tuple[str, str]:
    """`right`, `fault` or `unknown`, and why; a result that cannot be read is never a fault."""
    try:
        return _judge_probe(request, result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return "unknown", f"its result makes no sense ({type(error).__name__}: {error})"


def _judge_probe(request: Mapping[str, Any], result: ChildResult) -> tuple[str, str]:
    if result.unreadable:
        return "unknown", result.ending()
    errors = [r for r in result.of_kind("error") if r["where"] != "autotuner"]
    cases = {r["case"]: r for r in result.of_kind("case")}
    for case in cases.values():
        wrong = [t for t in case["tensors"] if t["state"] != "right"]
        if wrong:
            first = wrong[0]
            numbers = ""
            if first.get("error") is not None:
                numbers = f": off by {first['error']:.2g}, allowed {first['allowed']:.2g}"
            what = f"gradient of {first['name']}" if first["role"] == "gradient" else str(first["name"])
            return "fault", f"{what} is {first['state']} in {case['case']}{numbers}"
    for error in errors:
        if error["where"] == "reference" or error.get("sort") in _SAYS_NOTHING:
            return "unknown", f"{error['where']}: {error['type']}: {error['text']}"
        return "fault", f"{error['where']}: {error['type']}: {error['text']}"
    if result.signal:
        return "fault", result.ending()
    if not result.finished:
        return "unknown", result.ending()
    asked = [str(case["name"]) for case in request.get("cases", ())]
    left_out = [name for name in asked if name not in cases]
    if left_out or not asked:
        return "unknown", f"it did not measure {', '.join(left_out) or 'anything'}"
    return "right", ""


def judge_isolation(request: Mapping[str, Any], result: ChildResult) -> tuple[str, str]:
    """Like `judge_probe`, for the packed samples; only the run's own signals, the first set, decide."""
    try:
        return _judge_isolation(request, result)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return "unknown", f"its result makes no sense ({type(error).__name__}: {error})"


def _judge_isolation(request: Mapping[str, Any], result: ChildResult) -> tuple[str, str]:
    if result.unreadable:
        return "unknown", result.ending()
    measured = next((r for r in result.of_kind("signals") if r["number"] == 0), None)
    if measured is None:
        error = next(result.of_kind("error"), None)
        if error is not None and error.get("sort") not in _SAYS_NOTHING:
            return "fault", f"{error['where']}: {error['type']}: {error['text']}"
        if result.signal:
            return "fault", result.ending()
        return "unknown", f"{error['type']}: {error['text']}" if error else result.ending() or "nothing was measured"
    signals = " and ".join(request["checks"][0]["signals"]) or "no signal"
    leaking = [str(layer["layer"]) for layer in measured["layers"] if layer["leak"] != 0.0]
    if measured["leak_gradient"] != 0.0 or leaking or measured["leak_logit"] > measured["allowed_logit"]:
        where = f" in {', '.join(leaking)}" if leaking else ""
        return "fault", f"with {signals}, a sample reaches other samples{where}"
    return "right", ""
