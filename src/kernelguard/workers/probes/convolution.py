"""causal-conv1d's function, fla's and kernelguard_train's: the same sum, told of sample boundaries in two ways."""

from __future__ import annotations

from typing import Any

from ..references.convolution import causal_conv1d, causal_conv1d_step
from . import Probe


def _make(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shape = case["shape"]
    inputs = {
        "x": draw.normal(draw.batch, draw.length, shape["channels"]),
        "weight": draw.normal(shape["channels"], shape["width"]) * 0.5,
    }
    if shape.get("bias"):
        inputs["bias"] = draw.normal(shape["channels"])
    return inputs, {"cu_seqlens": draw.cu_seqlens, "seq_idx": draw.seq_idx, "activation": shape["activation"]}


def _call_channels_first(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """As the models call causal-conv1d: [B, D, T], but with the channels contiguous, which `seq_idx` needs."""
    output = function(
        inputs["x"].transpose(1, 2),
        inputs["weight"],
        inputs.get("bias"),
        activation=fixed["activation"],
        seq_idx=fixed["seq_idx"],
    )
    return {"output": output.transpose(1, 2)}


def _call_fla(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    output = function(
        inputs["x"],
        inputs["weight"],
        inputs.get("bias"),
        activation=fixed["activation"],
        cu_seqlens=fixed["cu_seqlens"],
    )
    return {"output": output[0] if isinstance(output, tuple) else output}


def _reference(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    output = causal_conv1d(
        **inputs, activation=fixed["activation"], cu_seqlens=fixed["cu_seqlens"], precision=precision
    )
    return {"output": output}


def _call_packed(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """kernelguard_train's: which sample each token is of has to be said, and the result comes in three parts."""
    x = inputs["x"]
    numbers = fixed["seq_idx"]
    if numbers is None:
        numbers = x.new_zeros(x.shape[:2], dtype=fixed["numbers"])
    query, key, value = function(x, inputs["weight"], numbers, fixed["keys"])
    return {"query": query, "key": key, "value": value}


def _make_packed(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs, fixed = _make(case, draw)
    return inputs, {**fixed, "keys": case["shape"]["keys"], "numbers": draw.torch.int32}


def _reference_packed(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    output = _reference(inputs, fixed, precision)["output"]
    keys = fixed["keys"]
    query, key, value = output.split([keys, keys, output.shape[-1] - 2 * keys], dim=-1)
    return {"query": query, "key": key, "value": value}


def _make_step(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    shape = case["shape"]
    inputs = {
        "x": draw.normal(draw.batch, shape["channels"]),
        # As wide as the kernel, which is one more than it needs: models keep it so.
        "state": draw.normal(draw.batch, shape["channels"], shape["width"]),
        "weight": draw.normal(shape["channels"], shape["width"]) * 0.5,
    }
    if shape.get("bias"):
        inputs["bias"] = draw.normal(shape["channels"])
    return inputs, {"activation": shape["activation"]}


def _call_step(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """The state is updated in place, so what is left in it is a result."""
    state = inputs["state"]
    output = function(inputs["x"], state, inputs["weight"], inputs.get("bias"), fixed["activation"])
    return {"output": output, "state": state}


def _reference_step(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    del precision  # no matrix product
    output, state = causal_conv1d_step(**inputs, activation=fixed["activation"])
    return {"output": output, "state": state}


PROBES = {
    "causal_conv1d_update": Probe(_make_step, _call_step, _reference_step),
    "packed_convolution": Probe(_make_packed, _call_packed, _reference_packed),
    "causal_conv1d": Probe(_make, _call_channels_first, _reference),
    "fla_convolution": Probe(_make, _call_fla, _reference),
}
