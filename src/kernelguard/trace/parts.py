"""Which part of a training step is a GPU kernel, and what can this GPU do at most? (`matrices/*.toml`)."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernelguard.data import matrices

OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A group of kernels that do one kind of work."""

    name: str
    title: str
    bound: str
    """`gemm`, `memory`, `sequence`, `communication` or `other`: what such kernels are limited by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """What a GPU's data sheet promises."""

    gpu: str
    bf16_tflops: float
    """Dense."""
    memory_gb_s: float


class Parts:
    """Finds the part of each kernel; what was found is kept, since a trace repeats few names many times."""

    def __init__(self) -> None:
        rows = tomllib.loads((matrices() / "kernel_parts.toml").read_text("utf-8"))["part"]
        self.parts = tuple(Part(name=row["name"], title=row["title"], bound=row["bound"]) for row in rows)
        self.parts += (Part(name=OTHER, title="not known", bound=OTHER),)
        self._patterns = [re.compile("|".join(f"(?:{p})" for p in row["patterns"]), re.IGNORECASE) for row in rows]
        self._found: dict[str, int] = {}

    def index(self, kernel: str) -> int:
        """Position in `parts`."""
        found = self._found.get(kernel)
        if found is None:
            # Template arguments name other things: a copy kernel may carry a functor's whole type.
            matches = (i for i, pattern in enumerate(self._patterns) if pattern.search(kernel))
            found = self._found[kernel] = next(matches, len(self._patterns))
        return found


@cache
def _peaks() -> tuple[Peak, ...]:
    rows: list[dict[str, Any]] = tomllib.loads((matrices() / "gpu_peaks.toml").read_text("utf-8"))["gpu"]
    return tuple(
        Peak(gpu=row["name"], bf16_tflops=float(row["bf16_tflops"]), memory_gb_s=float(row["memory_gb_s"]))
        for row in rows
    )


def peak_of(gpu: str) -> Peak | None:
    """The data sheet of a GPU by its name in a trace; None: not known."""
    fitting = [peak for peak in _peaks() if re.search(rf"(?<![A-Za-z0-9]){re.escape(peak.gpu)}(?![0-9])", gpu)]
    return max(fitting, key=lambda peak: len(peak.gpu), default=None)
