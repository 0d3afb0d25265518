"""How does one rank train float32 parameters through bf16 products without copying them around?

FSDP on one rank casts every parameter for every pass, copies it through a gather of one, and brings each gradient back
through a cast, an addition and a reduction of one. Here the copies in the compute type are made once per update, the
parameters stay what checkpoints and the optimizer see, and gradients are summed in float32 where they arise: for a
matrix by the product that makes them, for everything else by a hook. Nothing is rounded that FSDP would not round.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class GradientSum:
    """The float32 gradient of one parameter, over all batches of a step."""

    __slots__ = ("fresh", "master", "total")

    def __init__(self, master: nn.Parameter) -> None:
        self.master = master
        self.total: torch.Tensor | None = None
        self.fresh = True
        """Nothing was added yet in this step; what `total` holds is of the one before."""

    def _begin(self) -> tuple[torch.Tensor, bool]:
        first, self.fresh = self.fresh, False
        if self.total is None:
            self.total = torch.empty_like(self.master, dtype=torch.float32)
        return self.total, first

    def add(self, gradient: torch.Tensor) -> None:
        """Adds a gradient of any type."""
        total, first = self._begin()
        if first:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def add_product(self, left: torch.Tensor, right: torch.Tensor, scale: float = 1.0) -> None:
        """Adds `scale * left.T @ right`, of `[n, rows]` and `[n, columns]`; it is never rounded to bf16."""
        total, first = self._begin()
        beta = 0.0 if first else 1.0
        if left.is_cuda and left.dtype != torch.float32 and hasattr(torch.ops.aten.addmm, "dtype_out"):
            # One kernel: the product is added to the total as it leaves the accumulators.
            torch.ops.aten.addmm.dtype_out(total, left.T, right, torch.float32, beta=beta, alpha=scale, out=total)
        else:
            total.addmm_(left.T.float(), right.float(), beta=beta, alpha=scale)

    def add_rows(self, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds `gradient` `[n, columns]` to the named rows; a row may be named many times."""
        total, first = self._begin()
        if first:
            total.zero_()
        total.index_add_(0, rows, gradient.float())


def gradient_sum(parameter: torch.Tensor) -> GradientSum | None:
    """Where this copy's gradient is to be summed; None for a parameter whose gradient autograd returns."""
    return getattr(parameter, "gradient_sum", None)


class WorkingCopy:
    """The copies that a model computes with, on one rank."""

    def __init__(self, model: nn.Module, compute: torch.dtype) -> None:
        self.places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self.masters: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []
        self.sums: list[GradientSum] = []
        self.compute = compute
        made: dict[nn.Parameter, nn.Parameter] = {}
        for module in model.modules():
            for name, master in module._parameters.items():  # noqa: SLF001 - a tied parameter stands in two modules
                if master is None:
                    continue
                if master not in made:
                    made[master] = self._copy(master)
                self.places.append((module, name, master, made[master]))

    def _copy(self, master: nn.Parameter) -> nn.Parameter:
        copy = nn.Parameter(master.detach().to(self.compute), requires_grad=master.requires_grad)
        if not master.requires_grad:
            return copy
        total = GradientSum(master)
        copy.gradient_sum = total  # type: ignore[attr-defined]

        def collect(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                total.add(parameter.grad)
                parameter.grad = None

        copy.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
        self.masters.append(master)
        self.copies.append(copy)
        self.sums.append(total)
        return copy

    @contextmanager
    def active(self) -> Iterator[None]:
        """While this is open the model computes with fresh copies; after it each parameter has its gradient."""
        if self.compute != torch.float32:  # float32 copies share the parameter's memory
            with torch.no_grad():
                torch._foreach_copy_(self.copies, self.masters)
        for total in self.sums:
            total.fresh = True
        for module, name, _, copy in self.places:
            module._parameters[name] = copy  # noqa: SLF001 - setattr would register it anew each time
        try:
            yield
        finally:
            for module, name, master, _ in self.places:
                module._parameters[name] = master  # noqa: SLF001
            for total in self.sums:
                total.master.grad = None if total.fresh else total.total
