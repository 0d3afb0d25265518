"""What became of one kernel? Pure: the records of its workers in, a `ProbeResult` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kernelguard.observe.process import Record, WorkerResult
from kernelguard.trace.names import own_kernels
from kernelguard.verify.configurations import configurations_of, tensor
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import CaseResult, Configuration, Outcome, ProbeResult

_ASIDE = frozenset({"autotuner", "profiler", "backends"})
"""Errors about looking closer, not about the kernel."""


def interpret(request: ProbeRequest, results: Sequence[WorkerResult], *, seconds: float = 0.0) -> ProbeResult:
    """What the records of all workers of one kernel add up to. The last result is the kernel as it is."""
    main = results[-1]
    cases = tuple(_case(case, main) for case in request.cases)
    outcome, reason = _overall(request, cases, main)
    configurations = tuple(configurations_of(request, results))
    guilty = [c for c in configurations if c.state in {"wrong", "error"}]
    if outcome in {Outcome.RIGHT, Outcome.NO_BACKWARD} and guilty:
        # What the autotuner picked today was right; what it may pick tomorrow is not.
        outcome = Outcome.WRONG if any(c.state == "wrong" for c in guilty) else Outcome.CRASHED
        reason = _blame(guilty[0])
    error = next((r for r in main.of_kind("error") if r.get("where") not in _ASIDE), None)
    target = next(iter(main.of_kind("target")), {})
    kernels: Record = next(main.of_kind("kernels"), {})
    forward, backward = own_kernels(kernels.get("forward", {})), own_kernels(kernels.get("backward", {}))
    return ProbeResult(
        symbol=request.symbol,
        package=request.package,
        op=request.op,
        outcome=outcome,
        reason=reason,
        error_type=str(error.get("type", "")) if error else "",
        error=str(error.get("text", "")) if error else "",
        target=str(target.get("target", "")),
        file=str(target.get("file", "")),
        dtype=request.dtype,
        trains=request.trains,
        cases=cases,
        configurations=configurations,
        seconds=seconds,
        backends=next((r["found"] for r in main.of_kind("backends")), {}),
        forward_kernels=forward,
        # Some of the forward is computed again in the backward; only what is its own shows that it ran.
        backward_kernels=tuple(name for name in backward if name not in forward),
        quick=request.quick(),
    )


def _blame(configuration: Configuration) -> str:
    what = "; ".join(t.describe() for t in configuration.wrong) or configuration.detail
    picked = "which the autotuner picked" if configuration.picked else "which the autotuner may pick"
    return f"{configuration.kernel} with {configuration.config}, {picked}: {what}"


def _case(case: Case, result: WorkerResult) -> CaseResult:
    mine = [r for r in result.records if r.get("case") == case.name]
    measured = next((r for r in mine if r["kind"] == "case"), None)
    repeated = next((r for r in mine if r["kind"] == "repeat"), None)
    errors = [r for r in mine if r["kind"] == "error" and _of_the_case(r)]
    tensors = tuple(tensor(t) for t in measured["tensors"]) if measured else ()
    unstable = tuple(tensor(t) for t in repeated["tensors"]) if repeated else ()
    base = CaseResult(
        name=case.name,
        lengths=case.lengths,
        shape=case.shape,
        outcome=Outcome.RIGHT,
        tensors=tensors,
        runs=int(repeated["runs"]) if repeated else int(measured is not None),
        differing=repeated["differing"] if repeated else {},
        unstable=unstable,
        seconds=float(measured["seconds"]) if measured else 0.0,
        warm_seconds=float(repeated.get("warm", 0.0)) if repeated else 0.0,
    )
    wrong = [t for t in (*tensors, *unstable) if t.state != "right"]
    if wrong:
        return replace(base, outcome=Outcome.WRONG, detail="; ".join(dict.fromkeys(t.describe() for t in wrong)))
    if errors and not (measured and errors[-1].get("sort") == "not-implemented"):
        outcome, detail = _of_error(errors[-1])
        return replace(base, outcome=outcome, detail=detail)
    if measured and errors:
        detail = f"{errors[-1]['type']} in backward: {errors[-1]['text'][:200]}"
        return replace(base, outcome=Outcome.NO_BACKWARD, detail=detail)
    if measured and (repeated or result.finished):
        return base
    left_out = next((r for r in mine if r["kind"] == "left-out"), None)
    if left_out:
        return replace(base, outcome=Outcome.HUNG, detail=str(left_out["reason"]))
    outcome, detail = _of_ending(result)
    return replace(base, outcome=outcome, detail=detail)


def _of_the_case(error: Record) -> bool:
    """Not one of a pinned configuration, which is told there; that there is no backward holds for all of them."""
    return not error.get("label") or error.get("sort") == "not-implemented"


def _of_error(record: Record) -> tuple[Outcome, str]:
    """Which outcome an exception is, and the sentence for it."""
    # The first line says it; torch appends pages. The whole text is kept in `error`.
    text = (
        f"{record['type']} in {record['where']}: {str(record['text']).splitlines()[0][:400] if record['text'] else ''}"
    )
    sort, where = record.get("sort"), record.get("where")
    if sort == "memory":
        return Outcome.OUT_OF_MEMORY, text
    if sort == "driver":
        return Outcome.NO_DRIVER, text
    if sort == "network":
        return Outcome.UNREACHABLE, text
    if where in {"reference", "import torch"}:
        return Outcome.REFERENCE, text
    if where == "cuda":
        return Outcome.NO_DRIVER, text
    return Outcome.RAISED, text


def _of_ending(result: WorkerResult) -> tuple[Outcome, str]:
    """Why a case has no measurement, from how its process ended."""
    text = f"the process {result.ending()}" if not result.finished else "the worker said nothing about this case"
    ours = result.died_at.endswith(": reference") or not result.died_at or result.died_at in {"import torch", "cuda"}
    if result.timed_out:
        return Outcome.HUNG, text
    if result.signal == "SIGKILL":
        return Outcome.OUT_OF_MEMORY, f"{text}: most likely the system ran out of memory"
    if result.signal and not ours:
        return Outcome.CRASHED, text
    if result.signal:
        return Outcome.REFERENCE, text
    return Outcome.UNREADABLE, text


def _only_decodes(cases: Sequence[CaseResult]) -> bool:
    """Every output is right, and not one gradient is there."""
    tensors = [t for case in cases for t in (*case.tensors, *case.unstable)]
    gradients = [t for t in tensors if t.role == "gradient"]
    outputs = [t for t in tensors if t.role != "gradient"]
    return bool(outputs) and all(t.state == "right" for t in outputs) and all(t.state == "missing" for t in gradients)


_ORDER = (
    Outcome.WRONG,
    Outcome.CRASHED,
    Outcome.RAISED,
    Outcome.NO_DRIVER,
    Outcome.UNREACHABLE,
    Outcome.OUT_OF_MEMORY,
    Outcome.HUNG,
    Outcome.REFERENCE,
    Outcome.UNREADABLE,
    Outcome.NO_BACKWARD,
)


def _overall(request: ProbeRequest, cases: Sequence[CaseResult], result: WorkerResult) -> tuple[Outcome, str]:
    early = next((r for r in result.of_kind("error") if "case" not in r and r.get("where") not in _ASIDE), None)
    if early is not None:
        return _of_error(early)
    for outcome in _ORDER:
        found = next((c for c in cases if c.outcome is outcome), None)
        if found is None:
            continue
        if outcome is Outcome.WRONG and not request.trains and _only_decodes(cases):
            return Outcome.NO_BACKWARD, "it gives no gradient at all, and raises nothing when one is asked for"
        if outcome is Outcome.NO_BACKWARD and request.trains:
            return Outcome.RAISED, f"it has no backward, and this run trains: {found.detail}"
        return outcome, f"{found.name}: {found.detail}"
    if not cases:
        if result.finished and any(result.of_kind("target")):
            return Outcome.LOADED, ""
        return _of_ending(result)
    if not request.backward:
        return Outcome.NO_BACKWARD, "it updates its state in place, outside of autograd"
    return Outcome.RIGHT, ""
