"""What did the ranks agree on, and what did torchrun say of a failure? Files and stderr of one node, read and written.

Standard library, Python 3.9 or newer. A file that cannot be read, or holds something else, is no outcome: `None`, or
code 3 where somebody clearly tried to say something.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelguard.guard import ticket as tickets

SCHEMA = 1
_LONGEST_LINE = 1 << 20
_FINISH_S = 2.0


@dataclass(frozen=True)
class Outcome:
    """The group's verdict."""

    code: int
    summary: str
    nodes_at_fault: tuple[str, ...] = ()


@dataclass
class Failure:
    """The first failed rank, in torchrun's words."""

    host: str = ""
    rank: str = ""
    exit_code: int | None = None
    """Negative: the number of the signal that killed it; None: torchrun reported none."""


def parse(text: str) -> Outcome:
    """An outcome's JSON. Whatever is not one is an outcome that could not be told."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return Outcome(tickets.CODE_UNKNOWN, "the outcome of the preflight is not readable")
    code = document.get("code") if isinstance(document, dict) else None
    if type(code) is not int or code not in tickets.CODES:
        return Outcome(tickets.CODE_UNKNOWN, f"the outcome of the preflight has no known code: {code!r}")
    nodes = document.get("nodes_at_fault")
    named = tuple(str(n) for n in nodes) if isinstance(nodes, list) else ()
    return Outcome(code, str(document.get("summary", "")), named)


def failure_outcome(code: int, summary: str, nodes: Iterable[Any]) -> Outcome:
    """What a supervisor itself found out."""
    return Outcome(code, summary, tuple(str(n) for n in nodes))


class OutcomeFile:
    """`outcome.json` of one run, written whole by a rename."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old: tuple[int, int, int] | None = None
        """Of the file of an earlier attempt."""

    def remove(self) -> None:
        """Forget an earlier run's; on a disk that cannot be written, remember which one it was."""
        try:
            self.path.unlink()
        except OSError:
            self._old = self._signature()
        with suppress(OSError):
            for file in (self.path.parent / "ranks").glob("*.json"):
                file.unlink()

    def expect_new(self) -> None:
        """What is there now belongs to an attempt that is over."""
        self._old = self._signature()

    def read(self) -> Outcome | None:
        """The outcome, once there is one."""
        now = self._signature()
        if now is None or now == self._old:
            return None
        try:
            return parse(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            return Outcome(tickets.CODE_UNKNOWN, f"{self.path} cannot be read: {error}")

    def write(self, outcome: Outcome) -> None:
        """Leave what the supervisor found, unless the ranks have said something themselves."""
        if self.read() is not None:
            return
        document = {
            "schema": SCHEMA,
            "code": outcome.code,
            "summary": outcome.summary,
            "nodes_at_fault": list(outcome.nodes_at_fault),
            "differing": [],
            "ranks": [],
            "seconds": 0.0,
            "by": "supervisor",
        }
        beside = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        try:
            beside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            beside.replace(self.path)
        except OSError as error:
            line = f"kernelguard: {self.path} cannot be written: {error.strerror}\n{tickets.OUTCOME_LINE}"
            sys.stderr.write(line + json.dumps(document) + "\n")

    def missing_nodes(self, nodes: int) -> list[int]:
        """Nodes of which no supervisor has reported into the shared run directory; empty if none is shared."""
        here = {int(p.stem) for p in (self.path.parent / "nodes").glob("*.json") if p.stem.isdigit()}
        return sorted(set(range(nodes)) - here)

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


def report_node(run_dir: Path, node: int, host: str, *, code: int | None = None, stopped: bool = False) -> None:
    """Say that this node's supervisor has started or, with a code, how it ends and whether it was told to.

    A read-only disk only makes a later message less exact.
    """
    with suppress(OSError):
        (run_dir / "nodes").mkdir(parents=True, exist_ok=True)
        about = {"node": node, "host": host, "pid": os.getpid(), "at": time.time(), "code": code, "stopped": stopped}
        (run_dir / "nodes" / f"{node}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")


def first_code(run_dir: Path) -> int:
    """The code of the node that first ended badly by itself, in a shared run directory; 0 where none is known.

    The others are ended because of it, and an engine that reports the highest code would report theirs.
    """
    found = []
    for path in (run_dir / "nodes").glob("*.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            about = json.loads(path.read_text(encoding="utf-8"))
            if about["code"] and not about["stopped"]:
                found.append((float(about["at"]), int(about["code"])))
    return min(found)[1] if found else 0


def told_ranks(run_dir: Path) -> list[int]:
    """The ranks that have left a word."""
    return sorted(int(p.stem) for p in (run_dir / "ranks").glob("*.json") if p.stem.isdigit())


class Stderr:
    """Passes a child's stderr on as it comes, and picks out of it what it says about the outcome."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.failure = Failure()
        self._rest = b""
        self._in_cause = False
        self._thread: threading.Thread | None = None

    def start(self, process: subprocess.Popen[bytes]) -> None:
        """Read until the last process that holds the pipe is gone."""
        self._thread = threading.Thread(target=self._pump, args=(process,), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait shortly for what is still in the pipe."""
        if self._thread is not None:
            self._thread.join(_FINISH_S)
        if self._rest:
            self.line(self._rest.decode("utf-8", "replace"))
            self._rest = b""

    def _pump(self, process: subprocess.Popen[bytes]) -> None:
        pipe = process.stderr
        if pipe is None:
            raise AssertionError("stderr was asked for as a pipe")
        while chunk := os.read(pipe.fileno(), 65_536):
            with suppress(OSError):
                # A terminal that went away must not end the job.
                _write_all(2, chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            # A progress bar is one line that never ends.
            self._rest = self._rest[-_LONGEST_LINE:]
            for line in lines:
                self.line(line.decode("utf-8", "replace"))

    def line(self, line: str) -> None:
        """Take in one line."""
        _, mark, rest = line.partition(tickets.OUTCOME_LINE)
        if mark:
            self.outcome = parse(rest)
            return
        if "Root Cause (first observed failure)" in line:
            # Of several (restarts), the last one is what ended the job.
            self._in_cause, self.failure = True, Failure()
        if not self._in_cause:
            return
        found = re.match(r"\s*(host|rank|exitcode)\s*:\s*(\S+)", line)
        if found is None:
            return
        key, value = found.groups()
        if key == "host":
            self.failure.host = value
        elif key == "rank":
            self.failure.rank = value
        elif re.fullmatch(r"-?\d+", value):
            self.failure.exit_code = int(value)
            self._in_cause = False


def _write_all(descriptor: int, chunk: bytes) -> None:
    view: Sequence[Any] = memoryview(chunk)
    while view:
        view = view[os.write(descriptor, view) :]  # type: ignore[arg-type]
