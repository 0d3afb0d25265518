"""Any layer that replaces another: the replacement's forward on the original's parameters, against the original.

This is how the `kernels` hub swaps a layer in: the module stays, its `forward` becomes the kernel's.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

from . import Probe


def _find(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _make(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    draw.torch.manual_seed(draw.seed)
    original = _find(s["original"])(*s.get("arguments", ()), **s.get("keywords", {})).to(draw.device)
    inputs = {
        f"input {i}": draw.normal(*(draw.length if n == "T" else n for n in shape))
        for i, shape in enumerate(s["inputs"])
    }
    for name, parameter in original.named_parameters():
        # Not the initial values: a norm's ones and a bias's zeros would hide a kernel that ignores them.
        inputs[name] = draw.rounded(parameter.detach() + 0.1 * draw.normal(*parameter.shape, dtype="float32"))
    return inputs, {"original": original, "count": len(s["inputs"])}


def _run(module: Any, inputs: Any, count: int) -> dict[str, Any]:
    import torch

    values = list(inputs.values())[:count]
    parameters = {name: value for name, value in inputs.items() if not name.startswith("input ")}
    output = torch.func.functional_call(module, parameters, tuple(values))
    outputs = output if isinstance(output, tuple) else (output,)
    return {f"output {i}": x for i, x in enumerate(outputs) if isinstance(x, torch.Tensor)}


def _call(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """`function` is the class of the replacement."""
    module = copy.deepcopy(fixed["original"])
    module.forward = function.forward.__get__(module)
    return _run(module, inputs, fixed["count"])


def _reference(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    dtype = precision.dtype if precision.dtype is not None else next(iter(inputs.values())).dtype
    module = copy.deepcopy(fixed["original"]).to(dtype)
    cast = {name: value.to(dtype) for name, value in inputs.items()}
    return _run(module, cast, fixed["count"])


PROBES = {"layer": Probe(_make, _call, _reference)}
