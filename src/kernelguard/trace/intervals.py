"""Plain arithmetic on time: what stretches of time cover together, and how much of them lies in another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time without overlaps, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged


def gaps(merged: Sequence[Interval], begin: float, end: float, *, at_least: float = 0.0) -> list[Interval]:
    """What the intervals leave uncovered of a window; `merged` comes from `union`."""
    found, at = [], begin
    for start, stop in merged:
        if start >= end:
            break
        if start - at > at_least:
            found.append((at, start))
        at = max(at, stop)
    if end - at > at_least:
        found.append((at, end))
    return found


class Cover:
    """Asks a union of intervals how much of a stretch it covers, in logarithmic time plus what it meets."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self.merged = union(intervals)
        self._starts = [begin for begin, _ in self.merged]

    def parts(self, begin: float, end: float) -> list[Interval]:
        """The covered pieces of a stretch."""
        found = []
        at = max(0, bisect_right(self._starts, begin) - 1)
        while at < len(self.merged) and self.merged[at][0] < end:
            low, high = max(begin, self.merged[at][0]), min(end, self.merged[at][1])
            if high > low:
                found.append((low, high))
            at += 1
        return found

    def length(self, begin: float, end: float) -> float:
        """How much of a stretch is covered."""
        return sum(high - low for low, high in self.parts(begin, end))

    @property
    def total(self) -> float:
        """Of everything."""
        return sum(high - low for low, high in self.merged)


class Bins:
    """A window cut into equal slices, and how much of each is taken up."""

    def __init__(self, begin: float, end: float, count: int) -> None:
        self.begin, self.width = begin, max(end - begin, 1e-9) / count
        self.filled = [0.0] * count

    def add(self, begin: float, end: float) -> None:
        """Take up a stretch; what lies outside the window is left out."""
        last = len(self.filled) - 1
        low, high = max(begin, self.begin), min(end, self.begin + self.width * len(self.filled))
        if high <= low:
            return
        first, final = int((low - self.begin) / self.width), int((high - self.begin) / self.width)
        for slot in range(max(0, first), min(last, final) + 1):
            left = self.begin + slot * self.width
            self.filled[slot] += max(0.0, min(high, left + self.width) - max(low, left))

    @property
    def shares(self) -> tuple[float, ...]:
        """0 to 1 for each slice."""
        return tuple(min(1.0, value / self.width) for value in self.filled)
