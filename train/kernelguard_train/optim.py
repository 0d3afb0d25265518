"""How do gradients become an update, and which updates are refused?"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from kernelguard_train.config import OptimConfig
from kernelguard_train.errors import NonFiniteError


def make_optimizer(model: nn.Module, config: OptimConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW on float32 shards. Vectors (norms, biases, decay rates) are not pulled towards zero."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        fused=device.type == "cuda",
    )


def learning_rate(config: OptimConfig, progress: float) -> float:
    """The rate at a part (0 to 1) of the run: a linear rise, then the configured fall to `min_lr_ratio`."""
    if progress < config.warmup:
        return config.lr * progress / config.warmup
    if config.decay == "constant":
        return config.lr
    done = min(1.0, (progress - config.warmup) / max(1e-12, 1 - config.warmup))
    fall = done if config.decay == "linear" else (1 - math.cos(math.pi * done)) / 2
    return config.lr * (1 - (1 - config.min_lr_ratio) * fall)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Sets the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """The global norm of all gradients.

    The norm of sharded gradients is itself sharded: `full_tensor` adds up the parts of all ranks, so every rank gets
    the same number, and decides the same.
    """
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, largest: float) -> None:
    """Scales gradients of global norm `norm` to one of at most `largest` (0: leaves them).

    The norm is a number of the host's, as whoever asks whether the step is taken needs it there: gradients that are
    small enough are then neither read nor written.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients or largest <= 0 or norm <= largest:
        return
    own = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    torch._foreach_mul_(own, largest / (norm + 1e-6))


class NonFiniteGuard:
    """Refuses updates whose loss or gradients are not finite, and ends a run that yields nothing else."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_a_row = 0
        self.skipped = 0

    def accepts(self, loss: float, norm: float) -> bool:
        """Whether to take this step. Both numbers are sums over all ranks, so every rank gets the same answer.

        Raises:
            NonFiniteError: after `limit` refusals in a row.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.skipped += 1
        if self.in_a_row >= self.limit:
            raise NonFiniteError(
                f"loss {loss} and gradient norm {norm}: not finite for {self.in_a_row} steps in a row "
                "(optim.nonfinite_limit). Nothing was updated in these steps"
            )
        return False
