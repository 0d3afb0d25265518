"""Does the first real batch carry the boundary signals that its content needs? Row 17 of docs/guard.md.

A packed row holds several samples. Attention can tell them apart by positions; a recurrent layer knows only what it is
told, and without it carries its state, silently, from one sample into the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelguard.guard.expectation import Expectation, Finding

SIGNAL_OF_ARGUMENT = {"seq_idx": "seq_idx", "cu_seqlens": "cu_seq_lens_q"}
"""How the models name, in their own keyword arguments, what a kernel calls otherwise."""
_MASKED_ATTENTION = frozenset({"sdpa", "eager"})
"""Attention that keeps samples apart by a mask, and only by that."""


@dataclass
class Seen:
    """What the layers of the first batch were called with."""

    input_ids: Any = None
    position_ids: Any = None
    mixer: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a recurrent layer."""
    mixers: int = 0
    attention: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of an attention layer."""
    mixer_got_cache: bool = False


def starts_of(position_ids: Any) -> tuple[int, ...]:
    """Where samples begin in the first row of [B, T] positions (or [3, B, T]); `(0,)` is one sample.

    A position 0 begins a sample when the tokens before it count up from one; padding on the left does not.
    """
    ids = position_ids
    while ids.dim() > 1:
        ids = ids[0]
    row = [int(i) for i in ids.tolist()]
    starts = [0]
    for t in range(1, len(row)):
        if row[t] == 0 and row[t - 1] == t - 1 - starts[-1]:
            starts.append(t)
    return tuple(starts)


def judge_batch(
    seen: Seen, expected: Expectation, needed: Iterable[str], attention: str, eos: Iterable[int] = ()
) -> Iterator[Finding]:
    """What the first batch lacks. `needed`: the signals that the model's recurrent kernels can be told by."""
    starts = _starts(seen)
    packed = starts is not None and len(starts) > 1
    # The others that a run sends (cu_seq_lens_k, the longest sample) are for its attention.
    told = [signal for signal in expected.signals if signal in SIGNAL_OF_ARGUMENT.values()]
    needed = tuple(dict.fromkeys((*needed, *told))) if seen.mixers else ()
    if not packed:
        yield from _not_seen_as_packed(seen, expected, needed, starts, tuple(eos))
        return
    lacking = [name for name in needed if seen.mixer.get(name) is None]
    count = len(starts or ())
    if lacking:
        what = f"the first batch has {count} samples in a row, and the recurrent layers are not given "
        what += f"{' and '.join(lacking)}: state leaks from sample to sample"
        yield Finding("packing-signal-missing", "fail", what, f"send {', '.join(needed)} with every batch")
    yield from _consistent(seen.mixer, starts or (0,), needed)
    yield from _attention(seen.attention, starts or (0,), attention)


def _starts(seen: Seen) -> tuple[int, ...] | None:
    """Sample starts from whatever says them, positions first; None: nothing does."""
    if seen.position_ids is not None:
        starts = starts_of(seen.position_ids)
        if len(starts) > 1:
            return starts
    for name in ("cu_seq_lens_q", "cu_seqlens"):
        cuts = seen.mixer.get(name, seen.attention.get(name))
        if cuts is not None and len(cuts) > 2:
            return tuple(int(c) for c in cuts.tolist()[:-1])
    numbers = seen.mixer.get("seq_idx")
    if numbers is not None and int(numbers.max()) > 0:
        return _starts_of_numbers(numbers)
    return (0,) if seen.position_ids is not None else None


def _starts_of_numbers(seq_idx: Any) -> tuple[int, ...]:
    row = seq_idx[0].tolist()
    return (0, *(t for t in range(1, len(row)) if row[t] != row[t - 1]))


def _not_seen_as_packed(
    seen: Seen, expected: Expectation, needed: tuple[str, ...], starts: tuple[int, ...] | None, eos: tuple[int, ...]
) -> Iterator[Finding]:
    """Nothing says that there are several samples. Is that so, or was it not said?"""
    ends = _inner_ends(seen.input_ids, eos)
    if expected.packed and seen.mixers:
        lacking = [name for name in needed if seen.mixer.get(name) is None]
        if lacking:
            yield Finding("packing-signal-missing", "fail", f"this run packs samples, and its first batch carries no "
                          f"{' and no '.join(lacking)}", f"send {', '.join(needed)} with every batch")  # fmt: skip
    elif ends and expected.packed is None and seen.mixers:
        what = (
            f"the first row has {ends} ends of text inside it and no boundary signal: if these are different samples, "
        )
        what += "state leaks between them"
        yield Finding("packing-not-said", "warn", what, f"send {', '.join(needed)}")
    del starts


def _inner_ends(input_ids: Any, eos: tuple[int, ...]) -> int:
    """How many end tokens stand before the last one of a row's text, runs of them (padding) counted once."""
    if input_ids is None or not eos or input_ids.dim() != 2:
        return 0
    row = input_ids[0].tolist()
    while row and row[-1] in eos:
        row.pop()
    return sum(1 for t, token in enumerate(row) if token in eos and (t == 0 or row[t - 1] not in eos))


def _consistent(given: Mapping[str, Any], starts: tuple[int, ...], needed: tuple[str, ...]) -> Iterator[Finding]:
    """Signals that are there have to say the same, in the form that the kernels read."""
    cuts = given.get("cu_seq_lens_q")
    if cuts is not None and "cu_seq_lens_q" in needed:
        values = [int(c) for c in cuts.tolist()]
        if any(b <= a for a, b in zip(values, values[1:])):
            what = "cu_seq_lens_q does not grow strictly: an empty sample crashes or poisons the delta rule"
            yield Finding("packing-signal-wrong", "fail", what, "leave empty samples out; make padding one segment")
        elif tuple(values[:-1]) != starts:
            what = f"cu_seq_lens_q begins samples at {values[:-1][:8]}, the positions at {list(starts[:8])}"
            yield Finding("packing-signal-wrong", "fail", what, "make both from the same lengths")
    numbers = given.get("seq_idx")
    if numbers is not None and "seq_idx" in needed:
        if "int32" not in str(numbers.dtype):
            yield Finding("packing-signal-wrong", "fail", f"seq_idx is {numbers.dtype}: the kernel reads int32")
        if _starts_of_numbers(numbers) != starts:
            yield Finding("packing-signal-wrong", "fail", "seq_idx changes elsewhere than the positions begin anew",
                          "make both from the same lengths")  # fmt: skip


def _attention(given: Mapping[str, Any], starts: tuple[int, ...], attention: str) -> Iterator[Finding]:
    """Masked attention without a mask between samples: 3-D positions or an all-ones mask lead there."""
    if attention not in _MASKED_ATTENTION or not given:
        return
    mask = given.get("attention_mask")
    second = starts[1]
    if mask is None:
        leaks = True
    elif getattr(mask, "dim", lambda: 0)() == 4 and mask.shape[-1] > second and mask.shape[-2] > second:
        value = mask[0, 0, second, 0]
        leaks = bool(value) if "bool" in str(mask.dtype) else float(value) == 0.0
    else:
        return
    if leaks:
        what = f"{attention} attention got no mask between the samples of a packed row"
        fix = "2-D position_ids that begin anew in each sample, and attention_mask=None"
        yield Finding("attention-across-samples", "fail", what, fix)
