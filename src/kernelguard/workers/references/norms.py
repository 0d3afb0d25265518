"""RMSNorm, its gated form, and SwiGLU: what works on each token alone.

rms_norm(x)   =  (w + offset) x / sqrt(mean(x^2) + eps)
gated         =  rms_norm(x) silu(gate)
swiglu(a, b)  =  silu(a) b
"""

from __future__ import annotations

from typing import Any

import torch

from .precision import EXACT, Precision


def rms_norm(
    x: Any, weight: Any, *, eps: float = 1e-6, offset: float = 0.0, groups: int = 1, precision: Precision = EXACT
) -> Any:
    """`x` [..., D], `weight` [D]. Gemma-like models store the weight minus one: `offset=1`.

    With `groups` the mean is taken over each of so many equal parts of D alone (Mamba-2).
    """
    del precision  # no matrix product
    parts = x.unflatten(-1, (groups, -1))
    return (weight + offset) * (parts * torch.rsqrt((parts * parts).mean(-1, keepdim=True) + eps)).flatten(-2)


def gated_rms_norm(
    x: Any, gate: Any, weight: Any, *, eps: float = 1e-6, activation: str = "silu", precision: Precision = EXACT
) -> Any:
    """The norm first, then the gate: `silu` (also called swish) or `sigmoid`."""
    opened = torch.sigmoid(gate) if activation == "sigmoid" else torch.nn.functional.silu(gate)
    return rms_norm(x, weight, eps=eps, precision=precision) * opened


def swiglu(a: Any, b: Any, *, precision: Precision = EXACT) -> Any:
    """`a` is what the gate projection made, `b` the up projection."""
    del precision  # no matrix product
    return torch.nn.functional.silu(a) * b
