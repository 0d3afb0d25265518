"""mamba-ssm: the fused Mamba-2 mixer, its scan alone, Mamba-1's mixer and selective scan, and one step of decoding."""

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


def _make_update(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Mamba-2 has heads of many channels that share A, D and the step; in Mamba-1 each channel has its own."""
    s = case["shape"]
    shared = "heads" in s
    heads, size, groups = (s["heads"], s["head_dim"], s["groups"]) if shared else (1, s["channels"], 1)
    count = heads if shared else size

    def spread(values: Any, *more: int) -> Any:
        """[H] -> [H, P], or [P] -> [1, P]."""
        return values[:, None].expand(heads, size, *more) if shared else values[None]

    per_step = draw.normal(draw.batch, count)
    inputs = {
        "state": draw.normal(draw.batch, heads, size, s["state"], dtype="float32"),
        "x": draw.normal(draw.batch, heads, size),
        "dt": per_step[:, :, None].expand(draw.batch, heads, size) if shared else per_step[:, None],
        "A": _decay(draw, count)[:, None, None].expand(heads, size, s["state"])
        if shared
        else _decay(draw, size, s["state"])[None],
        "B": draw.normal(draw.batch, groups, s["state"]),
        "C": draw.normal(draw.batch, groups, s["state"]),
        "D": spread(draw.normal(count, dtype="float32")),
        "dt_bias": spread(draw.normal(count, dtype="float32")),
    }
    return inputs, {"heads": shared}


def _call_update(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """The state is updated in place, so what is left in it is a result."""
    given = dict(inputs)
    if fixed["heads"]:
        # As the models pass them: one number for a whole head, with strides of 0, which picks another kernel.
        for name, keep in (
            ("dt", (slice(None), slice(None), slice(0, 1))),
            ("A", (slice(None), slice(0, 1), slice(0, 1))),
            ("D", (slice(None), slice(0, 1))),
            ("dt_bias", (slice(None), slice(0, 1))),
        ):
            given[name] = given[name][keep].expand(given[name].shape)
    else:
        given = {n: v[0] if n in {"A", "D", "dt_bias"} else v[:, 0] for n, v in given.items()}
    state = given.pop("state")
    output = function(state, **given, dt_softplus=True)
    return {"output": output.reshape(inputs["x"].shape), "state": state.reshape(inputs["state"].shape)}


def _reference_update(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    del fixed, precision  # no matrix product
    output, state = state_space.state_update(**inputs)
    return {"output": output, "state": state}


_NORMS = ("b_rms_weight", "c_rms_weight", "dt_rms_weight")


def _make_inner(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    channels, state, rank = s["channels"], s["state"], s["rank"]
    inputs = {
        "xz": draw.normal(draw.batch, 2 * channels, draw.length),
        "conv1d_weight": draw.normal(channels, 1, s["width"]) * 0.5,
        "conv1d_bias": draw.normal(channels) * 0.1,
        "x_proj_weight": draw.normal(rank + 2 * state, channels) * channels**-0.5,
        "delta_proj_weight": draw.normal(channels, rank) * rank**-0.5,
        "out_proj_weight": draw.normal(s["hidden"], channels) * channels**-0.5,
        "A": _decay(draw, channels, state),
        "D": draw.normal(channels, dtype="float32"),
        "delta_bias": draw.normal(channels, dtype="float32"),
    }
    if s.get("norms"):
        inputs |= {name: 1.0 + 0.1 * draw.normal(rank if "dt" in name else state) for name in _NORMS}
    return inputs, {}


def _call_inner(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    del fixed
    names = ("xz", "conv1d_weight", "conv1d_bias", "x_proj_weight", "delta_proj_weight", "out_proj_weight")
    norms = {name: inputs[name] for name in _NORMS if name in inputs}
    if norms:
        norms["b_c_dt_rms_eps"] = 1e-6
    # No bias of the output projection; B and C come from the input.
    output = function(
        *(inputs[name] for name in names),
        None,
        inputs["A"],
        None,
        None,
        inputs["D"],
        delta_bias=inputs["delta_bias"],
        delta_softplus=True,
        **norms,
    )
    return {"output": output}


def _reference_inner(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    del fixed
    given = dict(inputs)
    norms = [given.pop(name) for name in _NORMS if name in given]
    return {"output": state_space.mamba_inner(**given, norm_weights=norms or None, precision=precision)}


PROBES = {
    "state_update": Probe(_make_update, _call_update, _reference_update),
    "mamba_inner": Probe(_make_inner, _call_inner, _reference_inner),
    "chunk_scan": Probe(_make_chunk, _call_chunk, _reference_chunk),
    "split_conv1d_scan": Probe(_make_split, _call_split, _reference_split),
    "selective_scan": Probe(_make_selective, _call_selective, _reference_selective),
}
