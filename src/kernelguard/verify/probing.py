"""Run the worker of one kernel, and read what became of it.

`interpret` is pure: records in, result out. `run_probe` starts the processes: one for the kernel as it is, and, where
its configurations shall be forced, several at once, because compiling them is what takes the time.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from kernelguard.observe.process import Record, WorkerResult, run_worker
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import UNTOLD, CaseResult, Configuration, Outcome, ProbeResult, TensorError

_ROW = re.compile(r"^(?P<case>.*): configuration (?P<row>\d+)")
_MAX_CRASHES = 4
"""After so many crashed rows the rest of a shard is left unmeasured, and said to be."""
_Worker = Callable[[Mapping[str, Any], Iterable[Case], float], WorkerResult]
_TENSOR_FIELDS = frozenset(TensorError.__dataclass_fields__)


def run_probe(
    python: str,
    request: ProbeRequest,
    *,
    timeout: float,
    device: str = "cuda",
    environ: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    shards: int = 1,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> ProbeResult:
    """Probe one kernel in the interpreter `python`, in at most about `timeout` seconds.

    `shards` is how many processes force configurations side by side. `memory_bytes` limits each process's address
    space (CPU only: CUDA cannot come up under such a limit).

    Raises:
        OSError: `python` cannot be executed.
    """
    began = time.monotonic()
    if not request.op:
        return ProbeResult(
            symbol=request.symbol,
            package=request.package,
            op="",
            outcome=Outcome.NO_PROBE,
            reason=f"kernelguard has no probe for {request.package}'s {request.symbol}",
            dtype=request.dtype,
            trains=request.trains,
        )

    def left() -> float:
        return max(timeout - (time.monotonic() - began), 1.0)

    def worker(extra: Mapping[str, Any], cases: Iterable[Case], limit: float) -> WorkerResult:
        asked = replace(request, cases=tuple(cases)).to_json(device=device, seed=seed, budget_s=limit * 0.85)
        for case in asked["cases"]:
            case.update(extra.get("case", {}))
        asked.update({k: v for k, v in extra.items() if k != "case"})
        return run_worker(python, "probe", asked, timeout=limit, memory_bytes=memory_bytes, environ=environ)

    forced = [case for case in request.cases if case.force]
    results: list[WorkerResult] = []
    if forced:
        progress(f"{request.symbol}: each configuration")
        with ThreadPoolExecutor(shards) as pool:
            for number, case in enumerate(forced):
                # The kernel as it is matters most: a third of the time is kept for it.
                limit = max((left() - timeout / 3) / (len(forced) - number), 1.0)
                jobs = [pool.submit(_shard, worker, case, index, shards, limit) for index in range(shards)]
                results += itertools.chain.from_iterable(job.result() for job in jobs)
    progress(f"{request.symbol}: {', '.join(case.name for case in request.cases)}")
    results.append(worker({"case": {"force": False}}, request.cases, left()))
    return interpret(request, results, seconds=time.monotonic() - began)


def _shard(worker: _Worker, case: Case, index: int, count: int, limit: float) -> list[WorkerResult]:
    """Every row of one shard; a row that kills its process is left out of the next try."""
    results: list[WorkerResult] = []
    skip: list[int] = []
    end = time.monotonic() + limit
    while len(skip) <= _MAX_CRASHES and time.monotonic() < end:
        extra = {"case": {"only_forced": True}, "shard": [index, count], "skip_rows": skip}
        result = worker(extra, [case], max(end - time.monotonic(), 1.0))
        results.append(result)
        row = crashed_row(result)
        if row is None:
            break
        skip.append(row)
    return results


def crashed_row(result: WorkerResult) -> int | None:
    """The row of configurations during which this worker died by itself."""
    found = _ROW.match(result.died_at)
    return int(found["row"]) if found and not result.finished and not result.timed_out else None


def interpret(request: ProbeRequest, results: Sequence[WorkerResult], *, seconds: float = 0.0) -> ProbeResult:
    """What the records of all workers of one kernel add up to. The last result is the kernel as it is."""
    main = results[-1]
    cases = tuple(_case(case, main) for case in request.cases)
    outcome, reason = _overall(request, cases, main)
    configurations = tuple(_configurations(request, results))
    guilty = [c for c in configurations if c.state in {"wrong", "error"}]
    if outcome in {Outcome.RIGHT, Outcome.NO_BACKWARD} and guilty:
        # What the autotuner picked today was right; what it may pick tomorrow is not.
        outcome = Outcome.WRONG if any(c.state == "wrong" for c in guilty) else Outcome.CRASHED
        reason = _blame(guilty[0])
    error = next((r for r in main.of_kind("error") if r.get("where") != "autotuner"), None)
    target = next(iter(main.of_kind("target")), {})
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
    )


def _blame(configuration: Configuration) -> str:
    what = "; ".join(t.describe() for t in configuration.wrong) or configuration.detail
    picked = "which the autotuner picked" if configuration.picked else "which the autotuner may pick"
    return f"{configuration.kernel} with {configuration.config}, {picked}: {what}"


def tensor(record: Record) -> TensorError:
    """One tensor's numbers out of a worker's record."""
    return TensorError(**{name: value for name, value in record.items() if name in _TENSOR_FIELDS})


def _case(case: Case, result: WorkerResult) -> CaseResult:
    mine = [r for r in result.records if r.get("case") == case.name]
    measured = next((r for r in mine if r["kind"] == "case"), None)
    repeated = next((r for r in mine if r["kind"] == "repeat"), None)
    errors = [r for r in mine if r["kind"] == "error"]
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


_ORDER = (
    Outcome.WRONG,
    Outcome.CRASHED,
    Outcome.RAISED,
    Outcome.NO_DRIVER,
    Outcome.OUT_OF_MEMORY,
    Outcome.HUNG,
    Outcome.REFERENCE,
    Outcome.UNREADABLE,
    Outcome.NO_BACKWARD,
)


def _overall(request: ProbeRequest, cases: Sequence[CaseResult], result: WorkerResult) -> tuple[Outcome, str]:
    early = next((r for r in result.of_kind("error") if "case" not in r and r.get("where") != "autotuner"), None)
    if early is not None:
        return _of_error(early)
    for outcome in _ORDER:
        found = next((c for c in cases if c.outcome is outcome), None)
        if found is None:
            continue
        if outcome is Outcome.NO_BACKWARD and request.trains:
            return Outcome.RAISED, f"it has no backward, and this run trains: {found.detail}"
        return outcome, f"{found.name}: {found.detail}"
    if not cases:
        if result.finished and any(result.of_kind("target")):
            return Outcome.LOADED, ""
        return _of_ending(result)
    return Outcome.RIGHT, ""


_GRAVITY = {"wrong": 4, "error": 3, "right": 2, "refused": 1, "not-measured": 0}


def _configurations(request: ProbeRequest, results: Sequence[WorkerResult]) -> Iterable[Configuration]:
    """Every configuration that can be picked for a kernel that was launched, once, with the worst that is known."""
    known: dict[tuple[str, str], Configuration] = {}
    for case in request.cases:
        records = [r for result in results for r in result.records if r.get("case") == case.name]
        died = [d for d in results if crashed_row(d) is not None and d.died_at.startswith(f"{case.name}: ")]
        for one in _of_case(case.name, records, died):
            place = (f"{one.kernel}[{one.key}]", one.config)
            before = known.get(place)
            if before is None or _GRAVITY[one.state] > _GRAVITY[before.state]:
                known[place] = replace(one, picked=one.picked or (before is not None and before.picked))
            elif one.picked:
                known[place] = replace(before, picked=True)
    return known.values()


def _of_case(case: str, records: Sequence[Record], died: Sequence[WorkerResult]) -> Iterable[Configuration]:
    candidates: dict[str, list[str]] = {}
    picked: dict[str, str] = {}
    refused: set[tuple[str, int]] = set()
    for r in records:
        if r["kind"] in {"configurations", "picked"}:
            candidates.update(r["candidates"])
            picked.update(r["picked"])
            refused |= {(k, i) for k, numbers in r.get("refused", {}).items() for i in numbers}
    rows = [r for r in records if r["kind"] == "configuration"]
    together = [r for r in rows if not r.get("alone")]
    proven = {item: r for r in rows if r["state"] == "right" for item in r["used"].items()}
    for r in records:
        if r["kind"] == "case" and all(t["state"] == "right" for t in r["tensors"]):
            proven |= dict.fromkeys(picked.items(), r)
    alone = {
        (r["alone"], r["used"].get(r["alone"])): r for r in rows if r.get("alone") and r["state"] in {"wrong", "error"}
    }
    if died and not any(r["kind"] == "configurations" for r in records):
        yield Configuration(
            kernel="", key="", config="unknown", case=case, state="error", detail=f"the process {died[0].ending()}"
        )
    for kernel, configs in candidates.items():
        base, _, key = kernel.partition("[")
        for index, config in enumerate(configs):
            one = Configuration(
                kernel=base,
                key=key.rstrip("]"),
                config=config,
                case=case,
                state="not-measured",
                picked=picked.get(kernel) == config,
            )
            suspect = next(
                (r for r in together if r["state"] in {"wrong", "error"} and r["used"].get(kernel) == config), None
            )
            crash = next((d for d in died if (crashed_row(d) or 0) % len(configs) == index), None)
            if (kernel, config) in alone:
                yield _guilty(one, alone[kernel, config])
            elif (kernel, config) in proven:
                measured = tuple(tensor(t) for t in proven[kernel, config]["tensors"])
                yield replace(one, state="right", tensors=measured)
            elif (kernel, index) in refused:
                yield replace(one, state="refused")
            elif suspect is not None:
                yield _guilty(one, suspect)
            elif crash is not None:
                detail = f"the process {crash.ending()}, with the other kernels at configurations of the same number"
                yield replace(one, state="error", detail=detail)
            else:
                yield one


def _guilty(configuration: Configuration, row: Record) -> Configuration:
    tensors = tuple(tensor(t) for t in row["tensors"])
    detail = "" if row.get("alone") else "measured together with configurations of other kernels that are not proven"
    return replace(configuration, state=row["state"], tensors=tensors, detail=detail)


def could_not_tell(result: ProbeResult) -> bool:
    """Nothing can be said about the kernel itself."""
    return result.outcome in UNTOLD
