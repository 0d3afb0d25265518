"""Which batches does this rank train on at each step, and where does the run stand?

Every rank has the same samples of each window (they share the tokenising, see `exchange`), makes the same plan, and
takes its share of the batches. So all ranks have equally many steps, the order does not depend on how many ranks there
are, and three numbers say where the run stands.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch.utils.data import DataLoader, IterableDataset

from kernelguard_train.batches import Batch, make_batch
from kernelguard_train.chat import Sample
from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError, DataError
from kernelguard_train.exchange import Gather, Packed, Window, alone, merge, over_ranks, pack
from kernelguard_train.packing import plan
from kernelguard_train.samples import UNSHOWN_AFTER, Counts, Share, open_samples

log = logging.getLogger("kernelguard_train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where the run stands in the data, to the batch: which window comes next, and how much of it is used."""

    epoch: int = 0
    row: int = 0
    batches: int = 0

    def to_dict(self) -> dict[str, int]:
        """As it is kept in a checkpoint."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What this rank trains on in one optimizer step."""

    batches: tuple[Batch, ...]
    after: Position
    """Where the run stands once this step is done."""
    progress: float | None
    """Part of all epochs that is read after this step; None for a stream."""
    counts: Counts


def batches_per_step(config: Config, world: int) -> int:
    """Batches of all ranks together in one optimizer step.

    Raises:
        ConfigError: when the ranks cannot share them evenly.
    """
    total = config.batch.per_step or world
    if total % world:
        raise ConfigError(
            f"batch.per_step = {total} cannot be shared by {world} ranks; "
            f"use {max(1, total // world) * world} or {(total // world + 1) * world}, or another number of ranks"
        )
    return total


class Shares(IterableDataset["Packed"]):
    """A rank's shares of all windows from a position on. Pickled, it opens everything in the process that reads."""

    def __init__(self, config: Config, vocabulary: int, rank: int, world: int, start: Position) -> None:
        super().__init__()
        self.config, self.vocabulary, self.rank, self.world, self.start = config, vocabulary, rank, world, start

    def __iter__(self) -> Iterator[Packed]:
        epoch, row = self.start.epoch, self.start.row
        try:
            samples = open_samples(self.config, self.vocabulary)
        except DataError as error:
            # As a value: torch would bury its text in the traceback of another process.
            empty = Share(epoch=epoch, row=row, samples=(), places=(), counts=Counts(), notes=(), problem=str(error),
                          problem_at=0)  # fmt: skip
            yield pack(empty, 0, None)
            return
        window = self.config.batch.window
        quota = len(range(self.rank, window, self.world))
        while self.config.train.steps or epoch < self.config.train.epochs:
            share = samples.share(epoch, row, self.rank, self.world)
            yield pack(share, samples.pad_id, samples.size)
            if share.problem:
                return
            # A share that is not full shows that the epoch has ended; one that is leaves it to the next to show.
            epoch, row = (epoch, row + window) if share.counts.rows == quota else (epoch + 1, 0)


def steps(
    config: Config,
    shares: Iterable[Packed],
    gather: Gather,
    *,
    rank: int,
    world: int,
    start: Position,
    finish: Callable[[Batch], Batch] = lambda batch: batch,
) -> Iterator[Step]:
    """The steps of one rank, from its shares and, through `gather`, those of the others.

    Raises:
        DataError: on all ranks alike, for what any of them found.
    """
    per_step = batches_per_step(config, world)
    counts = Counts()
    group: list[Batch] = []
    seen = 0
    after, progress, pad_id = start, None, 0
    for index, (members, after, progress, pad_id) in enumerate(_plan(config, iter(shares), start, gather, counts)):
        if index % world == rank:
            group.append(finish(make_batch(members, config.batch.tokens, pad_id, config.batch.mode)))
        seen = (index + 1) % per_step
        if seen == 0:
            yield Step(batches=tuple(group), after=after, progress=progress, counts=replace(counts))
            group = []
    if seen:
        # The last step is rarely full. Nothing is dropped: ranks that are left without a batch train on padding.
        missing = per_step // world - len(group)
        group += [finish(make_batch([], config.batch.tokens, pad_id, config.batch.mode))] * missing
        yield Step(batches=tuple(group), after=after, progress=progress, counts=replace(counts))


