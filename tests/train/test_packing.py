from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelguard_train import packing
from kernelguard_train.batches import IGNORED, packed_batch, padded_batch
from kernelguard_train.chat import Sample


def sample(length: int, first: int = 1) -> Sample:
    return Sample(name="s", ids=np.arange(first, first + length), trained=np.ones(length, dtype=bool))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(300, 700))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_packed_once_and_fits(lengths: list[int], capacity: int) -> None:
    groups = packing.best_fit_decreasing(lengths, capacity)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    totals = [sum(lengths[i] for i in group) for group in groups]
    assert max(totals) <= capacity
    # A batch is closed only when nothing that is left would fit it.
    for number, total in enumerate(totals):
        later = [lengths[i] for group in groups[number + 1 :] for i in group]
        assert not later or total + min(later) > capacity


def test_a_pair_may_fill_better_than_one() -> None:
    # The longest that fits beside 60 is 35, which leaves 5; 30 and 10 leave nothing.
    assert packing.best_fit_decreasing([60, 35, 30, 10], 100) == [[0, 2, 3], [1]]


@pytest.mark.parametrize(("median", "sigma"), [(1175, 0.33), (1094, 0.5), (1004, 0.65)])
def test_density_on_ultrachat_like_lengths(median: int, sigma: float) -> None:
    draw = np.random.default_rng(0)
    lengths = [int(n) for n in draw.lognormal(math.log(median), sigma, 2048 * 4).clip(64, 8192)]
    batches = [
        group
        for i in range(0, len(lengths), 2048)
        for group in packing.plan(lengths[i : i + 2048], 8192, "packed", (0, i))
    ]
    assert sum(lengths) / (8192 * len(batches)) >= 0.99


def test_padded_rows_fit_and_sorting_wastes_less() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(6, 0.6, 500).clip(8, 8000)]
    used = {}
    for by_length in (False, True):
        groups = packing.padded_rows(lengths, 8192, by_length=by_length)
        assert sorted(i for group in groups for i in group) == list(range(500))
        areas = [len(group) * packing.padded_length(max(lengths[i] for i in group), 8192) for group in groups]
        assert max(areas) <= 8192
        used[by_length] = sum(areas)
    assert used[True] < 0.8 * used[False]


def test_an_unfitting_length_is_refused() -> None:
    with pytest.raises(ValueError, match="1 to 100"):
        packing.best_fit_decreasing([5, 101], 100)


def test_a_plan_depends_on_its_seed_alone() -> None:
    lengths = list(range(10, 200))
    assert packing.plan(lengths, 256, "packed", (1, 2)) == packing.plan(lengths, 256, "packed", (1, 2))
    assert packing.plan(lengths, 256, "packed", (1, 2)) != packing.plan(lengths, 256, "packed", (1, 3))


@given(st.integers(1, 5000), st.integers(1, 600))
def test_cut_pieces_are_even_and_complete(length: int, longest: int) -> None:
    pieces = packing.cut(length, longest)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == length
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    assert all(0 < end - start <= longest for start, end in pieces)
    assert len(pieces) == math.ceil(length / longest)


def test_packed_signals_agree_with_each_other() -> None:
    batch = packed_batch([sample(5, 10), sample(1, 20), sample(7, 30)], 128, pad_id=0)
    assert batch.cu_seqlens is not None
    assert batch.seq_idx is not None
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 13, 128]
    assert batch.cu_seqlens.dtype == batch.seq_idx.dtype == torch.int32
    assert torch.equal(batch.cu_seqlens, batch.cu_seqlens_cpu)
    assert batch.seq_idx[0].tolist() == [0] * 5 + [1] + [2] * 7 + [3] * 115
    assert batch.position_ids[0].tolist() == [*range(5), 0, *range(7), *range(115)]
    assert batch.position_ids.ndim == 2
    assert batch.attention_mask is None
    assert batch.max_length == 115
    assert (batch.tokens, batch.size, batch.samples, batch.squared) == (13, 128, 3, 25 + 1 + 49)


def test_labels_never_cross_a_boundary() -> None:
    batch = packed_batch([sample(5, 10), sample(1, 20), sample(7, 30)], 128, pad_id=0)
    labels = batch.labels[0].tolist()
    assert labels[:13] == [11, 12, 13, 14, IGNORED, IGNORED, 31, 32, 33, 34, 35, 36, IGNORED]
    assert set(labels[13:]) == {IGNORED}
    assert batch.trained_at.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 10, 11]


def test_a_full_batch_has_no_empty_tail_segment() -> None:
    batch = packed_batch([sample(100), sample(28)], 128, pad_id=0)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 100, 128]


def test_masked_tokens_are_no_labels() -> None:
    masked = Sample(name="s", ids=np.array([1, 2, 3, 4]), trained=np.array([False, False, True, False]))
    assert packed_batch([masked], 128, 0).labels[0, :4].tolist() == [IGNORED, 3, IGNORED, IGNORED]
    assert padded_batch([masked], 128, 0).labels[0, :4].tolist() == [IGNORED, 3, IGNORED, IGNORED]


def test_a_batch_of_nothing_is_padding() -> None:
    batch = packed_batch([], 128, pad_id=3)
    assert batch.cu_seqlens is not None
    assert batch.cu_seqlens.tolist() == [0, 128]
    assert batch.tokens == batch.samples == batch.trained_at.numel() == 0
    assert padded_batch([], 128, 3).trained_at.numel() == 0


def test_padded_rows_are_masked_on_the_right() -> None:
    batch = padded_batch([sample(3), sample(10)], 128, pad_id=0)
    assert batch.input_ids.shape == (2, 16)
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(1).tolist() == [3, 10]
    assert batch.trained_at.tolist() == [0, 1, *range(16, 25)]
    assert "cu_seq_lens_q" not in batch.model_inputs()
