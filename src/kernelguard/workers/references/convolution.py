"""The causal depthwise convolution in front of most linear-attention and Mamba layers.

    y[b, t, d]  =  silu( bias[d] + sum_{w=0}^{W-1} weight[d, w] x[b, t - (W-1) + w, d] )

where a term that lies before the start of the token's own sample counts as 0.
"""

from __future__ import annotations

from typing import Any

import torch

from .precision import EXACT, Precision, segments


def causal_conv1d(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    activation: Any = None,
    cu_seqlens: Any = None,
    seq_idx: Any = None,
    precision: Precision = EXACT,
) -> Any:
    """`x` [B, T, D], `weight` [D, W], `bias` [D]; output [B, T, D].

    Samples are told apart by `cu_seqlens` or by `seq_idx` [B, T], whose value changes where a new one starts.
    """
    del precision  # no matrix product
    if seq_idx is not None:
        rows = [
            causal_conv1d(row[None], weight, bias, activation=activation, cu_seqlens=starts(i))
            for row, i in zip(x, seq_idx)
        ]
        return torch.cat(rows, dim=0)
    outputs = []
    for a, b in segments(x.shape[1], cu_seqlens):
        padded = torch.nn.functional.pad(x[:, a:b], (0, 0, weight.shape[1] - 1, 0))
        taps = [padded[:, w : w + b - a] * weight[:, w] for w in range(weight.shape[1])]
        outputs.append(sum(taps[1:], taps[0]))
    y = torch.cat(outputs, dim=1)
    if bias is not None:
        y = y + bias
    return y if activation is None else torch.nn.functional.silu(y)


def causal_conv1d_step(x: Any, state: Any, weight: Any, bias: Any = None, *, activation: Any = None) -> tuple[Any, Any]:
    """One token further: `x` [B, D], `state` [B, D, S] with the last S >= W - 1 inputs. Output [B, D] and the state."""
    seen = torch.cat([state, x[..., None]], dim=-1)
    y = (seen[..., -weight.shape[1] :] * weight).sum(-1)
    if bias is not None:
        y = y + bias
    return (y if activation is None else torch.nn.functional.silu(y)), seen[..., 1:]


def starts(seq_idx: Any) -> list[int]:
    """`cu_seqlens` of one row of sample numbers."""
    changes = (seq_idx[1:] != seq_idx[:-1]).nonzero().flatten() + 1
    return [0, *changes.tolist(), len(seq_idx)]
