"""One real training step of the cut-down model under the profiler, for `verify --trace`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kernelguard.declare.values import SubModel
from kernelguard.errors import UndeterminedError
from kernelguard.observe.process import run_worker
from kernelguard.trace import TraceFacts, read_trace
from kernelguard.verify.isolation import LENGTHS


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
    timeout: float = 300.0,
    environ: Mapping[str, str] | None = None,
) -> TraceFacts:
    """Record a packed step that sends these signals, leave the trace in `output` (`.json` or `.json.gz`), and read it.

    Two steps go before it, so that compiling and tuning are not in the trace.

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
        "output": str(output.absolute()),
    }
    result = run_worker(python, "trace", request, timeout=timeout, environ=environ)
    if not result.finished or not any(result.of_kind("trace")):
        error = next(result.of_kind("error"), None)
        why = f"{error['type']}: {error['text']}" if error else f"the process {result.ending()}"
        raise UndeterminedError(
            f"no training step of this model could be recorded in {python}: {why}",
            hint="verify it without --trace first",
        )
    return read_trace(output)
