"""Which products of a layer may run in float8, and how is their range chosen?

An option, off by default, and never part of a bf16 figure: forward products and those that make input gradients run on
e4m3 operands (e5m2 for gradients), each tensor with one scale drawn from its own largest value. Weight gradients stay
products of bf16 operands summed in float32, and so do output layer, attention, recurrence and norms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Function

from kernelguard_train.working import GradientSum, gradient_sum

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
_SMALLEST = 512
"""Thinner matrices gain less than their casts cost."""
Pair = tuple[torch.Tensor, torch.Tensor]


def suits(weight: torch.Tensor) -> bool:
    """Whether a weight is large enough, and of the multiples of 16 that the products need."""
    return weight.ndim == 2 and min(weight.shape) >= _SMALLEST and all(size % 16 == 0 for size in weight.shape)


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> Pair:
    """The tensor in float8, and the float32 factor that undoes its scaling."""
    largest = torch.finfo(dtype).max
    factor = tensor.abs().amax().float().clamp(min=1e-12) / largest
    return (tensor.float() / factor).clamp(-largest, largest).to(dtype), factor


class Quantizer:
    """Casts, compiled or not, and the weights' casts of the present update."""

    def __init__(self, *, compiled: bool) -> None:
        # One graph for all sizes: with one for each, torch's limit would send the later ones to eager, without a word.
        self.cast: Callable[[torch.Tensor, torch.dtype], Pair] = torch.compile(cast, dynamic=True) if compiled else cast

    def weight(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A weight's cast, the same transposed, and the factor; made once for every change of the weight."""
        made: Any = getattr(weight, "float8", None)
        if made is None or made[0] != weight._version:  # noqa: SLF001 - torch counts changes there
            narrow, factor = self.cast(weight.detach(), FORWARD)
            made = (weight._version, narrow, narrow.T.contiguous(), factor)  # noqa: SLF001
            weight.float8 = made  # type: ignore[attr-defined]
        return made[1], made[2], made[3]


def product(left: Pair, right: Pair, dtype: torch.dtype, *, fast: bool) -> torch.Tensor:
    """`left @ right.T` of two casts, `right` being `[columns, inner]`."""
    if not left[0].is_cuda:
        return ((left[0].float() @ right[0].float().T) * (left[1] * right[1])).to(dtype)
    return torch._scaled_mm(  # noqa: SLF001 - torch has no public name for it
        left[0], right[0].T, scale_a=left[1], scale_b=right[1], out_dtype=dtype, use_fast_accum=fast
    )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _weight_gradient(gradient: torch.Tensor, inputs: torch.Tensor, total: GradientSum | None) -> torch.Tensor | None:
    if total is None:
        return gradient.T @ inputs
    total.add_product(gradient, inputs)
    return None


class Linear(Function):
    """A linear layer."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        """`inputs @ weight.T`."""
        ctx.quantizer, ctx.total = quantizer, gradient_sum(weight)
        ctx.save_for_backward(inputs, weight)
        narrow, _, factor = quantizer.weight(weight)
        x = quantizer.cast(_flat(inputs), FORWARD)
        return product(x, (narrow, factor), inputs.dtype, fast=True).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of inputs and weight."""
        inputs, weight = ctx.saved_tensors
        gradient = _flat(gradients[0])
        _, turned, factor = ctx.quantizer.weight(weight)
        narrow = ctx.quantizer.cast(gradient, BACKWARD)
        to_inputs = product(narrow, (turned, factor), inputs.dtype, fast=False).view(inputs.shape)
        return to_inputs, _weight_gradient(gradient, _flat(inputs), ctx.total), None


class SwiGLU(Function):
    """A SwiGLU block; what is kept is what the bf16 one keeps."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        ctx: Any,
        inputs: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        elementwise: Any,
        quantizer: Quantizer,
    ) -> torch.Tensor:
        """down(silu(gate(x)) * up(x))."""
        x = _flat(inputs)
        ctx.elementwise, ctx.quantizer = elementwise, quantizer
        ctx.totals = [gradient_sum(weight) for weight in (gate, up, down)]
        narrow = quantizer.cast(x, FORWARD)
        gated, raised = (
            product(narrow, (made[0], made[2]), x.dtype, fast=True)
            for made in (quantizer.weight(gate), quantizer.weight(up))
        )
        ctx.save_for_backward(x, gated, raised, gate, up, down)
        hidden = quantizer.cast(elementwise.swiglu(gated, raised), FORWARD)
        lowered, _, factor = quantizer.weight(down)
        return product(hidden, (lowered, factor), x.dtype, fast=True).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of inputs and the three weights."""
        x, gated, raised, gate, up, down = ctx.saved_tensors
        quantizer, gradient = ctx.quantizer, _flat(gradients[0])

        def back(wide: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            _, turned, factor = quantizer.weight(weight)
            return product(quantizer.cast(wide, BACKWARD), (turned, factor), x.dtype, fast=False)

        to_gated, to_raised, hidden = ctx.elementwise.swiglu_backward(back(gradient, down), gated, raised)
        to_down = _weight_gradient(gradient, hidden, ctx.totals[2])
        del hidden
        to_inputs = back(to_gated, gate).add_(back(to_raised, up)).view(gradients[0].shape)
        to_gate = _weight_gradient(to_gated, x, ctx.totals[0])
        to_up = _weight_gradient(to_raised, x, ctx.totals[1])
        return to_inputs, to_gate, to_up, to_down, None, None
