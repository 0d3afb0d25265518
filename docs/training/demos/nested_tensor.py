"""What breaks when samples of unequal length are a NestedTensor: `python docs/training/demos/nested_tensor.py`.

The operations of a Qwen3.5 layer are tried, one after the other, on a jagged NestedTensor of two samples.
"""

# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch.nn import functional

LENGTHS = (37, 27)


def attempt(action: Callable[[], torch.Tensor]) -> str:
    """`works`, or the first line of what is raised."""
    try:
        action()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"{type(error).__name__}: {lines[0][:110] if lines else ''}"
    return "works"


def main() -> dict[str, str]:
    """Tries each operation and returns what happened."""
    warnings.filterwarnings("ignore", message=".*nested tensors.*")
    torch.manual_seed(0)
    hidden = torch.nested.nested_tensor([torch.randn(n, 64) for n in LENGTHS], layout=torch.jagged)
    matrix, kernel = torch.randn(64, 64), torch.randn(64, 1, 4)
    heads = hidden.unflatten(-1, (4, 16)).transpose(1, 2)
    return {
        "projection (linear)": attempt(lambda: functional.linear(hidden, matrix)),
        "norm (pow, mean, rsqrt)": attempt(lambda: hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)),
        "attention (scaled_dot_product_attention)": attempt(
            lambda: functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        ),
        "convolution over time (conv1d)": attempt(
            lambda: functional.conv1d(hidden.transpose(1, 2), kernel, padding=3, groups=64)
        ),
        "running sums of the gates (cumsum over time)": attempt(lambda: hidden.cumsum(1)),
        "rotary positions (positions of each token)": attempt(
            lambda: hidden * torch.arange(max(LENGTHS))[None, :, None]
        ),
        "reshaping as transformers does (hidden.shape, reshape)": attempt(
            lambda: hidden.reshape(hidden.shape[0], int(hidden.shape[1]), 4, 16)
        ),
        "all tokens as rows (flatten)": attempt(lambda: hidden.flatten(0, 1)),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value}")  # noqa: T201 - a demonstration
