"""What is asked of one probe worker: plain values that become its JSON request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set of inputs for a kernel."""

    name: str
    lengths: tuple[int, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)
    packed: bool = False
    """The samples lie in one row and the kernel is told of their boundaries."""
    state: bool = False
    """It continues from a given state, as decoding does."""
    repeats: int = 3
    force: bool = False
    """Run every configuration that the autotuner could pick at these shapes."""
    batch: int = 1
    pin: int | None = None
    """Take this candidate of every autotuned kernel instead of tuning; None: let the autotuner choose."""

    def to_json(self) -> dict[str, Any]:
        """As the worker reads it."""
        return {
            "name": self.name,
            "lengths": list(self.lengths),
            "shape": dict(self.shape),
            "packed": self.packed,
            "state": self.state,
            "repeats": self.repeats,
            "force": self.force,
            "batch": self.batch,
            "pin": self.pin,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One kernel and its cases."""

    symbol: str
    package: str
    module: str
    """Where the symbol is imported from."""
    op: str
    """Name of the probe in `workers/probes/`; empty: there is none."""
    dtype: str = "bfloat16"
    trains: bool = True
    backward: bool = True
    """Ask for gradients; False for kernels that only decode and update their state in place."""
    cases: tuple[Case, ...] = ()
    layers: int | None = None
    stands_for: str = ""
    """The symbol in whose place the bundled trainer calls this kernel of its own; without that trainer nothing does."""
    hub_attention: str = ""
    """A hub repository: the function is what transformers' own loader makes of this attention implementation."""

    model: Mapping[str, Any] = field(default_factory=dict)
    """Of a layer that the hub replaces: the model around it, as `workers/isolation.py` builds it."""

    def quick(self) -> dict[str, Any]:
        """The same about the shortest inputs, as `workers/probe.py` reads it: for a look before each launch.

        The autotuner's choice is left alone, because that is what the training will run.
        """
        if not self.op or not self.cases:
            return {}
        shortest = min(self.cases, key=lambda case: sum(case.lengths))
        return replace(self, cases=(replace(shortest, force=False, repeats=2),)).to_json(device="cuda")

    def to_json(self, *, device: str, seed: int = 0, budget_s: float = 1e9) -> dict[str, Any]:
        """As the worker reads it."""
        return {
            "package": self.package,
            "module": self.module,
            "symbol": self.symbol,
            "hub_attention": self.hub_attention,
            "op": self.op,
            "model": dict(self.model),
            "dtype": self.dtype,
            "backward": self.backward,
            "device": device,
            "seed": seed,
            "budget_s": budget_s,
            "cases": [case.to_json() for case in self.cases],
        }
