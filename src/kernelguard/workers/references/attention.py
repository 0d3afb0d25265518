"""Causal attention with grouped heads, over samples packed in one row.

    o_i  =  sum_{j <= i, same sample} softmax_j( q_i . k_j / sqrt(K) ) v_j

Shapes: q [T, HQ, K]; k, v [T, HKV, K]; each key head serves HQ / HKV neighbouring query heads.
"""

from __future__ import annotations

from typing import Any

import torch

from .precision import EXACT, Precision, segments


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens: Any = None,
    scale: Any = None,
    causal: bool = True,
    window: int = 0,
    precision: Precision = EXACT,
) -> Any:
    """Output [T, HQ, K]. `window=w` lets a token see the w tokens before it and itself; 0: all of them."""
    group = q.shape[1] // k.shape[1]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    outputs = []
    for a, b in segments(q.shape[0], cu_seqlens):
        qs, ks, vs = (x[a:b].transpose(0, 1) for x in (q, k, v))
        ks, vs = (x.repeat_interleave(group, dim=0) for x in (ks, vs))
        scores = precision.matmul(qs, ks.transpose(-1, -2)) * factor
        if causal:
            position = torch.arange(b - a, device=q.device)
            distance = position[:, None] - position
            hidden = (distance < 0) | (distance > window) if window else distance < 0
            scores = scores.masked_fill(hidden, float("-inf"))
        outputs.append(precision.matmul(scores.softmax(-1), vs).transpose(0, 1))
    return torch.cat(outputs, dim=0)
