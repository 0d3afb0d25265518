"""Mixture-of-experts products: the tokens of each expert times that expert's matrix.

y[offs[e-1] : offs[e]]  =  x[offs[e-1] : offs[e]] @ weight[e]
"""

from __future__ import annotations

from typing import Any

import torch

from .precision import EXACT, Precision


def grouped_mm(x: Any, weight: Any, offs: Any, *, precision: Precision = EXACT) -> Any:
    """`x` [T, K] sorted by expert, `weight` [E, K, N], `offs` [E] the end of each expert's tokens. Output [T, N]."""
    ends = [int(o) for o in offs]
    pieces = [precision.matmul(x[a:b], weight[e]) for e, (a, b) in enumerate(zip([0, *ends], ends)) if b > a]
    return torch.cat(pieces, dim=0)
