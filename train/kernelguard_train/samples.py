"""Which samples does the run train on, and what became of the others?

Rows become samples here, one at a time: conversations are tokenised and masked, and the policies for malformed rows
and for samples that are too long are carried out and counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kernelguard_train.chat import Chat, Sample, load_chat
from kernelguard_train.config import Config
from kernelguard_train.errors import DataError
from kernelguard_train.packing import cut
from kernelguard_train.source import Row, Source, open_source

log = logging.getLogger("kernelguard_train")
UNSHOWN_AFTER = 20
"""Skipped rows are named up to this many; all are counted."""


@dataclass(slots=True, kw_only=True)
class Counts:
    """What became of the rows, since the start of this process."""

    rows: int = 0
    bad: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    """Too long by the policy `drop`, or left without a trained token by truncating."""


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


@dataclass(slots=True, kw_only=True)
class Samples:
    """The samples of the run, in the same order in every process that reads them."""

    config: Config
    source: Source
    chat: Chat | None
    pad_id: int
    counts: Counts = field(default_factory=Counts)

    @property
    def size(self) -> int | None:
        """Rows of an epoch, where that is known."""
        return self.source.size

    def window(self, epoch: int, row: int) -> tuple[list[Sample], int]:
        """The samples of the next `batch.window` rows from a position on, and how many rows that were.

        Raises:
            DataError: for a bad row, where the policy says stop; the row is named.
        """
        samples: list[Sample] = []
        rows = 0
        for found in self.source.rows(epoch, row):
            rows += 1
            self.counts.rows += 1
            try:
                sample = self._encoded(found)
            except DataError as error:
                self._bad(error)
            else:
                samples += self._fitted(sample)
            if rows == self.config.batch.window:
                break
        return samples, rows

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

    def _bad(self, error: DataError) -> None:
        self.counts.bad += 1
        if self.config.data.bad_rows == "stop":
            raise DataError(f"{error} (data.bad_rows=skip trains without such rows)") from error
        if self.counts.bad > self.config.data.max_bad_rows:
            raise DataError(
                f"more than data.max_bad_rows = {self.config.data.max_bad_rows} bad rows; the last: {error}"
            )
        if self.counts.bad <= UNSHOWN_AFTER:
            log.warning("skipped: %s", error)

    def _fitted(self, sample: Sample) -> list[Sample]:
        """The sample, or what the policy makes of one that is too long."""
        longest = self.config.max_length
        if len(sample) <= longest:
            return [sample]
        policy = self.config.data.too_long
        if policy == "error":
            raise DataError(f"{sample.name}: {len(sample)} tokens, more than {longest} (data.too_long = error)")
        if policy == "drop":
            self.counts.dropped += 1
            return []
        if policy == "truncate":
            self.counts.truncated += 1
            pieces = [(0, longest)]
        else:
            self.counts.split += 1
            pieces = cut(len(sample), longest)
        kept = [replace(sample, ids=sample.ids[a:b], trained=sample.trained[a:b]) for a, b in pieces]
        # The first token of a piece has nothing before it to be predicted from.
        kept = [piece for piece in kept if piece.trained[1:].any()]
        if not kept:
            self.counts.dropped += 1
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
