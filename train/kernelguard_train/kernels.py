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
def _row(place, row, length, PLAIN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """What lies at a row's place, as it is stored; zeros outside, which a plain strip does not reach."""
    return tl.load(place) if PLAIN else tl.load(place, mask=(row >= 0) & (row < length), other=0.0)


@triton.jit
def _number(numbers, row, length):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    return tl.load(numbers + row, mask=(row >= 0) & (row < length), other=-1)


@triton.jit
def _plain(numbers, start, length, ROWS: tl.constexpr, SPAN: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    """Whether a strip, and the three rows before and after it, all exist and are of one sample.

    Then nothing has to be masked or compared. With samples much longer than a strip, nearly every strip is plain.
    """
    row = start - 3 + tl.minimum(tl.arange(0, SPAN), ROWS + 5)
    found = tl.load(numbers + row, mask=(row >= 0) & (row < length), other=-1)
    others = tl.sum((found != tl.load(numbers + start)).to(tl.int32), axis=0)
    return (others == 0) & (start >= 3) & (start + ROWS + 3 <= length)


@triton.jit
def _sum(w0, w1, w2, w3, x0, x1, x2, x3):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, PLR0917
    return w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3


@triton.jit
def _sigmoid(z):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    # The square of a reciprocal root is three instructions less than a quotient; in the last bit they differ.
    root = tl.rsqrt(1 + tl.exp2(z * -1.4426950408889634))
    return root * root


@triton.jit
def _silu_slope(z, gradient):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    bell = _sigmoid(z)
    return gradient * bell * (1 + z * (1 - bell))


@triton.jit
def _taps(weight):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    """The weights of a row itself and of the three before it."""
    w0 = tl.load(weight + 3).to(tl.float32)
    w1 = tl.load(weight + 2).to(tl.float32)
    w2 = tl.load(weight + 1).to(tl.float32)
    w3 = tl.load(weight).to(tl.float32)
    return w0, w1, w2, w3


@triton.jit
def _walk_down(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    x, weight, numbers, target, start, length, stride,  # noqa: ANN001
    WIDTH: tl.constexpr, ROWS: tl.constexpr, UNROLL: tl.constexpr, PLAIN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The outputs of one strip, first row first, with the last three rows of x in registers."""
    w0, w1, w2, w3 = _taps(weight)
    at = x + start.to(tl.int64) * WIDTH
    x1 = _row(at - 1 * WIDTH, start - 1, length, PLAIN).to(tl.float32)
    x2 = _row(at - 2 * WIDTH, start - 2, length, PLAIN).to(tl.float32)
    x3 = _row(at - 3 * WIDTH, start - 3, length, PLAIN).to(tl.float32)
    n1, n2, n3 = -1, -1, -1
    if not PLAIN:
        n1 = _number(numbers, start - 1, length)
        n2 = _number(numbers, start - 2, length)
        n3 = _number(numbers, start - 3, length)
    for block in range(ROWS // UNROLL):
        top = start + block * UNROLL
        at, to = x + top.to(tl.int64) * WIDTH, target + top.to(tl.int64) * stride
        # All loads of a block are on their way before the first of its rows is computed.
        new, samples = (), ()
        for i in tl.static_range(UNROLL):
            new = new + (_row(at + i * WIDTH, top + i, length, PLAIN),)  # noqa: RUF005
            if not PLAIN:
                samples = samples + (_number(numbers, top + i, length),)  # noqa: RUF005
        for i in tl.static_range(UNROLL):
            row = top + i
            x0 = new[i].to(tl.float32)
            if PLAIN:
                z = _sum(w0, w1, w2, w3, x0, x1, x2, x3)
            else:
                n0 = samples[i]
                before1, before2 = tl.where(n1 == n0, x1, 0.0), tl.where(n2 == n0, x2, 0.0)
                z = _sum(w0, w1, w2, w3, x0, before1, before2, tl.where(n3 == n0, x3, 0.0))
                n1, n2, n3 = n0, n1, n2
            y = (z * _sigmoid(z)).to(target.dtype.element_ty)
            if PLAIN:
                tl.store(to + i * stride, y)
            else:
                tl.store(to + i * stride, y, mask=row < length)
            x1, x2, x3 = x0, x1, x2


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    x, weight, numbers, first, second, third, length, key,  # noqa: ANN001
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    begin = tl.program_id(0) * COLUMNS
    start = tl.program_id(1) * ROWS
    channels = begin + tl.arange(0, COLUMNS)
    if begin < key:
        target, offset, stride = first, 0, key
    elif begin < 2 * key:
        target, offset, stride = second, key, key
    else:
        target, offset, stride = third, 2 * key, WIDTH - 2 * key
    x, weight = x + channels, weight + channels * 4
    target += tl.multiple_of(begin - offset, 16) + tl.arange(0, COLUMNS)
    if _plain(numbers, start, length, ROWS, SPAN):
        _walk_down(x, weight, numbers, target, start, length, stride, WIDTH, ROWS, UNROLL, PLAIN=True)
    else:
        _walk_down(x, weight, numbers, target, start, length, stride, WIDTH, ROWS, UNROLL, PLAIN=False)


@triton.jit
def _walk_up(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    x, weight, numbers, source, to_x, to_weight, start, length, stride,  # noqa: ANN001
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, UNROLL: tl.constexpr, PLAIN: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The gradients of one strip, last row first.

    An input's gradient needs the slopes (gradients before the silu) of its row and the three after it, and a slope
    needs x of its row and the three before it. So going up, each row takes one new row of x, three rows further up,
    and one of output gradients; all else is in registers. The slopes of the three rows below the strip come first.
    """
    w0, w1, w2, w3 = _taps(weight)
    end = start + ROWS
    at, slopes = x + end.to(tl.int64) * WIDTH, source + end.to(tl.int64) * stride
    x0 = _row(at + 2 * WIDTH, end + 2, length, PLAIN).to(tl.float32)
    x1 = _row(at + WIDTH, end + 1, length, PLAIN).to(tl.float32)
    x2 = _row(at, end, length, PLAIN).to(tl.float32)
    n0, n1, n2 = -1, -1, -1
    if not PLAIN:
        n0 = _number(numbers, end + 2, length)
        n1 = _number(numbers, end + 1, length)
        n2 = _number(numbers, end, length)
    # The slopes of one, two and three rows below, and these rows' samples.
    s1 = tl.zeros((COLUMNS,), tl.float32)
    s2, s3 = s1, s1
    a1, a2, a3 = n0, n0, n0
    for i in tl.static_range(3):
        row = end + 2 - i
        x3 = _row(at - (i + 1) * WIDTH, row - 3, length, PLAIN).to(tl.float32)
        gradient = _row(slopes + (2 - i) * stride, row, length, PLAIN).to(tl.float32)
        if PLAIN:
            z = _sum(w0, w1, w2, w3, x0, x1, x2, x3)
        else:
            n3 = _number(numbers, row - 3, length)
            before1, before2 = tl.where(n1 == n0, x1, 0.0), tl.where(n2 == n0, x2, 0.0)
            z = _sum(w0, w1, w2, w3, x0, before1, before2, tl.where(n3 == n0, x3, 0.0))
            a1, a2, a3 = n0, a1, a2
            n0, n1, n2 = n1, n2, n3
        s1, s2, s3 = _silu_slope(z, gradient), s1, s2
        x0, x1, x2 = x1, x2, x3
    sum0 = tl.zeros((COLUMNS,), tl.float32)
    sum1, sum2, sum3 = sum0, sum0, sum0
    for block in range(ROWS // UNROLL):
        bottom = end - 1 - block * UNROLL
        at, slopes = x + bottom.to(tl.int64) * WIDTH, source + bottom.to(tl.int64) * stride
        to = to_x + bottom.to(tl.int64) * WIDTH
        # All loads of a block are on their way before the first of its rows is computed.
        new, gradients, samples = (), (), ()
        for i in tl.static_range(UNROLL):
            new = new + (_row(at - (i + 3) * WIDTH, bottom - i - 3, length, PLAIN),)  # noqa: RUF005
            gradients = gradients + (_row(slopes - i * stride, bottom - i, length, PLAIN),)  # noqa: RUF005
            if not PLAIN:
                samples = samples + (_number(numbers, bottom - i - 3, length),)  # noqa: RUF005
        for i in tl.static_range(UNROLL):
            row = bottom - i
            x3, gradient = new[i].to(tl.float32), gradients[i].to(tl.float32)
            if PLAIN:
                slope = _silu_slope(_sum(w0, w1, w2, w3, x0, x1, x2, x3), gradient)
                sum0, sum1, sum2, sum3 = sum0 + slope * x0, sum1 + slope * x1, sum2 + slope * x2, sum3 + slope * x3
                total = _sum(w0, w1, w2, w3, slope, s1, s2, s3)
                tl.store(to - i * WIDTH, total.to(to_x.dtype.element_ty))
            else:
                n3 = samples[i]
                b1, b2, b3 = tl.where(n1 == n0, x1, 0.0), tl.where(n2 == n0, x2, 0.0), tl.where(n3 == n0, x3, 0.0)
                slope = _silu_slope(_sum(w0, w1, w2, w3, x0, b1, b2, b3), gradient)
                sum0, sum1, sum2, sum3 = sum0 + slope * x0, sum1 + slope * b1, sum2 + slope * b2, sum3 + slope * b3
                b1, b2, b3 = tl.where(a1 == n0, s1, 0.0), tl.where(a2 == n0, s2, 0.0), tl.where(a3 == n0, s3, 0.0)
                total = _sum(w0, w1, w2, w3, slope, b1, b2, b3)
                tl.store(to - i * WIDTH, total.to(to_x.dtype.element_ty), mask=row < length)
                a1, a2, a3 = n0, a1, a2
                n0, n1, n2 = n1, n2, n3
            s1, s2, s3 = slope, s1, s2
            x0, x1, x2 = x1, x2, x3
    # Added up afterwards, in an order that is always the same.
    tl.store(to_weight, sum3)
    tl.store(to_weight + WIDTH, sum2)
    tl.store(to_weight + 2 * WIDTH, sum1)
    tl.store(to_weight + 3 * WIDTH, sum0)


@triton.jit  # type: ignore[untyped-decorator]
def _convolve_back(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0917
    x, weight, numbers, first, second, third, to_x, to_weight, length, key,  # noqa: ANN001
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """The gradient of x, and each strip's part of the weight's gradient."""
    begin = tl.program_id(0) * COLUMNS
    start = tl.program_id(1) * ROWS
    channels = begin + tl.arange(0, COLUMNS)
    if begin < key:
        source, offset, stride = first, 0, key
    elif begin < 2 * key:
        source, offset, stride = second, key, key
    else:
        source, offset, stride = third, 2 * key, WIDTH - 2 * key
    x, to_x, weight = x + channels, to_x + channels, weight + channels * 4
    source += tl.multiple_of(begin - offset, 16) + tl.arange(0, COLUMNS)
    to_weight += tl.program_id(1).to(tl.int64) * 4 * WIDTH + channels
    if _plain(numbers, start, length, ROWS, SPAN):
        _walk_up(
            x, weight, numbers, source, to_x, to_weight, start, length, stride,
            WIDTH, ROWS, COLUMNS, UNROLL, PLAIN=True,
        )  # fmt: skip
    else:
        _walk_up(
            x, weight, numbers, source, to_x, to_weight, start, length, stride,
            WIDTH, ROWS, COLUMNS, UNROLL, PLAIN=False,
        )  # fmt: skip


ROWS, COLUMNS, UNROLL, WARPS = 64, 128, 4, 2
"""A strip's rows and channels, the rows whose loads are issued together, and warps: two channels a thread."""


def _strips(length: int, width: int) -> tuple[tuple[int, int], dict[str, int]]:
    """The grid over strips, channels first because they lie side by side in memory, and a kernel's constants."""
    span = triton.next_power_of_2(ROWS + 6)
    sizes = {"WIDTH": width, "ROWS": ROWS, "COLUMNS": COLUMNS, "SPAN": span, "UNROLL": UNROLL, "num_warps": WARPS}
    return (width // COLUMNS, triton.cdiv(length, ROWS)), sizes


class _Convolution(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, key: int) -> Any:
        length, width = x.shape[1:]
        x, weight = x.contiguous(), weight.contiguous()
        outputs = [x.new_empty(1, length, size) for size in (key, key, width - 2 * key)]
        grid, sizes = _strips(length, width)
        _convolve[grid](x, weight, numbers, *outputs, length, key, **sizes)
        ctx.save_for_backward(x, weight, numbers)
        ctx.key = key
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, weight, numbers = ctx.saved_tensors
        length, width = x.shape[1:]
        slopes = [gradient.contiguous() for gradient in gradients]
        to_x = torch.empty_like(x)
        grid, sizes = _strips(length, width)
        parts = torch.empty(grid[1], 4, width, dtype=torch.float32, device=x.device)
        _convolve_back[grid](x, weight, numbers, *slopes, to_x, parts, length, ctx.key, **sizes)
        return to_x, parts.sum(0).T.to(weight.dtype).contiguous(), None, None


def convolution_suits(weight: torch.Tensor, key: int) -> bool:
    """Whether the kernel takes a weight `[channels, 4]` of which twice `key` channels are queries and keys."""
    return weight.shape[1] == 4 and key % COLUMNS == 0 and weight.shape[0] % COLUMNS == 0


def packed_convolution(
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
