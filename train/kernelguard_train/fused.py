"""Which parts of a layer are computed in fewer, larger steps than its author wrote?

Linear layers, SwiGLU blocks and the embedding, each as one autograd function that keeps less and adds its weight's
gradient where it is wanted (`working`). Values and gradients are those of the plain modules; `tests/train/
test_speed_layers.py` holds them together. Elementwise work stands in plain torch functions, compiled on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from kernelguard_train import float8
from kernelguard_train.working import GradientSum, gradient_sum


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, rounded once."""
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(gate.dtype)


def swiglu_backward(
    gradient: torch.Tensor, gate: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of gate and up, and the product itself, which is cheaper to make again than to keep."""
    wide, height, slope = gate.float(), up.float(), gradient.float()
    bell = torch.sigmoid(wide)
    silu = wide * bell
    to_gate = slope * height * (bell + silu * (1 - bell))
    return to_gate.to(gate.dtype), (slope * silu).to(gate.dtype), (silu * height).to(gate.dtype)


class Elementwise:
    """The elementwise functions, compiled or not."""

    def __init__(self) -> None:
        self.swiglu: Callable[..., torch.Tensor] = swiglu
        self.swiglu_backward: Callable[..., Any] = swiglu_backward

    def compile(self, *, dynamic: bool) -> None:
        """Compiles them; `dynamic` where the number of tokens changes from batch to batch."""
        self.swiglu = torch.compile(swiglu, dynamic=dynamic)
        self.swiglu_backward = torch.compile(swiglu_backward, dynamic=dynamic)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def weight_gradient(gradient: torch.Tensor, inputs: torch.Tensor, total: GradientSum | None) -> torch.Tensor | None:
    """The gradient of a weight `[out, in]`: added where it is summed, otherwise returned."""
    if total is None:
        return gradient.T @ inputs
    total.add_product(gradient, inputs)
    return None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.total = gradient_sum(weight)
        ctx.save_for_backward(inputs, weight)
        return functional.linear(inputs, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        inputs, weight = ctx.saved_tensors
        gradient = _flat(gradients[0])
        to_inputs = (gradient @ weight).view(inputs.shape) if ctx.needs_input_grad[0] else None
        to_weight = weight_gradient(gradient, _flat(inputs), ctx.total) if ctx.needs_input_grad[1] else None
        return to_inputs, to_weight


class _Shared(Function):
    """Several linear layers of one input, whose gradient is summed by the products that make it."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.totals = [gradient_sum(weight) for weight in weights]
        ctx.save_for_backward(inputs, *weights)
        return tuple(functional.linear(inputs, weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs, *weights = ctx.saved_tensors
        slopes = [_flat(gradient) for gradient in gradients]
        to_inputs = slopes[0] @ weights[0]
        for slope, weight in zip(slopes[1:], weights[1:], strict=True):
            to_inputs.addmm_(slope, weight)
        x = _flat(inputs)
        to_weights = [weight_gradient(slope, x, total) for slope, total in zip(slopes, ctx.totals, strict=True)]
        return to_inputs.view(inputs.shape), *to_weights


def project(inputs: torch.Tensor, *layers: nn.Linear) -> tuple[torch.Tensor, ...]:
    """The outputs of several linear layers without biases that have one input."""
    outputs: tuple[torch.Tensor, ...] = _Shared.apply(inputs, *(layer.weight for layer in layers))  # type: ignore[no-untyped-call]
    return outputs


class _SwiGLU(Function):
    """down(silu(gate(x)) * up(x)); keeps x, gate(x) and up(x)."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        ctx: Any, inputs: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, elementwise: Any
    ) -> torch.Tensor:
        x = _flat(inputs)
        gated, raised = functional.linear(x, gate), functional.linear(x, up)
        ctx.elementwise = elementwise
        ctx.totals = [gradient_sum(weight) for weight in (gate, up, down)]
        ctx.save_for_backward(x, gated, raised, gate, up, down)
        return functional.linear(elementwise.swiglu(gated, raised), down).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gated, raised, gate, up, down = ctx.saved_tensors
        gradient = _flat(gradients[0])
        to_gated, to_raised, product = ctx.elementwise.swiglu_backward(gradient @ down, gated, raised)
        to_down = weight_gradient(gradient, product, ctx.totals[2])
        del product
        to_inputs = torch.addmm(to_gated @ gate, to_raised, up).view(gradients[0].shape)
        to_gate = weight_gradient(to_gated, x, ctx.totals[0])
        to_up = weight_gradient(to_raised, x, ctx.totals[1])
        return to_inputs, to_gate, to_up, to_down, None


class _Embedding(Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.total = gradient_sum(weight)
        ctx.save_for_backward(rows)
        return functional.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None]:
        (rows,) = ctx.saved_tensors
        ctx.total.add_rows(rows.flatten(), _flat(gradients[0]))
        return None, None


def _linear_forward(module: Any, inputs: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = _Linear.apply(inputs, module.weight)  # type: ignore[no-untyped-call]
    return output if module.bias is None else output + module.bias


def _embedding_forward(module: Any, rows: torch.Tensor) -> torch.Tensor:
    if gradient_sum(module.weight) is None or module.padding_idx is not None:
        return functional.embedding(rows, module.weight, module.padding_idx)
    output: torch.Tensor = _Embedding.apply(rows, module.weight)  # type: ignore[no-untyped-call]
    return output


def is_swiglu(module: nn.Module) -> bool:
    """Whether a module is gate, up and down projections without biases around silu."""
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    plain = all(isinstance(part, nn.Linear) and part.bias is None for part in parts)
    name = getattr(getattr(module, "config", None), "hidden_act", "")
    activation = getattr(module, "act_fn", None)
    known = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation" or activation is None
    return plain and name in {"silu", "swish"} and known


def adopt(layers: Iterable[nn.Module], embedding: nn.Module, *, compiled: bool, dynamic: bool, fp8: bool) -> str:
    """Makes linear layers, SwiGLU blocks and the embedding fused ones, in place; returns what it did."""
    elementwise = Elementwise()
    if compiled:
        elementwise.compile(dynamic=dynamic)
    linear, block = (float8.Linear, float8.SwiGLU) if fp8 else (_Linear, _SwiGLU)
    quantizer = float8.Quantizer(compiled=compiled) if fp8 else None
    counts = {"linear": 0, "SwiGLU": 0}
    for layer in layers:
        inside: set[nn.Module] = set()
        for module in layer.modules():
            if module in inside:
                continue
            if is_swiglu(module):
                inside.update(module.modules())
                _bind_swiglu(module, block, elementwise, quantizer)
                counts["SwiGLU"] += 1
            elif type(module) is nn.Linear:
                _bind_linear(module, linear, quantizer)
                counts["linear"] += 1
    if type(embedding) is nn.Embedding and embedding.max_norm is None and not embedding.sparse:
        embedding.forward = types.MethodType(_embedding_forward, embedding)  # type: ignore[method-assign]
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + (" in float8" if fp8 else "")


def _bind_linear(module: nn.Linear, function: Any, quantizer: Any) -> None:
    if quantizer is None or not float8.suits(module.weight):
        module.forward = types.MethodType(_linear_forward, module)  # type: ignore[method-assign]
        return

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = function.apply(inputs, self.weight, quantizer)
        return output if self.bias is None else output + self.bias

    module.forward = types.MethodType(forward, module)  # type: ignore[method-assign]


def _bind_swiglu(module: nn.Module, function: Any, elementwise: Elementwise, quantizer: Any) -> None:
    extra = () if quantizer is None else (quantizer,)

    def forward(self: Any, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = function.apply(
            inputs, self.gate_proj.weight, self.up_proj.weight, self.down_proj.weight, elementwise, *extra
        )
        return output

    module.forward = types.MethodType(forward, module)
