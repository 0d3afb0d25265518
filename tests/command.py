"""The command line as a real process, for tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Command:
    """One run of the installed `kernelguard` command."""

    def __init__(self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        command = [str(Path(sys.executable).parent / "kernelguard"), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **(env or {})}
        )
        self.code = done.returncode
        self.out = done.stdout
        self.err = done.stderr
