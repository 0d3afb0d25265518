"""The tensors of one batch, with every signal a model needs to keep packed samples apart.

Attention reads `cu_seq_lens_*` (or, as a mask, `position_ids`), recurrent layers read `cu_seqlens`, convolutions and
Mamba read `seq_idx`. One that is missing leaks in that kind of layer only, and no loss curve shows it; so all are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from kernelguard_train.chat import Sample
from kernelguard_train.packing import padded_length

IGNORED = -100
"""The label of a position that is not trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one forward pass of one rank takes, and what it is made of."""

    input_ids: torch.Tensor
    """int64 `[1, tokens]` packed, `[rows, longest]` padded."""
    position_ids: torch.Tensor
    """int64, like `input_ids`; from 0 in every sample. Two-dimensional on purpose: Qwen3.5 takes three-dimensional ids
    for images, and packing is then not seen."""
    labels: torch.Tensor
    """int64, like `input_ids`: at each position the *next* token, where that is trained and of the same sample."""
    trained_at: torch.Tensor
    """int64: flat positions whose label is not ignored. Known here, so that a GPU need not be asked."""
    attention_mask: torch.Tensor | None = None
    """int64, padded batches only: a mask of ones would switch off the isolation of packed ones."""
    cu_seqlens: torch.Tensor | None = None
    """int32 boundaries, strictly increasing from 0 to all tokens; tail padding is a segment of its own."""
    cu_seqlens_cpu: torch.Tensor | None = None
    """The same, left on the CPU, so that kernels which plan on the host need not wait for the device."""
    seq_idx: torch.Tensor | None = None
    """int32 `[1, tokens]`: which segment each token is of."""
    max_length: int = 0
    samples: int
    tokens: int
    """Tokens of samples, padding not counted."""
    squared: int
    """Sum of squared sample lengths: what attention costs."""

    @property
    def size(self) -> int:
        """All tokens that are computed, padding included."""
        return self.input_ids.numel()

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments of a transformers model."""
        inputs: dict[str, Any] = {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            "attention_mask": self.attention_mask,
            "use_cache": False,
        }
        if self.cu_seqlens is not None:
            inputs |= {
                "cu_seq_lens_q": self.cu_seqlens,
                "cu_seq_lens_k": self.cu_seqlens,
                "max_length_q": self.max_length,
                "max_length_k": self.max_length,
                "seq_idx": self.seq_idx,
                "cu_seqlens_cpu": self.cu_seqlens_cpu,
            }
        return inputs

    def to(self, device: torch.device) -> Batch:
        """The same on a device; the CPU copy of the boundaries stays."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True), skip=("cu_seqlens_cpu",))

    def pin_memory(self) -> Batch:
        """The same in page-locked memory, so that copying to a GPU does not wait. Called by torch's DataLoader."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Any, skip: tuple[str, ...] = ()) -> Batch:
        tensors = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), torch.Tensor)}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if name not in skip})


def _labels(sample: Sample) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Next tokens; the last position of a sample has none, so no label can cross into the next sample."""
    labels = np.full(len(sample), IGNORED, dtype=np.int64)
    labels[:-1] = np.where(sample.trained[1:], sample.ids[1:], IGNORED)
    return labels


def packed_batch(samples: Sequence[Sample], capacity: int, pad_id: int) -> Batch:
    """Samples side by side in one row of exactly `capacity` tokens; none at all makes a batch of padding."""
    lengths = [len(sample) for sample in samples]
    total = sum(lengths)
    if total > capacity:
        raise ValueError(f"{total} tokens do not fit {capacity}")
    segments = [*lengths, capacity - total] if total < capacity else lengths
    ids = np.full(capacity, pad_id, dtype=np.int64)
    labels = np.full(capacity, IGNORED, dtype=np.int64)
    if samples:
        ids[:total] = np.concatenate([sample.ids for sample in samples])
        labels[:total] = np.concatenate([_labels(sample) for sample in samples])
    boundaries = torch.from_numpy(np.cumsum([0, *segments], dtype=np.int32))
    return Batch(
        input_ids=torch.from_numpy(ids)[None],
        position_ids=torch.from_numpy(np.concatenate([np.arange(n, dtype=np.int64) for n in segments]))[None],
        labels=torch.from_numpy(labels)[None],
        trained_at=torch.from_numpy(np.flatnonzero(labels != IGNORED)),
        cu_seqlens=boundaries,
        cu_seqlens_cpu=boundaries.clone(),
        seq_idx=torch.from_numpy(np.repeat(np.arange(len(segments), dtype=np.int32), segments))[None],
        max_length=max(segments),
        samples=len(samples),
        tokens=total,
        squared=sum(n * n for n in lengths),
    )


def padded_batch(samples: Sequence[Sample], capacity: int, pad_id: int) -> Batch:
    """One sample a row, padded on the right; none at all makes one short row of padding."""
    lengths = [len(sample) for sample in samples]
    width = padded_length(max(lengths, default=1), capacity)
    shape = (max(1, len(samples)), width)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    mask = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample.ids
        labels[row, : len(sample)] = _labels(sample)
        mask[row, : len(sample)] = 1
    if not samples:
        mask[:] = 1  # a row that attends to nothing would be NaN
    return Batch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(np.broadcast_to(np.arange(width, dtype=np.int64), shape).copy()),
        labels=torch.from_numpy(labels),
        trained_at=torch.from_numpy(np.flatnonzero(labels.reshape(-1) != IGNORED)),
        attention_mask=torch.from_numpy(mask),
        samples=len(samples),
        tokens=sum(lengths),
        squared=sum(n * n for n in lengths),
    )


def make_batch(samples: Sequence[Sample], capacity: int, pad_id: int, mode: str) -> Batch:
    """The batch of one group that `packing.plan` made."""
    return (packed_batch if mode == "packed" else padded_batch)(samples, capacity, pad_id)
