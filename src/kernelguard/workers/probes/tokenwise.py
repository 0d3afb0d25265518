"""Norms, SwiGLU, losses and expert products: fla's and liger's functions, and torch's grouped product."""

from __future__ import annotations

from typing import Any

from ..references import experts, losses, norms
from . import Probe


def _make_gated(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    size = case["shape"]["size"]
    rows = (draw.length, *case["shape"].get("heads", ()))
    inputs = {"x": draw.normal(*rows, size), "gate": draw.normal(*rows, size)}
    inputs["weight"] = 1.0 + 0.1 * draw.normal(size)
    return inputs, {"activation": case["shape"].get("activation", "silu")}


def _call_gated(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """`function` is the module's class; the model constructs it and loads the weight."""
    size = inputs["x"].shape[-1]
    kwargs = {} if fixed["activation"] == "silu" else {"activation": fixed["activation"]}
    module = function(size, eps=1e-6, device=inputs["x"].device, dtype=inputs["x"].dtype, **kwargs)
    # The leaf itself, so that its gradient is seen; assigning to a Parameter's name would refuse a plain tensor.
    del module.weight
    module.weight = inputs["weight"]
    return {"output": module(inputs["x"], inputs["gate"])}


def _reference_gated(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    return {"output": norms.gated_rms_norm(**inputs, activation=fixed["activation"], precision=precision)}


def _make_norm(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    offset = float(case["shape"].get("offset", 0.0))
    size = case["shape"]["size"]
    weight = 1.0 - offset + 0.1 * draw.normal(size)
    return {"x": draw.normal(draw.length, size), "weight": weight}, {"offset": offset}


def _call_norm(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    casting = "gemma" if fixed["offset"] else "llama"
    # In place would write the gradient over the upstream one, which this probe compares twice.
    return {"output": function(inputs["x"], inputs["weight"], 1e-6, fixed["offset"], casting, False)}


def _reference_norm(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    return {"output": norms.rms_norm(**inputs, offset=fixed["offset"], precision=precision)}


def _make_swiglu(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    size = case["shape"]["size"]
    return {"a": draw.normal(draw.length, size), "b": draw.normal(draw.length, size)}, {}


def _call_swiglu(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    del fixed
    # A product of one, so that a kernel that overwrites its inputs does not overwrite the leaves.
    return {"output": function(inputs["a"] * 1, inputs["b"] * 1)}


def _reference_swiglu(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    del fixed
    return {"output": norms.swiglu(**inputs, precision=precision)}


def _make_loss(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    hidden, vocabulary = case["shape"]["hidden"], case["shape"]["vocabulary"]
    labels = draw.integers(vocabulary, draw.length)
    labels[::7] = -100  # prompts and padding carry no label
    inputs = {"hidden": draw.normal(draw.length, hidden), "weight": draw.normal(vocabulary, hidden) * hidden**-0.5}
    return inputs, {"labels": labels}


def _call_loss(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    loss = function(inputs["hidden"], inputs["weight"], fixed["labels"])
    return {"loss": loss[0] if isinstance(loss, tuple) else loss}


def _reference_loss(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    return {"loss": losses.linear_cross_entropy(**inputs, labels=fixed["labels"], precision=precision)}


def _make_experts(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    # Uneven on purpose, with an expert that got no token at all.
    chosen = draw.integers(max(s["experts"] - 1, 1), draw.length)
    counts = draw.torch.bincount(chosen, minlength=s["experts"])
    inputs = {
        "x": draw.normal(draw.length, s["hidden"]),
        "weight": draw.normal(s["experts"], s["hidden"], s["intermediate"]) * s["hidden"] ** -0.5,
    }
    return inputs, {"offs": counts.cumsum(0).to(draw.torch.int32)}


def _call_experts(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    return {"output": function(inputs["x"], inputs["weight"], offs=fixed["offs"])}


def _reference_experts(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    return {"output": experts.grouped_mm(**inputs, offs=fixed["offs"], precision=precision)}


PROBES = {
    "gated_rms_norm": Probe(_make_gated, _call_gated, _reference_gated),
    "rms_norm": Probe(_make_norm, _call_norm, _reference_norm),
    "swiglu": Probe(_make_swiglu, _call_swiglu, _reference_swiglu),
    "linear_cross_entropy": Probe(_make_loss, _call_loss, _reference_loss),
    "grouped_mm": Probe(_make_experts, _call_experts, _reference_experts),
}
