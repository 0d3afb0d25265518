"""What is trained on and what is masked? `--audit-data` shows samples as the model will see them.

Trained text is green and underlined, masked text is grey; without colours, trained text stands in [[ ]].
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kernelguard_train.chat import Sample
from kernelguard_train.config import Config
from kernelguard_train.errors import DataError
from kernelguard_train.packing import plan
from kernelguard_train.samples import open_samples

_TRAINED, _MASKED, _OFF = "\x1b[4;32m", "\x1b[90m", "\x1b[0m"


def runs(sample: Sample) -> Iterator[tuple[bool, list[int]]]:
    """Stretches of tokens that are all trained or all masked."""
    pairs = zip(sample.trained.tolist(), sample.ids.tolist(), strict=True)
    for trained, group in itertools.groupby(pairs, key=lambda pair: pair[0]):
        yield trained, [token for _, token in group]


def audit(config: Config, vocabulary: int, count: int, *, colour: bool) -> Iterator[str]:
    """The first `count` samples as text, then what the first window looks like as batches.

    Raises:
        DataError: when the source is synthetic, which has no text.
    """
    samples = open_samples(config, vocabulary)
    if samples.chat is None:
        raise DataError("a synthetic source has no text to show")
    share = samples.share(0, 0)
    if share.problem:
        raise DataError(share.problem)
    window, counts = share.samples, share.counts
    for sample in window[:count]:
        yield f"--- {sample.name}: {len(sample)} tokens, {int(sample.trained.sum())} trained"
        text = ""
        for trained, ids in runs(sample):
            part = samples.chat.tokenizer.decode(ids)
            if colour:
                text += f"{_TRAINED if trained else _MASKED}{part}{_OFF}"
            else:
                text += f"[[{part}]]" if trained else part
        yield text
    groups = plan([len(s) for s in window], config.batch.tokens, config.batch.mode, (config.train.seed, 0, 0))
    tokens = sum(len(sample) for sample in window)
    answers = sum(int(sample.trained.sum()) for sample in window)
    yield (
        f"--- {counts.rows} rows: {len(window)} samples, {counts.bad} bad, {counts.truncated} truncated, "
        f"{counts.split} split, {counts.dropped} dropped; "
        f"{tokens} tokens, {100 * answers / max(1, tokens):.1f} % trained; "
        f"{len(groups)} batches of {config.batch.tokens}"
    )
