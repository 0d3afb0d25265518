"""Attention as each implementation is called: flash-attn's two functions, torch's varlen_attn, sdpa and flex."""

from __future__ import annotations

from typing import Any

from ..references.attention import attention
from . import Probe
from .varlen import causal


def _make(case: Any, draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    s = case["shape"]
    inputs = {
        "q": draw.normal(draw.length, s["q_heads"], s["head_dim"]),
        "k": draw.normal(draw.length, s["kv_heads"], s["head_dim"]),
        "v": draw.normal(draw.length, s["kv_heads"], s["head_dim"]),
    }
    cuts = [0, draw.length] if draw.cu_seqlens is None else draw.cu_seqlens.tolist()
    longest = max(b - a for a, b in zip(cuts, cuts[1:]))
    return inputs, {"cuts": cuts, "longest": longest, "cu_seqlens": draw.integer_tensor(cuts, "int32")}


def _call_flash_varlen(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    cu, longest = fixed["cu_seqlens"], fixed["longest"]
    output = function(inputs["q"], inputs["k"], inputs["v"], cu, cu, longest, longest, causal=True)
    return {"output": output[0] if isinstance(output, tuple) else output}


def _call_flash(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    outputs = []
    for a, b in zip(fixed["cuts"], fixed["cuts"][1:]):
        one = function(*(inputs[name][None, a:b] for name in "qkv"), causal=True)
        outputs.append((one[0] if isinstance(one, tuple) else one)[0])
    return {"output": _cat(outputs)}


def _call_torch_varlen(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    return {"output": causal(function, inputs["q"], inputs["k"], inputs["v"], fixed["cu_seqlens"], fixed["longest"])}


def _call_sdpa(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    outputs = []
    for a, b in zip(fixed["cuts"], fixed["cuts"][1:]):
        one = [inputs[name][a:b].transpose(0, 1)[None] for name in "qkv"]
        outputs.append(function(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return {"output": _cat(outputs)}


def _call_flex(function: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    """Compiled where it runs on a GPU, as transformers does it; samples are kept apart by a block mask."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = (inputs[name].transpose(0, 1)[None] for name in "qkv")
    length, device = q.shape[2], q.device
    cuts = torch.tensor(fixed["cuts"][1:], device=device)
    sample = torch.searchsorted(cuts, torch.arange(length, device=device), right=True)

    def visible(_b: Any, _h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (sample[i] == sample[j])

    mask = create_block_mask(visible, B=None, H=None, Q_LEN=length, KV_LEN=length, device=device)
    run = torch.compile(function, dynamic=False) if q.is_cuda else function
    return {"output": run(q, k, v, block_mask=mask, enable_gqa=True)[0].transpose(0, 1)}


def _cat(pieces: Any) -> Any:
    import torch

    return torch.cat(pieces, dim=0)


def _reference(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    return {"output": attention(**inputs, cu_seqlens=fixed["cuts"], precision=precision)}


PROBES = {
    "flash_varlen": Probe(_make, _call_flash_varlen, _reference),
    "flash": Probe(_make, _call_flash, _reference),
    "torch_varlen": Probe(_make, _call_torch_varlen, _reference),
    "flex": Probe(_make, _call_flex, _reference),
    "sdpa": Probe(_make, _call_sdpa, _reference),
}
