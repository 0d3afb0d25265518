"""pip, pip-tools and uv in an environment of their own, so that nobody's environment decides what is locked."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from kernelguard.errors import ToolError

_REQUIREMENTS = ("pip==26.3", "pip-tools==7.6.2", "uv==0.13.9")
"""Exact, so that the same inputs give the same bytes."""
_TAIL_LINES = 15
_PROGRESS_LINES = 3
_LOG = logging.getLogger("kernelguard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """An environment that has them."""

    python: Path
    version: Version
    """Of its Python, major.minor."""

    def run(
        self, *arguments: str, timeout: float = 1800.0, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run one of them as a module (`pip`, `piptools`, `uv`) and give what it printed.

        Raises:
            ToolError: it failed; the message has its last lines.
        """
        return run([str(self.python), "-m", *arguments], timeout=timeout, cwd=cwd, env=env)


def run(
    command: Sequence[str], *, timeout: float, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> str:
    """Run a program without a terminal and give its standard output.

    Raises:
        ToolError: it cannot be started, took too long, or failed; the message has its last lines.
    """
    what = " ".join(Path(part).name if index == 0 else part for index, part in enumerate(command[:4]))
    _LOG.debug("running %s", " ".join(command))
    try:
        done = subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
        )
    except FileNotFoundError as error:
        raise ToolError(f"{command[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise ToolError(f"{what} did not end within {timeout:g} s") from error
    if done.returncode != 0:
        # What it was at last is on standard output, what went wrong on standard error.
        at_last = [line.strip() for line in done.stdout.splitlines()[-_PROGRESS_LINES:]]
        said = [*dict.fromkeys(at_last), *_telling(done.stderr.splitlines())]
        raise ToolError(f"{what} failed with {done.returncode}:\n" + "\n".join(said))
    return done.stdout


def _telling(lines: Sequence[str]) -> Sequence[str]:
    """The lines that say what went wrong: error lines wherever they are, and the end without a traceback's frames."""
    errors = [line for line in lines if re.match(r"\s*(ERROR|error|Error)\b", line)]
    told = [line for line in lines if not re.match(r"\s*File \"|\s{4}|Traceback", line)]
    return list(dict.fromkeys([*errors[-_TAIL_LINES:], *told[-_TAIL_LINES:]]))


def find_python(wanted: Version) -> Path | None:
    """An interpreter of this major.minor on this machine; None: there is none."""
    here = Version(f"{sys.version_info.major}.{sys.version_info.minor}")
    if here.release[:2] == wanted.release[:2]:
        return Path(sys.executable)
    name = f"python{wanted.major}.{wanted.minor}"
    found = shutil.which(name)
    if found is None:
        return None
    # A shim of a version manager exists also for versions that are not installed.
    done = subprocess.run([found, "-c", "import sys"], capture_output=True, check=False)
    return Path(found) if done.returncode == 0 else None


def make_tools(cache: Path, python: Path) -> Tools:
    """The tools' environment for one interpreter, made once below `cache`.

    Raises:
        ToolError: it cannot be made; nothing half-made is left.
    """
    version = run([str(python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], timeout=60).strip()
    key = hashlib.sha256("\n".join(_REQUIREMENTS).encode()).hexdigest()[:12]
    prefix = cache / f"tools-{version}-{key}"
    inner = prefix / "bin" / "python"
    if not (prefix / "complete").exists():
        cache.mkdir(parents=True, exist_ok=True)
        # A virtual environment cannot be renamed, so a half-made one is known by the file that is written last.
        run([str(python), "-m", "venv", "--clear", str(prefix)], timeout=300)
        run([str(inner), "-m", "pip", "install", "--quiet", *_REQUIREMENTS], timeout=600)
        (prefix / "complete").touch()
    return Tools(python=inner, version=Version(version))
