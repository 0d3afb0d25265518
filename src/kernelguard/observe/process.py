"""What became of a worker: its records, the stage it died at, and its last words.

A worker (`kernelguard/workers/`) is run by the *observed* interpreter. It may crash, hang or print garbage; all of
that is a result here, never an exception.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Record = Mapping[str, Any]

_WORKERS = Path(__file__).resolve().parent.parent / "workers"
_TAIL_BYTES = 8_192
_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResult:
    """Everything that is known about one run of a worker."""

    records: tuple[Record, ...]
    """What it reported, without the stage markers."""
    finished: bool
    """It said itself that it was done. Otherwise the records are only the part before it died."""
    died_at: str = ""
    """The last stage it announced, when it did not finish."""
    returncode: int | None = None
    """None: it was killed at the time limit."""
    timed_out: bool = False
    output: str = ""
    """The end of what the worker, and everything it imported, printed."""
    unreadable: str = ""
    """Why the result file could not be read to its end; the records before that point are kept."""

    @property
    def signal(self) -> str:
        """The name of the signal that killed it, `SIGSEGV`, or nothing."""
        return signal_name(-self.returncode) if self.returncode is not None and self.returncode < 0 else ""

    def of_kind(self, kind: str) -> Iterator[Record]:
        """The records of one kind."""
        return (record for record in self.records if record.get("kind") == kind)

    def ending(self) -> str:
        """How it ended, in words, for a person; empty when it finished."""
        if self.finished:
            return ""
        if self.timed_out:
            how = "did not end within its time limit"
        elif self.signal:
            how = f"was killed by {self.signal}"
        elif self.unreadable:
            how = f"left an unreadable result ({self.unreadable})"
        else:
            how = f"ended with exit code {self.returncode} and no result"
        return f"{how} at stage '{self.died_at}'" if self.died_at else how


def signal_name(number: int) -> str:
    """`SIGABRT` for 6; `signal 64` for one that has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_worker(
    python: str,
    worker: str | Path,
    request: Mapping[str, Any],
    *,
    timeout: float,
    memory_bytes: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> WorkerResult:
    """Run `workers/<worker>.py`, or the file `worker`, in the interpreter `python` for at most `timeout` seconds.

    The worker sees this process's environment (or `environ`) unchanged, because that decides which kernels a training
    process would find. It gets a session of its own, and whatever is left of its process group is killed at the end.
    `memory_bytes` limits its address space; CUDA cannot come up under such a limit.

    Raises:
        OSError: `python` cannot be executed at all.
    """
    with tempfile.TemporaryDirectory(prefix="kernelguard-") as folder:
        request_file = Path(folder, "request.json")
        result_file = Path(folder, "result.jsonl")
        request_file.write_text(json.dumps(dict(request)), encoding="utf-8")
        result_file.touch()
        script = worker if isinstance(worker, Path) else _WORKERS / f"{worker}.py"
        argv = [python, str(script), str(request_file), str(result_file)]
        returncode, output = run_limited(argv, timeout=timeout, memory_bytes=memory_bytes, environ=environ)
        return _read(result_file, returncode=returncode, output=output)


def run_limited(
    argv: list[str], *, timeout: float, memory_bytes: int | None = None, environ: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Exit code (None: time limit) and the end of the output of one child process group, all of which is over then.

    Raises:
        OSError: it cannot be executed at all.
    """
    process = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=None if environ is None else dict(environ),
        start_new_session=True,
    )
    tail: deque[bytes] = deque()
    assert process.stdout is not None  # noqa: S101  # PIPE was asked for
    reader = threading.Thread(target=_keep_tail, args=(process.stdout, tail), daemon=True)
    reader.start()
    try:
        if memory_bytes is not None:
            _limit_memory(process.pid, memory_bytes)
        # `Popen.wait` with a time limit looks only every 50 ms; without one it returns at once.
        waiter = threading.Thread(target=process.wait, daemon=True)
        waiter.start()
        waiter.join(timeout)
        returncode = None if waiter.is_alive() else process.returncode
    finally:
        # Also when the worker ended well: something it imported may have left processes behind.
        _kill_group(process.pid)
        process.wait()
        # A grandchild in a session of its own can hold the pipe open for ever; its output is not waited for.
        reader.join(_GRACE_S)
    return returncode, b"".join(tail)[-_TAIL_BYTES:].decode("utf-8", "replace")


def _keep_tail(stream: IO[bytes], tail: deque[bytes]) -> None:
    kept = 0
    with stream:
        while chunk := os.read(stream.fileno(), 65_536):
            tail.append(chunk)
            kept += len(chunk)
            while kept - len(tail[0]) > _TAIL_BYTES:
                kept -= len(tail.popleft())


def _limit_memory(pid: int, memory_bytes: int) -> None:
    import resource  # noqa: PLC0415  # not on every platform

    resource.prlimit(pid, resource.RLIMIT_AS, (memory_bytes, memory_bytes))


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # All gone; or (macOS) only zombies are left.
        return


def _read(result_file: Path, *, returncode: int | None, output: str) -> WorkerResult:
    records: list[Record] = []
    stage = ""
    finished = False
    unreadable = ""
    for number, line in enumerate(result_file.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
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
    return WorkerResult(
        records=tuple(records),
        finished=finished,
        died_at="" if finished else stage,
        returncode=returncode,
        timed_out=returncode is None and not finished,
        output=output,
        unreadable=unreadable,
    )