def _plan(
    config: Config, shares: Iterator[Packed], start: Position, gather: Gather, counts: Counts
) -> Iterator[tuple[list[Sample], Position, float | None, int]]:
    """Every batch of the run in order: its samples, where the run stands after it, and the padding's id."""
    position = start
    while config.train.steps or position.epoch < config.train.epochs:
        window = merge(gather(_own(shares, position)))
        counts.add(window.counts)
        _judge(config, window, counts)
        if not window.rows:
            if position.row == 0:
                raise DataError(f"data.path: {config.data.path} has no rows")
            position = Position(epoch=position.epoch + 1)
            continue
        following = Position(epoch=position.epoch, row=position.row + window.rows)
        if window.size == following.row or window.rows < config.batch.window:
            following = Position(epoch=position.epoch + 1)
        seed = (config.train.seed, position.epoch, position.row)
        lengths = [len(sample) for sample in window.samples]
        groups = plan(lengths, config.batch.tokens, config.batch.mode, seed) if lengths else []
        for number in range(position.batches, len(groups)):
            last = number + 1 == len(groups)
            after = following if last else replace(position, batches=number + 1)
            part = position.row + window.rows * (number + 1) / len(groups)
            progress = (position.epoch + part / window.size) / config.train.epochs if window.size else None
            yield [window.samples[i] for i in groups[number]], after, progress, window.pad_id
        position = following


def _own(shares: Iterator[Packed], position: Position) -> Packed:
    """This rank's share of the window at a position.

    Shares of windows that turned out to lie behind the end of an epoch are passed over: a rank whose share of the last
    window was full could not know that it was the last.
    """
    share = None
    for share in shares:
        if (share.numbers.epoch, share.numbers.row) == (position.epoch, position.row):
            return share
    if share is None or share.numbers.problem_at < 0:
        raise DataError(f"the data end before epoch {position.epoch}, row {position.row}")
    return share


def _judge(config: Config, window: Window, counts: Counts) -> None:
    """Tells of skipped rows, and ends the run where the policy says so.

    Raises:
        DataError: the same on all ranks.
    """
    if window.problem:
        raise DataError(window.problem)
    if counts.bad > config.data.max_bad_rows:
        raise DataError(
            f"more than data.max_bad_rows = {config.data.max_bad_rows} bad rows; one of the last: {window.notes[-1]}"
        )
    if counts.bad - window.counts.bad < UNSHOWN_AFTER:
        for note in window.notes[:UNSHOWN_AFTER]:
            log.warning("skipped: %s", note)
    if counts.rows >= (window.size or 0) and 0 < counts.bad == counts.rows:
        raise DataError(f"data.path: none of the {counts.rows} rows can be trained on")


def _end_with(parent: int, _worker: int) -> None:
    """Ends a process that prepares samples for one that is gone.

    torch's own look at that begins only now, and what was gone before, while this process imported, it never notices.
    """
    if os.getppid() != parent:
        os._exit(0)


def load_steps(
    config: Config, vocabulary: int, *, rank: int, world: int, start: Position, device: torch.device
) -> Iterator[Step]:
    """The steps of this rank; its share is prepared ahead in a process of its own where `data.workers` says so.

    That process starts here, and imports for seconds: called before the model is made, this costs no time. All ranks
    take their steps together: at the beginning of a window they exchange what they have tokenised.

    Raises:
        ConfigError: when there are more ranks than rows in a window.
        DataError: from the iterator, when the data are unusable.
    """
    if config.batch.window < world:
        raise ConfigError(f"batch.window = {config.batch.window} rows cannot be shared by {world} ranks")
    workers = config.data.workers
    loader = DataLoader(
        Shares(config, vocabulary, rank, world, start),
        batch_size=None,
        num_workers=workers,
        # A forked child of a process that uses CUDA, or threads, may hang.
        multiprocessing_context="spawn" if workers else None,
        prefetch_factor=2 if workers else None,
        worker_init_fn=partial(_end_with, os.getpid()),
    )
    finish = Batch.pin_memory if device.type == "cuda" else lambda batch: batch
    gather = over_ranks if world > 1 else alone
    return steps(config, iter(loader), gather, rank=rank, world=world, start=start, finish=finish)
