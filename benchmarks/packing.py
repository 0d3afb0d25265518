"""How full are batches, by packing method and look-ahead, on lengths like those of UltraChat-200k?

    python benchmarks/packing.py [--samples 65536] [--tokens 8192] [--json FILE]

Lengths are log-normal with a mean of about 1240 tokens, for three spreads, since the real histogram is not at hand.
Reported per method: density (tokens of samples per token of batch), samples cut in two, and microseconds per sample.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

from kernelguard_train.packing import best_fit_decreasing, padded_length, padded_rows

SPREADS = ((1175, 0.33), (1094, 0.5), (1004, 0.65))
"""Median and sigma."""
WINDOWS = (256, 1024, 2048, 4096)
Packer = Callable[[Sequence[int], int], list[list[int]]]


def next_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """One open batch: what does not fit closes it."""
    groups: list[list[int]] = [[]]
    used = 0
    for index, length in enumerate(lengths):
        if used + length > capacity:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups


def first_fit(lengths: Sequence[int], capacity: int, bins: int = 32) -> list[list[int]]:
    """Several open batches; a sample goes into the first it fits, and the fullest is closed for a new one."""
    done: list[list[int]] = []
    open_: list[tuple[int, list[int]]] = []
    for index, length in enumerate(lengths):
        place = next((i for i, (used, _) in enumerate(open_) if used + length <= capacity), None)
        if place is None:
            if len(open_) == bins:
                fullest = max(range(bins), key=lambda i: open_[i][0])
                done.append(open_.pop(fullest)[1])
            open_.append((0, []))
            place = len(open_) - 1
        used, group = open_[place]
        group.append(index)
        open_[place] = (used + length, group)
    return done + [group for _, group in open_]


def plain_best_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """The textbook method, without the look at pairs."""
    from bisect import bisect_left, insort  # noqa: PLC0415 - used by this comparison alone

    groups: list[list[int]] = []
    room: list[tuple[int, int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[index], -1))
        left, group = (capacity, len(groups)) if place == len(room) else room.pop(place)
        if group == len(groups):
            groups.append([])
        groups[group].append(index)
        insort(room, (left - lengths[index], group))
    return groups


def measure(lengths: list[int], capacity: int, packer: Packer, window: int) -> dict[str, float]:
    """Density and cost of packing window by window."""
    start = time.perf_counter()
    batches = sum(len(packer(lengths[i : i + window], capacity)) for i in range(0, len(lengths), window))
    seconds = time.perf_counter() - start
    return {"density": sum(lengths) / (batches * capacity), "us_per_sample": seconds / len(lengths) * 1e6, "cut": 0}


def padded(lengths: list[int], capacity: int, window: int, *, by_length: bool) -> dict[str, float]:
    """Density of padded rows, which is relative to what is computed: batches are not all of full size."""
    area = 0
    start = time.perf_counter()
    for i in range(0, len(lengths), window):
        part = lengths[i : i + window]
        for group in padded_rows(part, capacity, by_length=by_length):
            area += len(group) * padded_length(max(part[j] for j in group), capacity)
    seconds = time.perf_counter() - start
    return {"density": sum(lengths) / area, "us_per_sample": seconds / len(lengths) * 1e6, "cut": 0}


def concatenated(lengths: list[int], capacity: int) -> dict[str, float]:
    """One long text cut into batches: always full, but samples are cut, and their later parts lack their beginning."""
    ends = np.cumsum(lengths)
    cut = int(np.sum((ends - 1) // capacity != (ends - np.array(lengths)) // capacity))
    return {"density": 1.0, "us_per_sample": 0.0, "cut": cut / len(lengths)}


def rows(lengths: list[int], capacity: int) -> dict[str, dict[str, float]]:
    """All methods on the same lengths."""
    everything = len(lengths)
    found = {
        "padded, one sample a row": padded(lengths, capacity, 2048, by_length=False),
        "padded, sorted in windows of 2048": padded(lengths, capacity, 2048, by_length=True),
        "next-fit": measure(lengths, capacity, next_fit, everything),
        "first-fit, 32 open": measure(lengths, capacity, first_fit, everything),
        "best-fit decreasing, global": measure(lengths, capacity, plain_best_fit_decreasing, everything),
        "concatenate and cut": concatenated(lengths, capacity),
    }
    for window in WINDOWS:
        found[f"plain best-fit decreasing, window {window}"] = measure(
            lengths, capacity, plain_best_fit_decreasing, window
        )
        found[f"the trainer's, window {window}"] = measure(lengths, capacity, best_fit_decreasing, window)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=65_536)
    parser.add_argument("--tokens", type=int, default=8_192)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    for median, sigma in SPREADS:
        draw = np.random.default_rng(0)
        sizes = draw.lognormal(math.log(median), sigma, options.samples).clip(64, options.tokens)
        lengths = [int(n) for n in sizes]
        found = rows(lengths, options.tokens)
        results[f"sigma {sigma}, mean {np.mean(lengths):.0f}"] = found
        print(
            f"\nsigma {sigma}, mean {np.mean(lengths):.0f} tokens, {options.samples} samples, {options.tokens} a batch"
        )
        for name, row in found.items():
            print(f"  {name:44s} {row['density']:.4f}  cut {100 * row['cut']:4.1f} %  {row['us_per_sample']:6.1f} us")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
