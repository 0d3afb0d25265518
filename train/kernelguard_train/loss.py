"""How far are the predictions off? The sum of cross entropy over trained tokens, without the logits of all of them.

Sums, not means: the trainer divides once, by the trained tokens of all ranks and accumulation steps, so that every
trained token counts the same wherever it was computed.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional

from kernelguard_train.errors import ModelError
from kernelguard_train.working import gradient_sum


def _chunk(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of one chunk of logits, and its gradient with respect to them."""
    scores = logits.float()
    log_sum = torch.logsumexp(scores, dim=-1, keepdim=True)
    loss = (log_sum.squeeze(-1) - scores.gather(-1, targets[:, None]).squeeze(-1)).sum()
    # A comparison instead of a scatter: compiled, all of it is one pass over the logits and none in float32 is stored.
    own = torch.arange(scores.shape[-1], device=scores.device) == targets[:, None]
    return loss, ((scores - log_sum).exp() - own.float()).to(logits.dtype)


class _LinearCrossEntropy(Function):
    """Loss of `hidden @ weight.T` chunk by chunk; gradients are made on the way forward, while the logits exist."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take no keywords
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk: int,
        kernel: Any,
        scale: float,
    ) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        needed = any(ctx.needs_input_grad[:2])
        total = gradient_sum(weight)
        to_hidden = torch.zeros_like(hidden) if needed else None
        to_weight = torch.zeros_like(weight) if needed and total is None else None
        for start in range(0, len(targets), chunk):
            part = slice(start, start + chunk)
            own, gradient = kernel(hidden[part] @ weight.T, targets[part])
            loss += own
            if to_hidden is not None:
                torch.mm(gradient, weight, out=to_hidden[part])
                if total is not None:
                    total.add_product(gradient, hidden[part], scale)
                elif to_weight is not None:
                    to_weight.addmm_(gradient.T, hidden[part])
            del gradient  # or the next chunk's logits would stand beside it
        ctx.save_for_backward(to_hidden, to_weight)
        ctx.scale = scale
        return loss * scale

    @staticmethod
    def backward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        def scaled(gradient: torch.Tensor) -> torch.Tensor:
            # A Python number is multiplied in float32. As a bf16 tensor 1/n would be off by up to 2^-9, and so every
            # gradient behind it, but not those that are summed in float32.
            narrowed: torch.Tensor = (gradient * ctx.scale).mul_(outputs[0].to(gradient.dtype))
            return narrowed

        to_hidden, to_weight = ctx.saved_tensors
        return scaled(to_hidden), scaled(to_weight) if to_weight is not None else None, None, None, None, None


class LossHead(nn.Linear):
    """The model's output layer, which computes the loss where its weight is gathered.

    The layer is a unit of FSDP: reading its weight from outside would find a shard. `adopt` turns an existing output
    layer into one.
    """

    chunk: int
    implementation: str
    kernel: Any

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor | None = None, scale: float = 1.0) -> torch.Tensor:
        """`scale` times the summed loss of `hidden` `[n, size]` against `targets` `[n]`; without targets, the logits.

        With no target at all the loss is zero and so are its gradients, which still exist: ranks have to agree.
        """
        if targets is None:
            return functional.linear(hidden, self.weight)
        if self.implementation == "liger" and len(targets):
            from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss  # noqa: PLC0415 - optional

            loss: torch.Tensor = LigerFusedLinearCrossEntropyLoss(reduction="sum")(self.weight, hidden, targets)
            return loss.float() * scale
        return linear_cross_entropy(hidden, self.weight, targets, self.chunk, self.kernel, scale)


def linear_cross_entropy(  # noqa: PLR0917 - the first three are the loss's own, in torch's order
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    chunk: int,
    kernel: Any = _chunk,
    scale: float = 1.0,
) -> torch.Tensor:
    """`scale` times the summed cross entropy of `hidden @ weight.T`, with the logits of `chunk` rows at a time.

    The gradient of the weight is accumulated over the chunks in the weight's own type, each product being summed in
    float32 inside; or, where the weight is a working copy, in float32 throughout and already in this pass. In that case
    the loss must be propagated back as it is: what it would be multiplied with belongs into `scale`.
    """
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, chunk, kernel, scale)  # type: ignore[no-untyped-call]
    return loss


def adopt(head: nn.Module, *, chunk: int, implementation: str, compiled: bool) -> LossHead:
    """Makes a model's output layer a `LossHead`, in place: name and weight stay.

    Raises:
        ModelError: when the layer is more than a matrix.
    """
    if type(head) is not nn.Linear or bool(getattr(head, "bias", None) is not None):
        raise ModelError(f"the output layer is {head}; a linear layer without bias was expected")
    head.__class__ = LossHead
    adopted = cast("LossHead", head)
    adopted.chunk, adopted.implementation = chunk, implementation
    adopted.kernel = _fast_chunk() if compiled else _chunk
    return adopted


def _fast_chunk() -> Any:
    """The trainer's own kernel, or what torch compiles where there is no Triton."""
    try:
        from kernelguard_train.kernels import cross_entropy  # noqa: PLC0415 - imports Triton
    except ImportError:
        return torch.compile(_chunk, dynamic=True)
    return cross_entropy
