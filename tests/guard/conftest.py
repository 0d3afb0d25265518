"""Kernels that work on a CPU are those of tests/verify."""

from __future__ import annotations

import sys
from pathlib import Path

for _name in ("verify", "resolve"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / _name))
