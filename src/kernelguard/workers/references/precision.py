"""How are products rounded: not at all (the truth), or as plain torch rounds them in a low precision?"""

from __future__ import annotations

from typing import Any

import torch


class Precision:
    """The one choice that a reference leaves open: in which dtype its matrix products are taken.

    With `dtype=None` they are exact in the dtype of the operands. With a low precision each operand and each result
    is rounded to it, forward and backward, as `torch.matmul` on tensors of that dtype does, while sums and
    element-wise steps stay in fp32. That is the customary mixed precision, and the yardstick for a kernel's error.
    """

    def __init__(self, dtype: Any = None) -> None:
        self.dtype = dtype

    def matmul(self, a: Any, b: Any) -> Any:
        """`a @ b`."""
        if self.dtype is None:
            return a @ b
        return (a.to(self.dtype) @ b.to(self.dtype)).to(a.dtype)

    def stored(self, x: Any) -> Any:
        """`x` as it is after it was kept in memory between two operations of a fused call."""
        return x if self.dtype is None else x.to(self.dtype).to(x.dtype)

    def einsum(self, equation: str, a: Any, b: Any) -> Any:
        """A product of two tensors."""
        if self.dtype is None:
            return torch.einsum(equation, a, b)
        return torch.einsum(equation, a.to(self.dtype), b.to(self.dtype)).to(a.dtype)


EXACT = Precision()


def segments(length: int, cu_seqlens: Any) -> list[tuple[int, int]]:
    """Start and end of each sample in a row of `length` tokens; None: one sample. Empty samples are left out."""
    if cu_seqlens is None:
        return [(0, length)]
    cuts = [int(c) for c in cu_seqlens]
    return [(a, b) for a, b in zip(cuts, cuts[1:]) if b > a]
