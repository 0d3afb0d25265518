"""Which kernels are the trainer's own? Two that move data and that nobody else has in this form, in Triton.

Cross entropy and its gradient in place of the logits: three passes over memory, where compiled torch takes six. And the
short convolution of a gated delta layer that starts anew at every sample and writes query, key and value where the next
kernel wants them, so that nothing is split, copied or put together again. Both have a torch twin below, which is what
runs on a CPU and what the tests hold them to.
"""

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch.autograd import Function


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(logits, targets, losses, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * size
    columns = tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    own = tl.load(start + target).to(tl.float32)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, size, BLOCK):
        x = tl.load(start + at + columns, mask=at + columns < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, x)
        # A lane that has only seen what lies outside the row stays at minus infinity, and inf - inf is not a number.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(top - base) + tl.exp(x - base)
        top = higher
    most = tl.max(top, axis=0)
    log_sum = most + tl.log(tl.sum(total * tl.exp(top - most), axis=0))
    tl.store(losses + row, log_sum - own)
    for at in range(0, size, BLOCK):
        place = at + columns
        x = tl.load(start + place, mask=place < size, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(x - log_sum) - tl.where(place == target, 1.0, 0.0)
        tl.store(start + place, gradient.to(logits.dtype.element_ty), mask=place < size)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss of `logits` `[rows, size]`, and its gradient, which takes the logits' place in memory."""
    rows, size = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _cross_entropy[(rows,)](logits, targets, losses, size, BLOCK=4096, num_warps=8)
    return losses.sum(), logits


@triton.jit
def _before(x, numbers, row, step, length, mine, channels, width):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
    """Rows `row - step` of x where they are of the same sample, otherwise 0; float32. A negative step looks ahead."""
    other = row - step
    inside = (other >= 0) & (other < length) & (row < length)
    same = tl.load(numbers + other, mask=inside, other=-1) == mine
    place = other.to(tl.int64)[:, None] * width + channels[None, :]
    return tl.load(x + place, mask=(inside & same)[:, None], other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    x, weight, numbers, first, second, third, length, key, width,  # noqa: ANN001
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * COLUMNS
    channels = begin + tl.arange(0, COLUMNS)
    mine = tl.load(numbers + row, mask=row < length, other=-2)
    z = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in tl.static_range(4):
        w = tl.load(weight + channels * 4 + 3 - step).to(tl.float32)
        z += w[None, :] * _before(x, numbers, row, step, length, mine, channels, width)
    y = z * tl.sigmoid(z)
    if begin < key:
        target, offset, stride = first, 0, key
    elif begin < 2 * key:
        target, offset, stride = second, key, key
    else:
        target, offset, stride = third, 2 * key, width - 2 * key
    place = row.to(tl.int64)[:, None] * stride + (channels - offset)[None, :]
    tl.store(target + place, y.to(x.dtype.element_ty), mask=(row < length)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _convolve_slopes(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    x, weight, numbers, first, second, third, slopes, to_weight, length, key, width,  # noqa: ANN001
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Gradients before the silu, and each block of rows' part of the weight's gradient."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(1) * COLUMNS
    channels = begin + tl.arange(0, COLUMNS)
    if begin < key:
        source, offset, stride = first, 0, key
    elif begin < 2 * key:
        source, offset, stride = second, key, key
    else:
        source, offset, stride = third, 2 * key, width - 2 * key
    mine = tl.load(numbers + row, mask=row < length, other=-2)
    x0 = _before(x, numbers, row, 0, length, mine, channels, width)
    x1 = _before(x, numbers, row, 1, length, mine, channels, width)
    x2 = _before(x, numbers, row, 2, length, mine, channels, width)
    x3 = _before(x, numbers, row, 3, length, mine, channels, width)
    w0 = tl.load(weight + channels * 4 + 3).to(tl.float32)[None, :]
    w1 = tl.load(weight + channels * 4 + 2).to(tl.float32)[None, :]
    w2 = tl.load(weight + channels * 4 + 1).to(tl.float32)[None, :]
    w3 = tl.load(weight + channels * 4).to(tl.float32)[None, :]
    z = w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3
    place = row.to(tl.int64)[:, None] * stride + (channels - offset)[None, :]
    slope = tl.load(source + place, mask=(row < length)[:, None], other=0.0).to(tl.float32)
    bell = tl.sigmoid(z)
    slope *= bell * (1 + z * (1 - bell))
    place = row.to(tl.int64)[:, None] * width + channels[None, :]
    tl.store(slopes + place, slope.to(x.dtype.element_ty), mask=(row < length)[:, None])
    # Added up afterwards, in an order that is always the same.
    part = to_weight + tl.program_id(0).to(tl.int64) * 4 * width + channels
    tl.store(part, tl.sum(slope * x3, axis=0))
    tl.store(part + width, tl.sum(slope * x2, axis=0))
    tl.store(part + 2 * width, tl.sum(slope * x1, axis=0))
    tl.store(part + 3 * width, tl.sum(slope * x0, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _convolve_back(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    slopes, weight, numbers, to_x, length, width,  # noqa: ANN001
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Each input's gradient: of the outputs at its own and the three later places of the same sample."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channels = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mine = tl.load(numbers + row, mask=row < length, other=-2)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for ahead in tl.static_range(4):
        w = tl.load(weight + channels * 4 + 3 - ahead).to(tl.float32)
        total += w[None, :] * _before(slopes, numbers, row, -ahead, length, mine, channels, width)
    place = row.to(tl.int64)[:, None] * width + channels[None, :]
    tl.store(to_x + place, total.to(to_x.dtype.element_ty), mask=(row < length)[:, None])


ROWS, COLUMNS = 32, 128


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, key: int) -> Any:
        length, width = x.shape[1:]
        x, weight = x.contiguous(), weight.contiguous()
        outputs = [x.new_empty(1, length, size) for size in (key, key, width - 2 * key)]
        grid = (triton.cdiv(length, ROWS), width // COLUMNS)
        _convolve[grid](x, weight, numbers, *outputs, length, key, width, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=4)
        ctx.save_for_backward(x, weight, numbers)
        ctx.key = key
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, weight, numbers = ctx.saved_tensors
        length, width = x.shape[1:]
        slopes = [gradient.contiguous() for gradient in gradients]
        before, to_x = torch.empty_like(x), torch.empty_like(x)
        grid = (triton.cdiv(length, ROWS), width // COLUMNS)
        parts = torch.empty(grid[0], 4, width, dtype=torch.float32, device=x.device)
        sizes = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
        _convolve_slopes[grid](x, weight, numbers, *slopes, before, parts, length, ctx.key, width, **sizes)
        _convolve_back[grid](before, weight, numbers, to_x, length, width, **sizes)
        return to_x, parts.sum(0).T.to(weight.dtype).contiguous(), None, None


def convolution_suits(weight: torch.Tensor, key: int) -> bool:
    """Whether the kernel takes a weight `[channels, 4]` of which twice `key` channels are queries and keys."""
    return weight.shape[1] == 4 and key % COLUMNS == 0 and weight.shape[0] % COLUMNS == 0


def convolution(
    x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, key: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The silu of a causal convolution over `x` `[1, tokens, channels]` that starts anew at every sample.

    Args:
        x: Queries, keys and values side by side.
        weight: `[channels, 4]`.
        numbers: int32 `[1, tokens]`, which sample each token is of.
        key: Channels of the queries, and of the keys.

    Returns:
        Queries, keys and values, each contiguous.
    """
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _Convolution.apply(x, weight, numbers, key)  # type: ignore[no-untyped-call]
    return outputs
