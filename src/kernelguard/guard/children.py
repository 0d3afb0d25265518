"""What became of a child process of a rank: its records, the stage it died at, how it ended.

`observe/process.py` does the same for kernelguard's own interpreter. This one runs in the training interpreter (Python
3.9 or newer), never leaves a child behind when the rank dies, and works where no disk can be written.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

WORKERS = Path(__file__).resolve().parent.parent / "workers"
_LEASH = Path(__file__).resolve().parent / "leash.py"
_TAIL_BYTES = 8_192
_GRACE_S = 1.0

_running: set[int] = set()
_lock = threading.Lock()


@dataclass(frozen=True)
class ChildResult:
    """Everything that is known about one run of a worker."""

    records: tuple[Mapping[str, Any], ...] = ()
    finished: bool = False
    """It said itself that it was done."""
    died_at: str = ""
    """The last stage it announced, when it did not finish."""
    returncode: int | None = None
    """None: it was ended at its time limit."""
    output: str = ""
    """The end of what it and everything it imported printed."""
    unreadable: str = ""
    """Why its result could not be read to the end, or could not be made."""
    limit_s: float = 0.0

    @property
    def signal(self) -> str:
        """The name of the signal that killed it, `SIGSEGV`, or nothing."""
        if self.returncode is None or self.returncode >= 0:
            return ""
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"

    def of_kind(self, kind: str) -> Iterator[Mapping[str, Any]]:
        """The records of one kind."""
        return (record for record in self.records if record.get("kind") == kind)

    def ending(self) -> str:
        """How it ended, in words; empty when it finished."""
        if self.finished:
            return ""
        if self.unreadable:
            how = f"left no result that can be read ({self.unreadable})"
        elif self.returncode is None:
            how = f"did not end within {self.limit_s:g} s"
        elif self.signal:
            how = f"was killed by {self.signal}"
        else:
            how = f"ended with exit code {self.returncode} and no result"
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        said = f"; the last it printed: {lines[-1][:300]}" if lines and not self.signal else ""
        return (f"{how} at stage '{self.died_at}'" if self.died_at else how) + said


def run_worker(
    worker: str, request: Mapping[str, Any], *, timeout: float, environ: Mapping[str, str] | None = None
) -> ChildResult:
    """Run `workers/<worker>.py` in this interpreter for at most `timeout` seconds.

    Whatever becomes of it is a result, never an exception.
    """
    try:
        with scratch() as folder:
            request_file, result_file = folder / "request.json", folder / "result.jsonl"
            request_file.write_text(json.dumps(dict(request)), encoding="utf-8")
            result_file.touch()
            argv = [str(WORKERS / f"{worker}.py"), str(request_file), str(result_file)]
            returncode, output = _run(argv, timeout=max(timeout, 0.1), environ=environ)
            return _read(result_file, returncode=returncode, output=output, limit_s=timeout)
    except OSError as error:
        return ChildResult(unreadable=f"{type(error).__name__}: {error}", returncode=0)


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for a moment: in memory where there is such a place, so that a read-only disk does not matter.

    Raises:
        OSError: nothing can be written anywhere.
    """
    folder = tempfile.mkdtemp(prefix="kernelguard-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)  # noqa: S108  # memory, not a disk
    try:
        yield Path(folder)
    finally:
        for root, folders, files in os.walk(folder, topdown=False):
            for name in files:
                (Path(root) / name).unlink()
            for name in folders:
                (Path(root) / name).rmdir()
        Path(folder).rmdir()


def leashed(script: str) -> list[str]:
    """The command line that runs a script of ours so that it dies with this process."""
    return [sys.executable, *interpreter_flags(), str(_LEASH), str(os.getpid()), script]


def interpreter_flags() -> list[str]:
    """The flags of this interpreter that change what it imports."""
    names = (("no_user_site", "-s"), ("no_site", "-S"), ("ignore_environment", "-E"), ("safe_path", "-P"))
    return [flag for name, flag in names if getattr(sys.flags, name, 0)]


def end_all() -> None:
    """End every child that is running now, and what they started."""
    with _lock:
        for pid in list(_running):
            kill_group(pid)


def kill_group(pid: int) -> None:
    """End a child that leads a process group, and the group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _run(argv: list[str], *, timeout: float, environ: Mapping[str, str] | None) -> tuple[int | None, str]:
    process = subprocess.Popen(
        [*leashed(argv[0]), *argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if environ is None else dict(environ),
        start_new_session=True,
    )
    with _lock:
        _running.add(process.pid)
    tail: deque[bytes] = deque()
    stream = process.stdout
    if stream is None:
        raise OSError("the child has no output")
    reader = threading.Thread(target=_keep_tail, args=(stream, tail), daemon=True)
    reader.start()
    try:
        returncode: int | None = process.wait(timeout)
    except subprocess.TimeoutExpired:
        returncode = None
    finally:
        # Also when it ended well: something it imported may have left processes behind.
        kill_group(process.pid)
        process.wait()
        with _lock:
            _running.discard(process.pid)
        # A grandchild in a session of its own can hold the pipe open for ever; its output is not waited for.
        reader.join(_GRACE_S)
    return returncode, b"".join(tail)[-_TAIL_BYTES:].decode("utf-8", "replace")


def _keep_tail(stream: IO[bytes], tail: deque[bytes]) -> None:
    kept = 0
    with stream:
        while True:
            chunk = os.read(stream.fileno(), 65_536)
            if not chunk:
                return
            tail.append(chunk)
            kept += len(chunk)
            while kept - len(tail[0]) > _TAIL_BYTES:
                kept -= len(tail.popleft())


def _read(result_file: Path, *, returncode: int | None, output: str, limit_s: float) -> ChildResult:
    records: list[Mapping[str, Any]] = []
    stage, unreadable, finished = "", "", False
    for number, line in enumerate(result_file.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            unreadable = f"line {number}: {error}"
            break
        if not isinstance(record, dict):
            unreadable = f"line {number}: not an object"
            break
        if "stage" in record:
            stage = str(record["stage"])
        elif record.get("done") is True:
            finished = True
        else:
            records.append(record)
    finished = finished and not unreadable
    return ChildResult(
        records=tuple(records),
        finished=finished,
        died_at="" if finished else stage,
        returncode=returncode,
        output=output,
        unreadable=unreadable,
        limit_s=limit_s,
    )


class Stopwatch:
    """Seconds since it was made, and what is left of a limit."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    def left(self, limit_s: float) -> float:
        """Of `limit_s` seconds, counted from when it was made; never negative."""
        return max(limit_s - self.seconds, 0.0)
