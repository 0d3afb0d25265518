"""Does any gradient of this model cross from one packed sample to another?

Before a packed run, one batch of three short samples goes through the model itself, on the kernels it is bound to,
and only the middle sample has labels. Then the gradient at the embeddings of the two others must be exactly zero. Not
small: a forget gate at its initial value hides a leaking state from every test with a tolerance, and so does a loss
curve.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from kernelguard_train.batches import Batch, packed_batch
from kernelguard_train.chat import Sample
from kernelguard_train.errors import ModelError

LENGTHS = (65, 130, 30)
"""Longer than a convolution, on both sides of a chunk of 64, and with tail padding left."""
LEAST = 256
"""Tokens that they fit into."""


def probe_batch(vocabulary: int, capacity: int) -> Batch:
    """Three samples of random tokens of which only the middle one is trained."""
    draw = np.random.default_rng(0)
    samples = [
        Sample(name="probe", ids=draw.integers(0, vocabulary, n), trained=np.full(n, number == 1))
        for number, n in enumerate(LENGTHS)
    ]
    return packed_batch(samples, capacity, pad_id=0)


def check(model: Any, embedding: nn.Module, vocabulary: int, device: torch.device, tokens: int = 0) -> None:
    """One forward and backward pass on a packed probe; gradients of parameters are cleared again.

    `tokens` is the size of the run's batches, which the probe has too: kernels are compiled and tuned for a size, and
    for one that the run never has again that is lost time.
    Every rank must call this, since a sharded model computes on all of them together.

    Raises:
        ModelError: when a gradient crosses a boundary, or none arrives at all.
    """
    batch = probe_batch(vocabulary, max(tokens, LEAST)).to(device)
    kept: list[torch.Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept.append(output)

    hook = embedding.register_forward_hook(keep)
    try:
        with model.computing():
            model(batch).backward()
    finally:
        hook.remove()
    model.zero_grad(set_to_none=True)
    if not kept or kept[0].grad is None:
        raise ModelError("no gradient arrives at the embeddings: the model does not train")
    size = kept[0].grad[0].abs().amax(dim=-1).float()
    first, second, _ = LENGTHS
    own, before, after = (
        float(part.max()) for part in (size[first : first + second], size[:first], size[first + second :])
    )
    if own == 0 or not np.isfinite(own):
        raise ModelError(f"the gradient at the trained sample is {own}: the model does not train")
    if before > 0 or after > 0:
        raise ModelError(
            f"packed samples are not kept apart: training one sample gives a gradient of {before:.1e} at the sample "
            f"before it and {after:.1e} at the one after (own: {own:.1e}). A layer of this model ignores the "
            "boundaries. Use batch.mode=padded, or other model.kernels and model.attention"
        )
