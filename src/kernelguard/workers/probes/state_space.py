"""mamba-ssm: the fused Mamba-2 mixer, its scan alone, and Mamba-1's selective scan."""

from __future__ import annotations

from typing import Any

from ..references import state_space
from . import Probe


def _decay(draw: Any, *shape: int) -> Any:
    """A = -exp(A_log) with A_log from -5 (forgets slowly) to 1."""
    heads = shape[0]
    steps = draw.torch.linspace(-5.0, 1.0, heads, device=draw.device).exp()
    return -(steps if len(shape) == 1 else steps[:, None].expand(*shape).contiguous())


def _make_chunk(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    inputs = {
        "x": draw.normal(draw.batch, draw.length, s["heads"], s["head_dim"]),
        "dt": draw.normal(draw.batch, draw.length, s["heads"]),
        "A": _decay(draw, s["heads"]),
        "B": draw.normal(draw.batch, draw.length, s["groups"], s["state"]) * 0.3,
        "C": draw.normal(draw.batch, draw.length, s["groups"], s["state"]) * 0.3,
        "D": draw.normal(s["heads"], dtype="float32"),
        "dt_bias": draw.normal(s["heads"], dtype="float32"),
    }
    return inputs, {"seq_idx": draw.seq_idx, "chunk": s["chunk"]}


def _call_chunk(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    named = {k: inputs[k] for k in ("D", "dt_bias")}
    five = [inputs[k] for k in ("x", "dt", "A", "B", "C")]
    return {"output": function(*five, fixed["chunk"], seq_idx=fixed["seq_idx"], dt_softplus=True, **named)}


def _reference_chunk(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    return {
        "output": state_space.chunk_scan(
            **inputs, seq_idx=fixed["seq_idx"], chunk=min(fixed["chunk"], 64), precision=precision
        )
    }


def _make_split(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    inner, conv = s["heads"] * s["head_dim"], s["heads"] * s["head_dim"] + 2 * s["groups"] * s["state"]
    inputs = {
        "zxbcdt": draw.normal(draw.batch, draw.length, inner + conv + s["heads"]) * 0.5,
        "conv1d_weight": draw.normal(conv, s["width"]) * 0.5,
        "conv1d_bias": draw.normal(conv) * 0.1,
        "dt_bias": draw.normal(s["heads"], dtype="float32"),
        "A": _decay(draw, s["heads"]),
        "D": draw.normal(s["heads"], dtype="float32"),
        "rmsnorm_weight": 1.0 + 0.1 * draw.normal(inner),
        "outproj_weight": draw.normal(s["hidden"], inner) * inner**-0.5,
    }
    names = ("head_dim", "groups", "chunk")
    return inputs, {"seq_idx": draw.seq_idx, **{name: s[name] for name in names}}


def _call_split(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    six = [inputs[k] for k in ("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D")]
    output = function(
        *six,
        fixed["chunk"],
        seq_idx=fixed["seq_idx"],
        activation="silu",
        rmsnorm_weight=inputs["rmsnorm_weight"],
        rmsnorm_eps=1e-6,
        outproj_weight=inputs["outproj_weight"],
        headdim=fixed["head_dim"],
        ngroups=fixed["groups"],
        norm_before_gate=False,
    )
    return {"output": output}


def _reference_split(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    output = state_space.split_conv1d_scan(
        **inputs,
        headdim=fixed["head_dim"],
        ngroups=fixed["groups"],
        seq_idx=fixed["seq_idx"],
        chunk=min(fixed["chunk"], 64),
        precision=precision,
    )
    return {"output": output}


def _make_selective(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    inputs = {
        "u": draw.normal(draw.batch, s["channels"], draw.length),
        "delta": draw.normal(draw.batch, s["channels"], draw.length),
        "A": _decay(draw, s["channels"], s["state"]),
        "B": draw.normal(draw.batch, s["state"], draw.length) * 0.3,
        "C": draw.normal(draw.batch, s["state"], draw.length) * 0.3,
        "D": draw.normal(s["channels"], dtype="float32"),
        "z": draw.normal(draw.batch, s["channels"], draw.length),
        "delta_bias": draw.normal(s["channels"], dtype="float32"),
    }
    return inputs, {}


def _call_selective(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    del fixed
    return {"output": function(*inputs.values(), delta_softplus=True)}


def _reference_selective(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    del fixed
    return {"output": state_space.selective_scan(**inputs, precision=precision)}


PROBES = {
    "chunk_scan": Probe(_make_chunk, _call_chunk, _reference_chunk),
    "split_conv1d_scan": Probe(_make_split, _call_split, _reference_split),
    "selective_scan": Probe(_make_selective, _call_selective, _reference_selective),
}
