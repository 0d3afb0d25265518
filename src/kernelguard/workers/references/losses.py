"""The language model's loss, with its last projection inside.

loss  =  mean over tokens with a label of   logsumexp(W h_t) - (W h_t)[label_t]
"""

from __future__ import annotations

from typing import Any

import torch

from .precision import EXACT, Precision


def linear_cross_entropy(
    hidden: Any, weight: Any, labels: Any, *, ignore: int = -100, reduction: str = "mean", precision: Precision = EXACT
) -> Any:
    """`hidden` [T, D], `weight` [V, D], `labels` [T] (`ignore`: no label). A scalar."""
    logits = precision.matmul(hidden, weight.transpose(0, 1))
    counted = labels != ignore
    chosen = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    total = ((logits.logsumexp(-1) - chosen) * counted).sum()
    return total / counted.sum().to(total.dtype) if reduction == "mean" else total


def cross_entropy(logits: Any, labels: Any, *, ignore: int = -100, precision: Precision = EXACT) -> Any:
    """The same from ready logits [T, V]."""
    del precision  # no matrix product
    return torch.nn.functional.cross_entropy(logits, labels, ignore_index=ignore)
