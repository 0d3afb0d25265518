"""The gated delta rule, KDA, and their one-token forms."""

from __future__ import annotations

from typing import Any

from ..references.delta_rule import gated_delta_rule
from . import Probe


def _make(case: Any, draw: Any, *, per_channel: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    shape, length = case["shape"], draw.length
    heads, values = shape["k_heads"], shape["v_heads"]
    gates = (values, shape["k_dim"]) if per_channel else (values,)
    # Half of the heads forget slowly, as trained ones do: only there does an error travel from sample to sample and
    # from chunk to chunk. exp(-5) softplus(a) is the model's own gate with A_log = -5.
    speed = draw.empty(1, 1, *gates, dtype="float32").fill_(1.0)
    speed[:, :, ::2] = 0.0067
    soft = draw.torch.nn.functional.softplus
    inputs = {
        "q": draw.normal(draw.batch, length, heads, shape["k_dim"]),
        "k": draw.normal(draw.batch, length, heads, shape["k_dim"]),
        "v": draw.normal(draw.batch, length, values, shape["v_dim"]),
        "g": -speed * soft(draw.normal(draw.batch, length, *gates, dtype="float32")),
        "beta": draw.normal(draw.batch, length, values).sigmoid(),
    }
    fixed = {"cu_seqlens": draw.cu_seqlens}
    if case.get("state"):
        samples = draw.batch if draw.cu_seqlens is None else len(draw.cu_seqlens) - 1
        fixed["initial_state"] = draw.normal(samples, values, shape["k_dim"], shape["v_dim"], dtype="float32")
    return inputs, fixed


def _call(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    extra = {name: value for name, value in fixed.items() if value is not None}
    output, state = function(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        g=inputs["g"],
        beta=inputs["beta"],
        use_qk_l2norm_in_kernel=True,
        output_final_state="initial_state" in extra,
        **extra,
    )
    return {"output": output} if "initial_state" not in extra else {"output": output, "state": state}


def _reference(inputs: Any, fixed: Any, precision: Any, *, chunk: int) -> dict[str, Any]:
    state = fixed.get("initial_state")
    output, last = gated_delta_rule(
        **inputs,
        cu_seqlens=fixed["cu_seqlens"],
        initial_state=None if state is None else state.to(inputs["q"].dtype),
        l2norm=True,
        chunk=chunk,
        precision=precision,
    )
    return {"output": output} if state is None else {"output": output, "state": last}


def _probe(*, per_channel: bool, chunk: int) -> Probe:
    return Probe(
        lambda case, draw: _make(case, draw, per_channel=per_channel),
        _call,
        lambda inputs, fixed, precision: _reference(inputs, fixed, precision, chunk=chunk),
    )


PROBES = {
    "gated_delta_rule": _probe(per_channel=False, chunk=64),
    "recurrent_gated_delta_rule": _probe(per_channel=False, chunk=0),
    # Smaller chunks: the per-channel form keeps one decay matrix for each token of a chunk in memory.
    "kda": _probe(per_channel=True, chunk=16),
    "recurrent_kda": _probe(per_channel=True, chunk=0),
}
