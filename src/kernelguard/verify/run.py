"""Verify a model's kernels in one interpreter: plan, one worker for each kernel, packed isolation, verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from kernelguard.declare.values import Declaration, Intent
from kernelguard.errors import UndeterminedError
from kernelguard.judge.values import Level
from kernelguard.observe.values import Bindings, BoundTo, Environment
from kernelguard.verify.cache import cache_variables, is_filled, make_folder, note_filled
from kernelguard.verify.fingerprint import binary_digests, fingerprint, record_digests
from kernelguard.verify.first_step import FirstStep, compile_first_step
from kernelguard.verify.isolation import LENGTHS, run_isolation, signal_sets
from kernelguard.verify.merge import earlier_of
from kernelguard.verify.plan import TRAINING_LENGTH, language_parts, plan, training_lengths
from kernelguard.verify.probing import run_probe
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.step import record_step, summarize
from kernelguard.verify.subject import subject_of, used_paths
from kernelguard.verify.values import UNTOLD, Fingerprint, Outcome, ProbeResult, SignalCheck, StepTrace, Verdict

_SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")
_SHORT = (11, 1, 7)
"""Without a GPU there are no chunks to have edges, and every token takes its time."""
_KEEP_S = 60.0
"""Seconds that isolation and the recorded step get at least, each, as long as the whole time allows it."""
_MOST_SHARDS = 12
"""Each is a process with a CUDA context and a reference of its own, so more would fill a smaller GPU."""


def verify(
    declaration: Declaration,
    intent: Intent,
    environment: Environment,
    *,
    bindings: Bindings | None = None,
    level: Level = Level.GPU,
    timeout: float = 600.0,
    length: int = TRAINING_LENGTH,
    warm_cache: Path | None = None,
    shards: int | None = None,
    lock: str = "",
    trace: Path | None = None,
    earlier: Verdict | None = None,
    first_step: FirstStep | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Measure every kernel that the run calls, in the observed interpreter, within about `timeout` seconds.

    With `bindings`, kernels that the model is not bound to are left out: what they compute does not matter to this
    run. `length` is the training length in tokens. `warm_cache` is a folder that afterwards holds what Triton compiled
    and tuned for exactly these shapes (see `cache_variables`), and with `first_step` also what the bundled trainer's
    first step compiles; only at level gpu. `shards` is how many processes force configurations at
    once; by default all of this machine's cores but two, and twelve at most. `lock` is the digest of the lock that is
    verified. `trace` is where the profiler trace of one training step of the cut-down model goes; only at level gpu.
    `earlier` is a verdict of the same fingerprint whose time was up: configurations that it measured are not measured
    again.

    Raises:
        InputError: `warm_cache` cannot be made.
        UndeterminedError: the environment is not an interpreter on this machine.
    """
    if not environment.live or environment.executable is None:
        raise UndeterminedError(
            f"{environment.origin} is not an interpreter on this machine, so nothing can be executed in it",
            hint="kernelguard verify MODEL --python /path/to/venv/bin/python on the machine that will train",
        )
    began = time.monotonic()
    capabilities = [gpu.capability for gpu in environment.gpus if gpu.capability is not None]
    planned = plan(declaration, intent, length=length, capabilities=capabilities)
    requests = tuple(r for r in planned if _called(r, bindings))
    if level <= Level.IMPORT:
        requests = tuple(_import_only(r) for r in requests)
    prints = fingerprint(
        environment,
        requests,
        model_type=declaration.config.model_type,
        binaries=binary_digests(environment),
        records=record_digests(environment),
    )
    run = _Run(
        python=environment.executable,
        declaration=declaration,
        intent=intent,
        level=level,
        length=length,
        environ=worker_environment(os.environ, level=level, warm_cache=warm_cache),
        end=began + timeout,
        shards=shards if shards is not None else min(max((os.cpu_count() or 2) - 2, 1), _MOST_SHARDS),
        isolates=intent.packed and level > Level.IMPORT,
        records=trace is not None and level is Level.GPU,
        compiled=None if warm_cache is None else is_filled(warm_cache, prints),
        earlier=earlier,
        prints=prints,
        progress=progress,
    )
    run.phases["prepare"] = round(time.monotonic() - began, 2)
    probes, isolation = run.everything(requests)
    verdict = Verdict(
        level=level,
        fingerprint=prints,
        probes=probes,
        isolation=isolation,
        signals=intent.signals if intent.packed else None,
        subject=subject_of(declaration, intent, length=length, lock=lock),
        fast_paths=used_paths(declaration, intent, bindings),
    )
    if trace is not None and level is Level.GPU:
        versions = {name: found.version for name, found in (environment.distributions or {}).items()}
        try:
            verdict = replace(verdict, trace=run.traced(trace, verdict, versions))
        except UndeterminedError as error:
            # What was measured before is worth having.
            verdict = replace(verdict, problems=(*verdict.problems, error.message))
    return replace(
        verdict,
        cache_problems=() if warm_cache is None else run.warmed(warm_cache, probes, first_step),
        seconds=time.monotonic() - began,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        phases=dict(run.phases),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Everything that all workers of one verdict share."""

    python: str
    declaration: Declaration
    intent: Intent
    level: Level
    length: int
    environ: Mapping[str, str]
    end: float
    isolates: bool
    """Whether packed samples are looked at after the probes."""
    records: bool
    """Whether a training step is recorded at the end."""
    shards: int
    compiled: bool | None
    """The cache holds everything already; None: not known."""
    earlier: Verdict | None
    prints: Fingerprint
    progress: Callable[[str], None]
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Note how long a part of the run took."""
        began = time.monotonic()
        yield
        self.phases[phase] = round(time.monotonic() - began, 2)

    @property
    def device(self) -> str:
        return "cuda" if self.level is Level.GPU else "cpu"

    def left(self) -> float:
        """Seconds."""
        return max(self.end - time.monotonic(), 1.0)

    def room(self, later: int, parts: int = 1) -> float:
        """Seconds for one of `parts` that share what `later` phases leave over: a minute if there is one."""
        left = self.left()
        return max((left - _KEEP_S * later) / parts, min(left, _KEEP_S))

    def everything(self, requests: Sequence[ProbeRequest]) -> tuple[tuple[ProbeResult, ...], tuple[SignalCheck, ...]]:
        """Every probe in the order of the requests, and isolation.

        What is compiled already runs side by side. Otherwise autotuned kernels have the GPU to themselves, because
        what is tuned beside others is tuned wrongly, and `--warm-cache` keeps it.
        """
        several = self.level is Level.GPU
        found: dict[int, ProbeResult] = {}
        tuned = [n for n, r in enumerate(requests) if any(c.force for c in r.cases)]
        first = [n for n in range(len(requests)) if self.compiled or n not in tuned]
        isolation: tuple[SignalCheck, ...] = ()
        with ThreadPoolExecutor(max(min(self.shards, 6), 1) if several else 1) as pool:
            room = self.room(self.isolates + self.records)
            jobs = {n: pool.submit(self.probe, requests[n], n, len(requests), room) for n in first}
            beside = pool.submit(self.isolate) if self.isolates and self.compiled and several else None
            found = {n: job.result() for n, job in jobs.items()}
            if beside is not None:
                isolation = beside.result()
        for n, result in found.items():
            if result.outcome is Outcome.OUT_OF_MEMORY and len(first) > 1:
                # It may only have been the others' memory.
                found[n] = self.probe(requests[n], n, len(requests), self.room(self.isolates + self.records))
        later = [n for n in tuned if n not in found]
        for position, n in enumerate(later):
            # What is left is shared by what is still to come, so that one slow kernel does not take it all.
            share = self.room(self.isolates + self.records, len(later) - position)
            found[n] = self.probe(requests[n], n, len(requests), share)
        if self.isolates and (not isolation or any(c.isolated is None for c in isolation)):
            isolation = self.isolate()
        results = (found[n] for n in range(len(requests)))
        kept = tuple(r for request, r in zip(requests, results, strict=True) if not _absent(request, r))
        return kept, isolation

    def probe(self, request: ProbeRequest, number: int, total: int, timeout: float) -> ProbeResult:
        """One kernel."""
        with self.timed(request.symbol):
            return run_probe(
                self.python,
                request,
                timeout=timeout,
                device=self.device,
                environ=self.environ,
                shards=self.shards,
                compiled=self.compiled,
                earlier=earlier_of(self.earlier, request, self.prints),
                progress=lambda text: self.progress(f"{number + 1}/{total} {text}"),
            )

    def isolate(self) -> tuple[SignalCheck, ...]:
        """Packed samples, in the cut-down model."""
        self.progress("packed samples")
        with self.timed("isolation"):
            return run_isolation(
                self.python,
                language_parts(self.declaration),
                _sets(self.intent),
                dtype=self.intent.dtype if self.device == "cuda" else "float32",
                device=self.device,
                lengths=LENGTHS if self.device == "cuda" else _SHORT,
                attn_implementation=self.intent.attn_implementation,
                experts_implementation=self.intent.experts_implementation,
                grouped_heads=self.intent.grouped_heads,
                timeout=self.room(self.records),
                environ=self.environ,
            )

    def traced(self, output: Path, verdict: Verdict, versions: Mapping[str, str]) -> StepTrace:
        """One training step at the training length, as the run packs it."""
        self.progress("one training step under the profiler")
        signals = (self.intent.signals or _SIGNALS) if self.intent.packed else ()
        with self.timed("trace"):
            facts, record = record_step(
                self.python,
                language_parts(self.declaration),
                signals,
                output,
                dtype=self.intent.dtype,
                lengths=training_lengths(self.length, packed=self.intent.packed),
                attn_implementation=self.intent.attn_implementation,
                experts_implementation=self.intent.experts_implementation,
                grouped_heads=self.intent.grouped_heads,
                timeout=self.left(),
                environ=self.environ,
            )
        return summarize(facts, record, verdict.fast_paths, verdict.probes, versions)

    def warmed(self, folder: Path, probes: Sequence[ProbeResult], first_step: FirstStep | None) -> tuple[str, ...]:
        """Complete the cache folder with the trainer's first step, leave the note in it, and tell what is missing."""
        problems = []
        made = ""
        if first_step is not None and self.level is Level.GPU:
            self.progress("the trainer's first step")
            with self.timed("first step"):
                made, problem = self.stepped(folder, first_step)
            if problem:
                problems.append(f"what the trainer's first step compiles is not in {folder}: {problem}")
        if not any(probe.outcome in UNTOLD or probe.unmeasured_configurations for probe in probes):
            try:
                note_filled(folder, self.prints, first_step=made)
            except OSError as error:
                problems.append(
                    f"the cache in {folder} is filled, but no note of it could be left there: {error.strerror}"
                )
        return tuple(problems)

    def stepped(self, folder: Path, first_step: FirstStep) -> tuple[str, str]:
        """The digest of the run whose first step the folder then holds, or why it does not."""
        try:
            digest = first_step.digest(self.length)
        except OSError as error:
            return "", f"{first_step.config} cannot be read: {error.strerror}"
        if not self.prints.gpu:
            return "", "there is no GPU here, and its kernels are compiled for one"
        if is_filled(folder, self.prints, first_step=digest):
            return digest, ""
        problem = compile_first_step(
            self.python,
            first_step,
            packed=self.intent.packed,
            length=self.length,
            timeout=self.left(),
            environ=self.environ,
        )
        return "" if problem else digest, problem


def worker_environment(environ: Mapping[str, str], *, level: Level, warm_cache: Path | None) -> dict[str, str]:
    """The environment variables of the workers: this process's own, and what the level and the cache need.

    Raises:
        InputError: the cache folder cannot be made.
    """
    found = dict(environ)
    if level is Level.INTERPRETED:
        found["TRITON_INTERPRET"] = "1"
    if warm_cache is not None:
        make_folder(warm_cache)
        found |= cache_variables(warm_cache)
    return found


def _sets(intent: Intent) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The run's signals with each left out in turn; and all there are, so that a fix can be named."""
    sent = intent.signals if intent.signals is not None else _SIGNALS
    sets = signal_sets(sent)
    known = tuple(dict.fromkeys((*sent, *_SIGNALS)))
    return sets if set(known) == set(sent) else (*sets, (known, "nothing"))


def _called(request: ProbeRequest, bindings: Bindings | None) -> bool:
    """Whether the model really calls it. A kernel whose binding is not known is probed."""
    if bindings is None or request.model:
        # What the hub puts in place of a function has nothing to do with what that was bound to.
        return True
    mine = [b.bound_to for b in bindings.bindings if b.symbol == request.symbol]
    return not mine or any(bound in {BoundTo.KERNEL, BoundTo.UNKNOWN, BoundTo.OTHER} for bound in mine)


def _absent(request: ProbeRequest, result: ProbeResult) -> bool:
    """Whether a kernel of the trainer's own is not here, because the trainer is not: nothing calls it then."""
    return (
        bool(request.stands_for)
        and result.error_type == "ModuleNotFoundError"
        and f"'{request.package}'" in result.error
    )


def _import_only(request: ProbeRequest) -> ProbeRequest:
    return ProbeRequest(
        symbol=request.symbol,
        package=request.package,
        module=request.module,
        op=request.op,
        dtype=request.dtype,
        trains=request.trains,
        layers=request.layers,
        stands_for=request.stands_for,
        model=request.model,
    )
