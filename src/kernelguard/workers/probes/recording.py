"""Which GPU kernels does one call launch, in its forward and in its backward? Names as torch.profiler shows them."""

from __future__ import annotations

from typing import Any


class Recording:
    """Two profiles of one run: told that the backward begins, it closes the first and opens the second."""

    def __init__(self) -> None:
        self._open: Any = None
        self._step = ""
        self.kernels: dict[str, dict[str, int]] = {}
        """By `forward` and `backward`: how often each kernel ran."""

    def stage(self, step: str) -> None:
        """`step` begins now."""
        import torch
        from torch import profiler

        self.close()
        # Without the CPU side: the names are all that is wanted, and its events are many.
        self._open = profiler.profile(activities=[profiler.ProfilerActivity.CUDA])
        self._step = step
        torch.cuda.synchronize()
        self._open.__enter__()

    def close(self) -> None:
        """The step that was open is over."""
        import torch

        if self._open is None:
            return
        torch.cuda.synchronize()
        self._open.__exit__(None, None, None)
        counts: dict[str, int] = {}
        for event in self._open.events():
            if str(event.device_type).endswith("CUDA"):
                counts[event.name] = counts.get(event.name, 0) + int(event.count)
        self.kernels[self._step] = counts
        self._open = None
