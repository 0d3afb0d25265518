"""One real training step of the cut-down model under the profiler, for `verify --trace`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kernelguard.declare.values import SubModel
from kernelguard.errors import UndeterminedError
from kernelguard.observe.process import Record, run_worker
from kernelguard.trace import TraceFacts, fast_paths, read_trace
from kernelguard.verify.isolation import LENGTHS
from kernelguard.verify.values import ProbeResult, StepTrace, UsedPath


def record_step(
    python: str,
    parts: Sequence[SubModel],
    signals: Sequence[str],
    output: Path,
    *,
    dtype: str = "bfloat16",
    device: str = "cuda",
    lengths: Sequence[int] = LENGTHS,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    grouped_heads: bool = False,
    timeout: float = 300.0,
    environ: Mapping[str, str] | None = None,
) -> tuple[TraceFacts, Record]:
    """Record a step that sends these signals, leave the trace in `output` (`.json` or `.json.gz`), and read it.

    Two steps go before it, so that compiling and tuning are not in the trace. The second value is the worker's record,
    with the seconds of each step.

    Raises:
        UndeterminedError: the step could not be run; the message has the worker's own words.
        OSError: `python` cannot be executed.
    """
    request = {
        "parts": [{"model_type": part.model_type, "raw": dict(part.raw)} for part in parts],
        "dtype": dtype,
        "device": device,
        "lengths": list(lengths),
        "signals": list(signals),
        "attn_implementation": attn_implementation,
        "experts_implementation": experts_implementation,
        "grouped_heads": grouped_heads,
        "output": str(output.absolute()),
    }
    result = run_worker(python, "trace", request, timeout=timeout, environ=environ)
    record = next(result.of_kind("trace"), None)
    if not result.finished or record is None:
        error = next(result.of_kind("error"), None)
        why = f"{error['type']}: {error['text']}" if error else f"the process {result.ending()}"
        raise UndeterminedError(
            f"no training step of this model could be recorded in {python}: {why}",
            hint="verify it without --trace first",
        )
    return read_trace(output), record


def summarize(
    facts: TraceFacts,
    record: Record,
    used: Iterable[UsedPath],
    probes: Iterable[ProbeResult],
    versions: Mapping[str, str],
) -> StepTrace:
    """What the step says about each fast path of the run, and about attention.

    A kernel is known by the names that `matrices/traces/` has for its version, and by those that its own probe was
    seen to launch here.
    """
    measured = tuple(probes)
    wanted = dict.fromkeys((path.package, path.symbol) for path in used if path.training)
    wanted |= dict.fromkeys((probe.package, probe.symbol) for probe in measured if probe.package == "torch")
    seen = {(p.package, p.symbol): (p.forward_kernels, p.backward_kernels) for p in measured}
    steps = [float(seconds) for seconds in record.get("steps", ())]
    return StepTrace(
        fast_paths=fast_paths(facts, tuple(wanted), versions, seen=seen),
        launches=facts.launches,
        gpu_microseconds=facts.gpu_microseconds,
        first_step_seconds=steps[0] if steps else None,
        step_seconds=steps[-1] if len(steps) > 1 else None,
        file=facts.source,
    )
