"""How far are the ranks of one run apart? Several traces of the same steps, one for each rank."""

from __future__ import annotations

import itertools
import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kernelguard.errors import InputError
from kernelguard.trace.bound import judge
from kernelguard.trace.profile import Profile, with_bound

STRAGGLING = 0.03
"""Share of a step; a smaller difference between ranks is the usual one."""
UNLIKE = 1.2
"""Between the longest and the shortest step: ranks wait for each other in every step, so theirs are alike."""


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


def refuse_same_rank(profiles: Sequence[Profile]) -> None:
    """Ranks of one run differ in their number.

    Raises:
        InputError: the last trace names a rank that another one names too, so they are of two runs.
    """
    last = profiles[-1]
    for other in profiles[:-1]:
        if last.rank is not None and last.rank == other.rank:
            each = [f"kernelguard profile {shlex.quote(p.source)} --json" for p in (other, last)]
            raise InputError(
                f"{other.source} and {last.source} are both of rank {last.rank}: "
                "two recordings to compare, and not two ranks of one run",
                hint=f"{each[0]} > a.json; {each[1]} > b.json; kernelguard report a.json b.json",
            )


def _numbers(profiles: Sequence[Profile]) -> list[int]:
    """The rank of each; one that names none gets, in the order given, what is left."""
    named = {found.rank for found in profiles}
    left = (number for number in itertools.count() if number not in named)
    return [next(left) if found.rank is None else found.rank for found in profiles]


def _doubts(profiles: Sequence[Profile]) -> Iterator[str]:
    """What speaks against these being the ranks of one run, or is only taken to be so."""
    if len(profiles) < 2:
        return
    unnamed = sum(found.rank is None for found in profiles)
    if unnamed:
        which = "none of the traces names its rank" if unnamed == len(profiles) else f"{unnamed} of them name no rank"
        yield f"{which}: they are taken for the ranks of one run, in the order given"
    gpus = sorted({found.gpu for found in profiles if found.gpu})
    if len(gpus) > 1:
        yield f"the ranks ran on different GPUs: {', '.join(gpus)}"
    walls = sorted(found.wall / found.step_count for found in profiles)
    if walls[-1] > UNLIKE * walls[0]:
        yield (
            f"a step takes from {walls[0] / 1000:,.1f} to {walls[-1] / 1000:,.1f} ms, and ranks of one run keep step: "
            "are these traces of several runs?"
        )


def spread(profiles: Sequence[Profile]) -> Spread:
    """Compare the ranks; a rank that no trace names counts by its position."""
    rows = tuple(
        sorted(
            (
                RankRow(
                    rank=number,
                    source=found.source,
                    wall=found.wall / found.step_count,
                    computing=(found.busy - found.exposed_communication) / found.step_count,
                    communication=found.exposed_communication / found.step_count,
                    idle=found.idle.total / found.step_count,
                    data=(found.idle.data + found.idle.script) / found.step_count,
                )
                for number, found in zip(_numbers(profiles), profiles, strict=True)
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
    return replace(shown, notes=(*_doubts(profiles), *shown.notes)), ranks
