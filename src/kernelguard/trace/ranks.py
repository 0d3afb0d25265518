"""How far are the ranks of one run apart? Several traces of the same steps, one for each rank."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kernelguard.trace.bound import judge
from kernelguard.trace.profile import Profile, with_bound

STRAGGLING = 0.03
"""Share of a step; a smaller difference between ranks is the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank's step. Microseconds."""

    rank: int
    source: str
    wall: float
    computing: float
    """The GPU computed."""
    communication: float
    """Communication that no computing hid: with collectives, mostly waiting for others."""
    idle: float
    data: float
    """Idle while the host read data or was in the script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """All ranks of one run."""

    rows: tuple[RankRow, ...]
    slowest: RankRow | None
    """The rank the others wait for: it arrives last, so it waits least in collectives. None: none stands out."""
    waiting: float
    """Share of a step in which the median rank waits longer in collectives than the slowest one does."""


def spread(profiles: Sequence[Profile]) -> Spread:
    """Compare the ranks; a rank that no trace names counts by its position."""
    rows = tuple(
        sorted(
            (
                RankRow(
                    rank=found.rank if found.rank is not None else position,
                    source=found.source,
                    wall=found.wall / found.step_count,
                    computing=(found.busy - found.exposed_communication) / found.step_count,
                    communication=found.exposed_communication / found.step_count,
                    idle=found.idle.total / found.step_count,
                    data=(found.idle.data + found.idle.script) / found.step_count,
                )
                for position, found in enumerate(profiles)
            ),
            key=lambda row: (row.rank, row.source),
        )
    )
    if len(rows) < 2:
        return Spread(rows=rows, slowest=None, waiting=0.0)
    last = min(rows, key=lambda row: row.communication)
    others = [row.communication for row in rows if row is not last]
    wall = statistics.median(row.wall for row in rows)
    waiting = max(0.0, statistics.median(others) - last.communication) / wall if wall else 0.0
    return Spread(rows=rows, slowest=last if waiting >= STRAGGLING else None, waiting=waiting)


def judge_ranks(profiles: Sequence[Profile]) -> tuple[Profile, Spread]:
    """The profile to show (the median rank by its step), judged with what all ranks tell."""
    ranks = spread(profiles)
    ordered = sorted(profiles, key=lambda found: found.wall / found.step_count)
    shown = ordered[len(ordered) // 2]
    if ranks.slowest is not None:
        # The rank that is waited for does not wait; show one of those that do.
        waiting = [found for found in ordered if found.source != ranks.slowest.source]
        shown = waiting[len(waiting) // 2]
        bound = judge(shown, straggling=ranks.waiting, straggler=f"rank {ranks.slowest.rank}")
        shown = with_bound(shown, bound)
    return shown, ranks
