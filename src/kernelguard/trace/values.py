"""What `trace` hands on: the kernels of a profiler trace, and which fast paths and fallbacks they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRun:
    """One GPU kernel by name."""

    name: str
    """As the profiler wrote it; C++ kernels with their template arguments."""
    count: int
    microseconds: float
    """All launches together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFacts:
    """One trace."""

    source: str
    kernels: tuple[KernelRun, ...] = ()
    """The most expensive first."""
    ops: Mapping[str, int] = field(default_factory=dict)
    """How often each operator ran on the CPU side, `aten::mm`."""
    gpu_microseconds: float = 0.0
    """Sum over all kernels."""
    span_microseconds: float = 0.0
    """From the first kernel's start to the last one's end."""
    launches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FastPathTrace:
    """What of one fast path is in a trace."""

    symbol: str
    package: str
    kernels: tuple[KernelRun, ...] = ()
    """Those that its package launches for it."""
    forward: bool = False
    """A kernel of its forward ran."""
    backward: bool = False
    fallbacks: tuple[str, ...] = ()
    """Operators that only the slow path runs, with how often."""
    known: bool = True
    """False: no kernel names of this package version are known, so an empty answer says nothing."""
