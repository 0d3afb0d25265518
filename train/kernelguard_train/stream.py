"""Which batches does this rank train on at each step, and where does the run stand?

Every rank walks through the same samples and makes the same plan, and takes its share of the batches. That costs each
rank the tokenising of the whole stream (a fraction of one core, in a process of its own), and buys what matters more:
all ranks have equally many steps without asking each other, the order does not depend on how many ranks there are, and
three numbers say where the run stands.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from kernelguard_train.batches import Batch, make_batch
from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError, DataError
from kernelguard_train.packing import plan
from kernelguard_train.samples import Counts, Samples, open_samples


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

    def pin_memory(self) -> Step:
        """Called by torch's DataLoader."""
        return replace(self, batches=tuple(batch.pin_memory() for batch in self.batches))


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


class Steps(IterableDataset["Step | DataError"]):
    """The steps of one rank from a position on. It can be pickled: everything is opened in the process that reads."""

    def __init__(self, config: Config, vocabulary: int, rank: int, world: int, start: Position) -> None:
        super().__init__()
        self.config, self.vocabulary, self.rank, self.world, self.start = config, vocabulary, rank, world, start

    def __iter__(self) -> Iterator[Step | DataError]:
        try:
            yield from self._steps(open_samples(self.config, self.vocabulary))
        except DataError as error:
            yield error  # as a value: torch would bury its text in the traceback of another process

    def _steps(self, samples: Samples) -> Iterator[Step]:
        per_step = batches_per_step(self.config, self.world)
        group: list[Batch] = []
        seen = 0
        after = self.start
        progress = None
        for index, (batch, after, progress) in enumerate(self._share(samples)):
            if index % self.world == self.rank:
                group.append(batch())
            seen = (index + 1) % per_step
            if seen == 0:
                yield self._step(group, after, progress, samples.counts)
                group = []
        if seen:
            # The last step is rarely full. Nothing is dropped: ranks that are left without a batch train on padding.
            missing = per_step // self.world - len(group)
            group += [self._batch(samples, [])] * missing
            yield self._step(group, after, progress, samples.counts)

    def _step(self, group: list[Batch], after: Position, progress: float | None, counts: Counts) -> Step:
        return Step(batches=tuple(group), after=after, progress=progress, counts=replace(counts))

    def _share(self, samples: Samples) -> Iterator[tuple[Any, Position, float | None]]:
        """Every batch of the run in order, not yet built, and where the run stands after it."""
        config, position = self.config, self.start
        while config.train.steps or position.epoch < config.train.epochs:
            window, rows = samples.window(position.epoch, position.row)
            if not rows:
                if position.row == 0:
                    raise DataError(f"data.path: {config.data.path} has no rows")
                position = Position(epoch=position.epoch + 1)
                continue
            following = Position(epoch=position.epoch, row=position.row + rows)
            if samples.size == following.row:
                following = Position(epoch=position.epoch + 1)
            seed = (config.train.seed, position.epoch, position.row)
            groups = plan([len(s) for s in window], config.batch.tokens, config.batch.mode, seed) if window else []
            for number in range(position.batches, len(groups)):
                last = number + 1 == len(groups)
                after = following if last else replace(position, batches=number + 1)
                part = position.row + rows * (number + 1) / len(groups)
                progress = (position.epoch + part / samples.size) / config.train.epochs if samples.size else None
                members = [window[i] for i in groups[number]]
                yield (lambda members=members: self._batch(samples, members)), after, progress
            if samples.counts.rows >= (samples.size or 0) and samples.counts.bad == samples.counts.rows:
                raise DataError(f"data.path: none of the {samples.counts.rows} rows can be trained on")
            position = following

    def _batch(self, samples: Samples, members: list[Any]) -> Batch:
        return make_batch(members, self.config.batch.tokens, samples.pad_id, self.config.batch.mode)


def load_steps(
    config: Config, vocabulary: int, *, rank: int, world: int, start: Position, device: torch.device
) -> Iterator[Step]:
    """The steps of this rank, prepared ahead in a process of their own where `data.workers` says so.

    Raises:
        DataError: from the iterator, when the data are unusable.
    """
    workers = config.data.workers
    loader = DataLoader(
        Steps(config, vocabulary, rank, world, start),
        batch_size=None,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        # A forked child of a process that uses CUDA, or threads, may hang.
        multiprocessing_context="spawn" if workers else None,
        prefetch_factor=4 if workers else None,
    )
    for item in loader:
        if isinstance(item, DataError):
            raise item
        yield item
