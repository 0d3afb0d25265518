"""Kernels that work on a CPU are those of tests/verify."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "verify"))
