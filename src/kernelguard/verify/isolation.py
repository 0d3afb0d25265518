"""Do packed samples stay apart in this model, with the run's boundary signals and with each of them left out?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelguard.declare.values import SubModel
from kernelguard.observe.process import Record, WorkerResult, run_worker
from kernelguard.verify.values import SignalCheck

FACTOR = 8.0
"""How many times the effect of one rounding of the embeddings a parameter's gradient may differ by.

Packed and unpacked runs round at every step, in another order; that is a small multiple of rounding once at the start.
"""
LENGTHS = (65, 64, 1, 200)
"""Around the edges of a chunk, and one sample of a single token."""


_ONE_SIGNAL = frozenset({"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
"""Attention takes these four together, so a run that sends one of them sends all, and leaves all out."""


def signal_sets(signals: Sequence[str]) -> tuple[tuple[tuple[str, ...], str], ...]:
    """The run's signals, and the same with each left out in turn: (signals, what was left out)."""
    whole = tuple(s for s in signals if s in _ONE_SIGNAL)
    groups = dict.fromkeys(whole if s in _ONE_SIGNAL else (s,) for s in signals)
    left = [(tuple(s for s in signals if s not in group), ", ".join(group)) for group in groups]
    return ((tuple(signals), ""), *left)


def run_isolation(
    python: str,
    parts: Sequence[SubModel],
    sets: Sequence[tuple[tuple[str, ...], str]],
    *,
    dtype: str = "bfloat16",
    device: str = "cuda",
    lengths: Sequence[int] = LENGTHS,
    attn_implementation: str | None = None,
    experts_implementation: str | None = None,
    grouped_heads: bool = False,
    timeout: float = 300.0,
    environ: Mapping[str, str] | None = None,
) -> tuple[SignalCheck, ...]:
    """One check for each set of signals, in a model of one layer of each kind.

    The parameters' gradients are compared for the first set and for those with one signal left out.

    Raises:
        OSError: `python` cannot be executed.
    """
    request: dict[str, Any] = {
        "parts": [{"model_type": part.model_type, "raw": dict(part.raw)} for part in parts],
        "checks": [{"signals": list(s), "parameters": i == 0 or bool(out)} for i, (s, out) in enumerate(sets)],
        "dtype": dtype,
        "device": device,
        "lengths": list(lengths),
        "attn_implementation": attn_implementation,
        "experts_implementation": experts_implementation,
        "grouped_heads": grouped_heads,
    }
    result = run_worker(python, "isolation", request, timeout=timeout, environ=environ)
    return interpret(sets, result)


def interpret(sets: Sequence[tuple[tuple[str, ...], str]], result: WorkerResult) -> tuple[SignalCheck, ...]:
    """What the worker's records say about each set; one that has none could not be told."""
    aside = {"autotuner"}
    early = next((r for r in result.of_kind("error") if "number" not in r and r.get("where") not in aside), None)
    return tuple(_check(number, signals, out, result, early) for number, (signals, out) in enumerate(sets))


def _check(
    number: int, signals: tuple[str, ...], left_out: str, result: WorkerResult, early: Record | None
) -> SignalCheck:
    mine = [r for r in result.records if r.get("number") == number]
    measured = next((r for r in mine if r["kind"] == "signals"), None)
    error = next((r for r in mine if r["kind"] == "error"), early)
    if measured is None:
        why = f"{error['type']}: {error['text']}" if error else result.ending() or "the worker said nothing about it"
        return SignalCheck(signals=signals, left_out=left_out, detail=why)
    leaking = tuple(f"{x['layer']} ({x['kind']})" for x in measured["layers"] if x["leak"] != 0.0)
    worst, error_of, allowed = _worst(measured.get("parameters", {}))
    moved, tremor = float(measured["leak_logit"]), float(measured["tremor"])
    allowed_logit = float(measured["allowed_logit"])
    isolated = measured["leak_gradient"] == 0.0 and moved <= allowed_logit and not leaking
    if error_of is not None and allowed is not None:
        isolated = isolated and error_of <= allowed
    return SignalCheck(
        signals=signals,
        left_out=left_out,
        leak_gradient=float(measured["leak_gradient"]),
        leaking_layers=leaking,
        tremor=tremor,
        leak_logit=moved,
        allowed_logit=allowed_logit,
        loss_packed=measured.get("loss_packed"),
        loss_unpacked=measured.get("loss_unpacked"),
        worst_parameter=worst,
        worst_error=error_of,
        allowed=allowed,
        isolated=isolated,
        detail=f"{error['type']} in the comparison of parameters: {error['text']}" if error else "",
    )


def _worst(parameters: Mapping[str, Sequence[float]]) -> tuple[str, float | None, float | None]:
    """The parameter whose gradient is furthest beyond what rounding does to it."""
    if not parameters:
        return "", None, None
    # A parameter whose gradient one rounding happens to leave alone still gets what most others have.
    usual = sorted(noise for _, noise in parameters.values())[len(parameters) // 2]
    name = max(parameters, key=lambda n: parameters[n][0] / max(parameters[n][1], usual, 1e-30))
    error, noise = parameters[name]
    return name, error, FACTOR * max(noise, usual)
