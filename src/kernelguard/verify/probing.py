"""Run the workers of one kernel: as it is, and with each configuration that its autotuner could pick.

Compiling the configurations is what takes the time, so they are forced in several processes side by side, unless they
turn out to be compiled already: then one process does everything in seconds.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from kernelguard.observe.process import WorkerResult, run_worker
from kernelguard.verify.configurations import configurations_of, crashed_row
from kernelguard.verify.merge import merged
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.results import interpret
from kernelguard.verify.values import Outcome, ProbeResult

PATIENCE_S = 8.0
"""A sweep in one process that is not at its end after so many seconds is compiling; several processes go on with it."""
_MAX_CRASHES = 4
"""After so many crashed rows the rest of a shard is left unmeasured, and said to be."""


def run_probe(
    python: str,
    request: ProbeRequest,
    *,
    timeout: float,
    device: str = "cuda",
    environ: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    shards: int = 1,
    compiled: bool | None = None,
    earlier: ProbeResult | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> ProbeResult:
    """Probe one kernel in the interpreter `python`, in at most about `timeout` seconds.

    `shards` is how many processes force configurations side by side; `compiled` says whether the cache holds them
    already (None: not known, so one process tries). `earlier` is what was measured of this kernel before, under the
    same fingerprint: configurations that are known from it are not forced again. `memory_bytes` limits each process's
    address space (CPU only: CUDA cannot come up under such a limit).

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
            reason="kernelguard has no probe for it, or the configuration does not tell its shapes",
            dtype=request.dtype,
            trains=request.trains,
        )
    prober = _Prober(
        python=python,
        request=request,
        end=began + timeout,
        device=device,
        environ=environ,
        memory_bytes=memory_bytes,
        shards=shards,
        seed=seed,
        progress=progress,
        earlier=earlier,
    )
    forced = [case for case in request.cases if case.force]
    whole = False
    if forced and compiled is not False:
        progress(f"{request.symbol}: each configuration")
        whole = prober.alone(patience=PATIENCE_S if compiled is None else 4 * PATIENCE_S)
    if not whole:
        prober.sweep([case for case in forced if case.name not in prober.swept], keep=timeout / 3)
        progress(f"{request.symbol}: {', '.join(case.name for case in request.cases)}")
        asked = {"case": {"force": False}, "record_kernels": True}
        prober.results.append(prober.worker(asked, request.cases, prober.left()))
    return merged(earlier, interpret(request, prober.results, seconds=time.monotonic() - began))


@dataclass(slots=True, kw_only=True)
class _Prober:
    """The workers of one kernel, and what they said so far."""

    python: str
    request: ProbeRequest
    end: float
    device: str
    environ: Mapping[str, str] | None
    memory_bytes: int | None
    shards: int
    seed: int
    progress: Callable[[str], None]
    earlier: ProbeResult | None
    results: list[WorkerResult] = field(default_factory=list)

    def left(self) -> float:
        """Seconds."""
        return max(self.end - time.monotonic(), 1.0)

    @property
    def swept(self) -> set[str]:
        """The cases of which every configuration was run."""
        return {r["case"] for result in self.results for r in result.of_kind("configurations") if r.get("whole")}

    def worker(self, extra: Mapping[str, Any], cases: Iterable[Case], limit: float) -> WorkerResult:
        """One process; `extra` is added to its request, and `extra["case"]` to each of its cases."""
        asked = replace(self.request, cases=tuple(cases)).to_json(
            device=self.device, seed=self.seed, budget_s=limit * 0.85
        )
        for case in asked["cases"]:
            case.update(extra.get("case", {}))
        asked.update({k: v for k, v in extra.items() if k != "case"})
        return run_worker(
            self.python, "probe", asked, timeout=limit, memory_bytes=self.memory_bytes, environ=self.environ
        )

    def alone(self, *, patience: float) -> bool:
        """Everything in one process; False: it gave up, or died, and the rest has to be measured otherwise."""
        extra = {"patience_s": patience if self.shards > 1 else 1e9, "record_kernels": True, "judged": self._judged()}
        result = self.worker(extra, self.request.cases, self.left())
        self.results.append(result)
        if result.timed_out or self.left() <= 1.0:
            return True
        return crashed_row(result) is None and not any(result.of_kind("cold"))

    def sweep(self, cases: Sequence[Case], *, keep: float) -> None:
        """Force every configuration of these cases in shards; `keep` seconds are left for the kernel as it is."""
        for number, case in enumerate(cases):
            self.progress(f"{self.request.symbol}: each configuration, {case.name}")
            # What a later case brings anew is little, and each process needs its own reference for it.
            limit = max((self.left() - keep) * (0.75 if number + 1 < len(cases) else 1.0), 1.0)
            count = self.shards if number == 0 else max(self.shards // 2, 1)
            judged = self._judged()
            with ThreadPoolExecutor(count) as pool:
                jobs = [pool.submit(self._shard, case, index, count, limit, judged) for index in range(count)]
                self.results += itertools.chain.from_iterable(job.result() for job in jobs)

    def _judged(self) -> dict[str, dict[str, str]]:
        """By kernel and key: what is known about each configuration."""
        known: dict[str, dict[str, str]] = {}
        before = self.earlier.configurations if self.earlier is not None else ()
        for one in (*before, *configurations_of(self.request, self.results)):
            if one.kernel and one.state != "not-measured":
                known.setdefault(f"{one.kernel}[{one.key}]", {})[one.config] = one.state
        return known

    def _shard(self, case: Case, index: int, count: int, limit: float, judged: Mapping[str, Any]) -> list[WorkerResult]:
        """Every row of one shard; a row that kills its process is left out of the next try."""
        results: list[WorkerResult] = []
        skip: list[int] = []
        end = time.monotonic() + limit
        while len(skip) <= _MAX_CRASHES and time.monotonic() < end:
            extra = {
                "case": {"only_forced": True},
                "shard": [index, count],
                "skip_rows": skip,
                "judged": judged,
            }
            result = self.worker(extra, [case], max(end - time.monotonic(), 1.0))
            results.append(result)
            row = crashed_row(result)
            if row is None:
                break
            skip.append(row)
        return results
