"""How do ranks share the tokenising, and still all see the same samples in the same order?

Of each window of rows a rank reads and tokenises every world-th one, in a process of its own. Then all ranks exchange
what they made, and each has the whole window: some ten megabytes for 2048 conversations, once in a few dozen steps.
What went wrong with a row travels along, so that every rank ends with the same error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from kernelguard_train.chat import Sample
from kernelguard_train.samples import Counts, Share


class Header(NamedTuple):
    """The numbers of a packed share, before its body."""

    epoch: int
    row: int
    """Where the window begins."""
    rows: int
    """Rows that this rank read of it."""
    size: int
    """Rows of an epoch; -1 where that is not known."""
    pad_id: int
    samples: int
    tokens: int
    text: int
    """Bytes of messages."""
    problem_at: int
    """Which row of the window ends the run; -1: none."""
    bad: int
    truncated: int
    split: int
    dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A share as two tensors, which travel cheaply between processes and ranks."""

    header: torch.Tensor
    """int64, the numbers of `Header`."""
    body: torch.Tensor
    """int32: for each sample its row in the window and its length, then all tokens as 2 id + trained, then messages."""

    @property
    def numbers(self) -> Header:
        """The header by name."""
        return Header(*self.header.tolist())


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The samples of one window, all ranks' shares together."""

    samples: tuple[Sample, ...]
    rows: int
    size: int | None
    pad_id: int
    counts: Counts
    notes: tuple[str, ...]
    """What was wrong with rows that were skipped."""
    problem: str
    """Why the run cannot go on; empty when it can."""


Gather = Callable[[Packed], Sequence[Packed]]


def pack(share: Share, pad_id: int, size: int | None) -> Packed:
    """A share in the form that travels."""
    text = json.dumps([share.problem, *share.notes]).encode()
    lengths = [len(sample) for sample in share.samples]
    counts = share.counts
    header = Header(
        epoch=share.epoch, row=share.row, rows=counts.rows, size=-1 if size is None else size, pad_id=pad_id,
        samples=len(lengths), tokens=sum(lengths), text=len(text), problem_at=share.problem_at,
        bad=counts.bad, truncated=counts.truncated, split=counts.split, dropped=counts.dropped,
    )  # fmt: skip
    parts = [np.asarray(share.places, dtype=np.int32), np.asarray(lengths, dtype=np.int32)]
    parts += [(2 * sample.ids + sample.trained).astype(np.int32) for sample in share.samples]
    parts.append(np.frombuffer(text, dtype=np.uint8).astype(np.int32))
    return Packed(header=torch.tensor(header, dtype=torch.int64), body=torch.from_numpy(np.concatenate(parts)))


def merge(shares: Sequence[Packed]) -> Window:
    """The window that all ranks' shares make together; the order does not depend on how many ranks there are."""
    placed: list[tuple[int, Sample]] = []
    notes: list[tuple[int, str]] = []
    problems: list[tuple[int, str]] = []
    counts = Counts()
    numbers = [share.numbers for share in shares]
    for rank, (share, head) in enumerate(zip(shares, numbers, strict=True)):
        body = share.body.numpy()
        places, lengths = body[: head.samples], body[head.samples : 2 * head.samples]
        tokens = body[2 * head.samples : 2 * head.samples + head.tokens]
        ends = np.cumsum(lengths)
        for place, start, end in zip(places.tolist(), (ends - lengths).tolist(), ends.tolist(), strict=True):
            part = tokens[start:end]
            placed.append((place, Sample(name="", ids=part >> 1, trained=(part & 1).astype(np.bool_))))
        text = body[2 * head.samples + head.tokens :][: head.text].astype(np.uint8).tobytes()
        problem, *skipped = json.loads(text)
        notes += [(rank, note) for note in skipped]
        if head.problem_at >= 0:
            problems.append((head.problem_at, problem))
        counts.add(Counts(rows=head.rows, bad=head.bad, truncated=head.truncated, split=head.split,
                          dropped=head.dropped))  # fmt: skip
    placed.sort(key=lambda pair: pair[0])  # stable: pieces of one row stay in order
    return Window(
        samples=tuple(sample for _, sample in placed),
        rows=counts.rows,
        size=None if numbers[0].size < 0 else numbers[0].size,
        pad_id=numbers[0].pad_id,
        counts=counts,
        notes=tuple(note for _, note in notes),
        problem=min(problems)[1] if problems else "",
    )


def alone(own: Packed) -> Sequence[Packed]:
    """The exchange of a run of one."""
    return (own,)


def over_ranks(own: Packed) -> Sequence[Packed]:
    """Every rank's share, in the order of ranks. All ranks call it for the same window."""
    world = dist.get_world_size()
    headers = [torch.empty_like(own.header) for _ in range(world)]
    dist.all_gather(headers, own.header)
    numbers = [Header(*header.tolist()) for header in headers]
    sizes = [2 * head.samples + head.tokens + head.text for head in numbers]
    padded = torch.zeros(max(sizes), dtype=torch.int32)
    padded[: len(own.body)] = own.body
    bodies = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(bodies, padded)
    return tuple(
        Packed(header=header, body=body[:size]) for header, body, size in zip(headers, bodies, sizes, strict=True)
    )
