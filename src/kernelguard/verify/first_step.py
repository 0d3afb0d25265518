"""What the bundled trainer's first steps compile, made ahead of them in the folder of `verify --warm-cache`."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelguard.observe.process import run_limited, signal_name

_LAST_WORDS = 400
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit): ")


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep:
    """The run whose first steps are made ahead."""

    config: Path
    """The trainer's configuration."""
    model: str
    """What was verified; the configuration may name the same by another path."""

    def digest(self, length: int) -> str:
        """Of everything that decides what is compiled, as far as it is known here.

        Raises:
            OSError: the configuration cannot be read.
        """
        return hashlib.sha256(self.config.read_bytes() + f"{self.model} {length}".encode()).hexdigest()


def compile_first_step(
    python: str, run: FirstStep, *, packed: bool, length: int, timeout: float, environ: Mapping[str, str]
) -> str:
    """Let the trainer of that interpreter take its first steps; why they could not be taken, or nothing.

    `environ` says where the caches are (`cache_variables`). A packed batch has `length` tokens, as the probes had; the
    length of others is the configuration's own.
    """
    # As TOML, in which a text may hold anything.
    settings = [f"model.path={json.dumps(run.model)}", *([f"batch.tokens={length}"] if packed else [])]
    command = [python, "-m", "kernelguard_train", str(run.config), *settings, "--warm-up"]
    try:
        code, output = run_limited(command, timeout=timeout, environ=environ)
    except OSError as error:
        return f"{python} cannot be executed: {error.strerror}"
    if code == 0:
        return ""
    if code is None:
        return f"it did not end within {timeout:.0f} s"
    how = f"it was killed by {signal_name(-code)}" if code < 0 else f"it ended with exit code {code}"
    return f"{how}: {_last_words(output)}" if output.strip() else how


def _last_words(output: str) -> str:
    """The trainer's own error, which may be a list, else the last exception, else the last line."""
    lines = [line.rstrip() for line in output.splitlines() if line.strip()]
    own = next((n for n, line in enumerate(lines) if line.startswith("error: ")), None)
    if own is not None:
        return " ".join(line.strip() for line in lines[own:]).removeprefix("error: ")[:_LAST_WORDS]
    # What a process group says of its end may come after it.
    return next((line for line in reversed(lines) if _EXCEPTION.match(line)), lines[-1].strip())[:_LAST_WORDS]
