"""How is each kernel called, on which inputs, and what should come out? One file for each family of operations.

A file defines `PROBES`, a dictionary from the name of an operation to a `Probe`; it is found by being there.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any


class Probe:
    """One operation: seeded inputs, the call as a model makes it, and the reference."""

    def __init__(self, make: Any, call: Any, reference: Any) -> None:
        self.make = make
        """`make(case, draw)` gives (inputs, fixed): tensors that take part in training, and everything else."""
        self.call = call
        """`call(function, inputs, fixed)` gives a dictionary of outputs."""
        self.reference = reference
        """`reference(inputs, fixed, precision)` gives the same outputs."""


def load(package: str) -> "dict[str, Probe]":
    """Every probe of the files in this folder, by operation."""
    found: dict[str, Probe] = {}
    for module in pkgutil.iter_modules(__path__):
        found.update(getattr(importlib.import_module(f"{package}.{module.name}"), "PROBES", {}))
    return found
