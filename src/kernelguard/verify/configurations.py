"""Which configurations of the autotuned kernels were measured, and what did each of them compute?

Pure: the records of all workers of one kernel in, one `Configuration` for each that can be picked out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kernelguard.observe.process import Record, WorkerResult
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Configuration, TensorError

_ROW = re.compile(r"^(?P<case>.*): configuration (?P<row>\d+)")
_TENSOR_FIELDS = frozenset(TensorError.__dataclass_fields__)


def crashed_row(result: WorkerResult) -> int | None:
    """The row of configurations during which this worker died by itself."""
    found = _ROW.match(result.died_at)
    return int(found["row"]) if found and not result.finished and not result.timed_out else None


def tensor(record: Record) -> TensorError:
    """One tensor's numbers out of a worker's record."""
    return TensorError(**{name: value for name, value in record.items() if name in _TENSOR_FIELDS})


GRAVITY = {"wrong": 4, "error": 3, "right": 2, "refused": 1, "not-measured": 0}
"""Of two things that are known about one configuration, the graver one stands."""


def configurations_of(request: ProbeRequest, results: Sequence[WorkerResult]) -> Iterable[Configuration]:
    """Every configuration that can be picked for a kernel that was launched, once, with the worst that is known."""
    known: dict[tuple[str, str], Configuration] = {}
    for case in request.cases:
        records = [r for result in results for r in result.records if r.get("case") == case.name]
        died = [d for d in results if crashed_row(d) is not None and d.died_at.startswith(f"{case.name}: ")]
        for one in _of_case(case.name, records, died):
            place = (f"{one.kernel}[{one.key}]", one.config)
            before = known.get(place)
            if before is None or GRAVITY[one.state] > GRAVITY[before.state]:
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
