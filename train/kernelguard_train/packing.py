"""Which samples share a batch?

Pure functions from lengths to groups of indices. Packing takes a bounded window of samples and fills one
batch after the other, longest samples first, with what leaves the least room (best-fit decreasing). Whole samples only:
nothing is cut, and what room is left at the end of a batch is padding. `benchmarks/packing.py` compares it with the
alternatives.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

PAD_MULTIPLE = 8
"""Rows of padded batches are as long as their longest sample, rounded up to this."""


def best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Groups of indices whose lengths fit `capacity` together.

    A group takes the longest sample that still fits, again and again. Only at its end it looks further: where one more
    sample would leave less room than a typical one needs, a pair may take its place if it leaves still less. On lengths
    that spread little (UltraChat's do) this halves the waste of the plain method.

    Raises:
        ValueError: when a length fits no group or is not positive.
    """
    if any(not 0 < length <= capacity for length in lengths):
        raise ValueError(f"every length must be 1 to {capacity}; found {min(lengths)} to {max(lengths)}")
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    left = [lengths[i] for i in order]  # lengths not placed yet, rising, beside `order`
    typical = left[len(left) // 2] if left else 0
    groups: list[list[int]] = []
    while order:
        group: list[int] = []
        room = capacity
        while left and left[0] <= room:
            longest = bisect_right(left, room) - 1
            chosen: tuple[int, ...] = (longest,)
            if room - left[longest] < typical:
                chosen = _best_pair(left, room, longest) or chosen
            for place in chosen:  # the higher place first, so that the other keeps its number
                room -= left.pop(place)
                group.append(order.pop(place))
        groups.append(group)
    return groups


def _best_pair(rising: Sequence[int], room: int, longest: int) -> tuple[int, int] | None:
    """The two places up to `longest` that fill `room` better than that one alone; None when no two do."""
    best, chosen = room - rising[longest], None
    low, high = 0, longest
    while low < high and best:
        rest = room - rising[low] - rising[high]
        if rest < 0:
            high -= 1
            continue
        if rest < best:
            best, chosen = rest, (high, low)
        low += 1
    return chosen


def padded_rows(lengths: Sequence[int], capacity: int, *, by_length: bool) -> list[list[int]]:
    """Consecutive samples (or, by length, neighbours in length) whose padded rectangle fits `capacity`."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i)) if by_length else range(len(lengths))
    groups: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, padded_length(lengths[index], capacity))
        if not groups or longest * (len(groups[-1]) + 1) > capacity:
            groups.append([])
            longest = padded_length(lengths[index], capacity)
        groups[-1].append(index)
    return groups


def padded_length(length: int, capacity: int) -> int:
    """How long a padded row with this longest sample is."""
    return min(capacity, -(-length // PAD_MULTIPLE) * PAD_MULTIPLE)


def plan(lengths: Sequence[int], capacity: int, mode: str, seed: tuple[int, ...]) -> list[list[int]]:
    """The batches of one window: groups of indices into `lengths`, in an order drawn from `seed`.

    Without the shuffle the longest samples of each window would always be trained first.
    """
    if mode == "packed":
        groups = best_fit_decreasing(lengths, capacity)
    else:
        groups = padded_rows(lengths, capacity, by_length=mode == "sorted")
    order = np.random.default_rng(seed).permutation(len(groups))
    return [sorted(groups[i]) for i in order]


def cut(length: int, longest: int) -> list[tuple[int, int]]:
    """The pieces, as (start, end), that a sample which is too long is split into: as few and as even as possible."""
    pieces = -(-length // longest)
    edges = [round(i * length / pieces) for i in range(pieces + 1)]
    return list(itertools.pairwise(edges))
