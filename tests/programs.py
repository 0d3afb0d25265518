"""Programs of others that tests compare with, each installed once in an environment of its own."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

# As it was before any test pointed pip at an index of its own.
_ENVIRONMENT = dict(os.environ)
CACHE = Path(__file__).resolve().parents[1] / ".cache" / "tools"


@cache
def tool(name: str, *requirements: str) -> Path:
    """The interpreter of an environment with exactly these requirements."""
    CACHE.mkdir(parents=True, exist_ok=True)
    prefix = CACHE / name
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        if not (prefix / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(prefix)], check=True, env=_ENVIRONMENT)
            python = prefix / "bin" / "python"
            command = [python, "-m", "pip", "install", "--quiet", *requirements]
            subprocess.run(command, check=True, env=_ENVIRONMENT)
            (prefix / "complete").touch()
    return prefix / "bin" / "python"
