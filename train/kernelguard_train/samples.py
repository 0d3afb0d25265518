"""Which samples does the run train on, and what became of the others?

Rows become samples here, one at a time: conversations are tokenised and masked, and the policies for malformed rows
and for samples that are too long are carried out and counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kernelguard_train.chat import Chat, Sample, load_chat
from kernelguard_train.config import Config
from kernelguard_train.errors import DataError
from kernelguard_train.packing import cut
from kernelguard_train.source import Row, Source, open_source

UNSHOWN_AFTER = 20
"""Of each window, skipped rows are named up to this many; all are counted."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of rows."""

    rows: int = 0
    bad: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    """Too long by the policy `drop`, or left without a trained token by truncating."""

    def add(self, more: Counts) -> None:
        """Adds what became of other rows."""
        for name in ("rows", "bad", "truncated", "split", "dropped"):
            setattr(self, name, getattr(self, name) + getattr(more, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Synthetic:
    """Random tokens with lengths as UltraChat-200k has them. For measuring speed."""

    samples: int
    median: int
    longest: int
    vocabulary: int
    trained: float
    seed: int

    @property
    def size(self) -> int:
        """Samples of an epoch."""
        return self.samples

    def rows(self, epoch: int, start: int, step: int = 1) -> Iterator[Row]:
        """Rows without content; `encode` draws it from their name."""
        yield from (Row(name=f"synthetic {epoch}.{i}", content={}) for i in range(start, self.samples, step))

    def encode(self, name: str) -> Sample:
        """The sample of that name, the same in every process."""
        epoch, index = (int(part) for part in name.removeprefix("synthetic ").split("."))
        draw = np.random.default_rng((self.seed, epoch, index))
        length = int(np.clip(draw.lognormal(math.log(self.median), 0.33), 16, self.longest))
        return Sample(
            name=name,
            ids=draw.integers(0, self.vocabulary, length, dtype=np.int64),
            trained=np.arange(length) >= round(length * (1 - self.trained)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a rank made of its rows of one window."""

    epoch: int
    row: int
    """Where the window begins."""
    samples: tuple[Sample, ...]
    places: tuple[int, ...]
    """For each sample, which row of the window it comes from."""
    counts: Counts
    notes: tuple[str, ...]
    """What is wrong with the rows that were skipped, of the first few."""
    problem: str = ""
    """Why the run cannot go on."""
    problem_at: int = -1
    """The row of the window where that was found."""


@dataclass(slots=True, kw_only=True)
class Samples:
    """The samples of the run, in the same order in every process that reads them."""

    config: Config
    source: Source
    chat: Chat | None
    pad_id: int

    @property
    def size(self) -> int | None:
        """Rows of an epoch, where that is known."""
        return self.source.size

    def share(self, epoch: int, row: int, rank: int = 0, world: int = 1) -> Share:
        """Every `world`-th of the next `batch.window` rows from a position on, beginning with the `rank`-th.

        A row that stops the run by policy becomes the share's problem: it is for all ranks to raise it together.
        """
        samples: list[Sample] = []
        places: list[int] = []
        notes: list[str] = []
        counts = Counts()
        place = rank
        problem = ""
        try:
            for found in self.source.rows(epoch, row + rank, world):
                if place >= self.config.batch.window:
                    break
                counts.rows += 1
                try:
                    sample = self._encoded(found)
                except DataError as error:
                    counts.bad += 1
                    if self.config.data.bad_rows == "stop":
                        raise DataError(f"{error} (data.bad_rows=skip trains without such rows)") from error
                    if len(notes) < UNSHOWN_AFTER:
                        notes.append(str(error))
                else:
                    kept = self._fitted(sample, counts)
                    samples += kept
                    places += [place] * len(kept)
                place += world
        except DataError as error:
            problem = str(error)
        return Share(
            epoch=epoch, row=row, samples=tuple(samples), places=tuple(places), counts=counts, notes=tuple(notes),
            problem=problem, problem_at=place if problem else -1,
        )  # fmt: skip

    def _encoded(self, row: Row) -> Sample:
        if isinstance(self.source, Synthetic):
            return self.source.encode(row.name)
        if row.content is None:
            raise DataError(f"{row.name}: {row.problem}")
        column = self.config.data.column
        if column not in row.content:
            raise DataError(f"{row.name}: no column {column!r} (data.column); it has {', '.join(row.content)}")
        if self.chat is None:
            raise TypeError("conversations need a tokenizer")
        return self.chat.encode(row.name, row.content[column])

    def _fitted(self, sample: Sample, counts: Counts) -> list[Sample]:
        """The sample, or what the policy makes of one that is too long."""
        longest = self.config.max_length
        if len(sample) <= longest:
            return [sample]
        policy = self.config.data.too_long
        if policy == "error":
            raise DataError(f"{sample.name}: {len(sample)} tokens, more than {longest} (data.too_long = error)")
        if policy == "drop":
            counts.dropped += 1
            return []
        if policy == "truncate":
            counts.truncated += 1
            pieces = [(0, longest)]
        else:
            counts.split += 1
            pieces = cut(len(sample), longest)
        kept = [replace(sample, ids=sample.ids[a:b], trained=sample.trained[a:b]) for a, b in pieces]
        # The first token of a piece has nothing before it to be predicted from.
        kept = [piece for piece in kept if piece.trained[1:].any()]
        if not kept:
            counts.dropped += 1
        return kept


def load_tokenizer(config: Config) -> Any:
    """The tokenizer of the run.

    Raises:
        DataError: when there is none to be loaded.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - the synthetic source does without

    name = config.model.tokenizer or config.model.path
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"no tokenizer at {name} (model.tokenizer): {error}") from error


def open_samples(config: Config, vocabulary: int) -> Samples:
    """The samples that the configuration describes, for a model with that many embeddings.

    Raises:
        DataError: when source, tokenizer or template are unusable, or the tokenizer has ids the model lacks.
    """
    if config.data.path == "synthetic":
        synthetic = Synthetic(
            samples=config.data.synthetic_samples,
            median=config.data.synthetic_median,
            longest=config.max_length,
            vocabulary=vocabulary,
            trained=config.data.synthetic_trained,
            seed=config.train.seed,
        )
        return Samples(config=config, source=synthetic, chat=None, pad_id=0)
    tokenizer = load_tokenizer(config)
    if len(tokenizer) > vocabulary:
        raise DataError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {vocabulary} embeddings: "
            "they do not belong together"
        )
    chat = load_chat(tokenizer, config.data.chat_template)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (tokenizer.eos_token_id or 0)
    return Samples(config=config, source=open_source(config.data, config.train.seed), chat=chat, pad_id=pad)
