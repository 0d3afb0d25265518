"""What breaks when a packed step is recorded once and replayed: `python docs/training/demos/cuda_graphs.py`.

A CUDA graph keeps what the host did while it was recorded. Where samples begin is decided on the host (kernels are
launched per chunk of each sample), so a replay keeps the boundaries of the first batch. On a machine without a GPU the
same is shown with torch's tracer, which records operations in the same sense.
"""

# ruff: noqa: INP001 - a script, not a package

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx.experimental.proxy_tensor import make_fx

FIRST, SECOND = (40, 24), (10, 54)
"""Lengths of the samples in two batches of 64 tokens."""


def mixed(values: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """A recurrence that starts anew with each sample: here the running mean, in a model the delta rule."""
    parts, start = [], 0
    for length in lengths:
        part = values[start : start + length]
        steps = torch.arange(1, length + 1, device=values.device)[:, None]
        parts.append(part.cumsum(0) / steps)
        start += length
    return torch.cat(parts)


def recorded(values: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """The step, recorded with the boundaries of the first batch."""
    if values.device.type != "cuda":
        # No GPU: the tracer keeps operations and the numbers they were given, as a graph keeps launches.
        return make_fx(lambda x: mixed(x, FIRST))(values)
    static = values.clone()
    mixed(static, FIRST)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = mixed(static, FIRST)

    def replay(new: torch.Tensor) -> torch.Tensor:
        static.copy_(new)
        graph.replay()
        return output.clone()

    return replay


def boundaries_from_the_device(values: torch.Tensor) -> str:
    """What happens when the boundaries are read from the GPU instead, while recording."""
    if values.device.type != "cuda":
        return "not tried: needs a GPU"
    boundaries = torch.tensor([0, *FIRST], device="cuda").cumsum(0)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            mixed(values, boundaries.diff().tolist())
    except RuntimeError as error:
        return f"refused: {str(error).splitlines()[0]}"
    return "recorded"


def main() -> dict[str, object]:
    """Runs the demonstration and returns what it found."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    values = torch.randn(64, 8, device=device)
    step = recorded(values)
    same = (step(values) - mixed(values, FIRST)).abs().max().item()
    other = (step(values) - mixed(values, SECOND)).abs().max().item()
    return {
        "device": device,
        "error on the batch that was recorded": same,
        "error on a batch with other boundaries": other,
        "reading boundaries from the GPU while recording": boundaries_from_the_device(values),
    }


if __name__ == "__main__":
    for name, value in main().items():
        print(f"{name}: {value}")  # noqa: T201 - a demonstration
