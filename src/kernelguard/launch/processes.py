"""Which processes belong to this node's job, and how are they ended for good? Linux; standard library, Python 3.9."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> bool:
    """Make this process the parent of whatever its descendants leave behind; False where the system cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """In a child that is about to be executed: get SIGTERM when the parent dies, whatever it dies of."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def _prctl(option: int, value: int) -> bool:
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        # Not Linux: then a helper that outlives its rank is not found.
        return False


def children(pid: int) -> list[int]:
    """The direct children of a process; none when it is gone."""
    found: list[int] = []
    with suppress(OSError):
        tasks = list((_PROC / str(pid) / "task").iterdir())
        if tasks and not (tasks[0] / "children").exists():
            return _children_by_scan(pid)
        for task in tasks:
            with suppress(OSError):
                found += [int(word) for word in (task / "children").read_text().split()]
    return found


def _children_by_scan(pid: int) -> list[int]:
    """For kernels built without /proc/PID/task/TID/children."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # The name in parentheses may hold spaces and parentheses of its own.
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    found.append(int(entry.name))
    return found


def descendants(pid: int) -> list[int]:
    """Every process below `pid`, parents before children."""
    found: list[int] = []
    queue = children(pid)
    while queue:
        one = queue.pop(0)
        if one not in found:
            found.append(one)
            queue += children(one)
    return found


def ranks(pid: int) -> dict[int, int]:
    """Rank by process id: the topmost processes below `pid` that torchrun has given a rank."""
    found: dict[int, int] = {}
    queue = children(pid)
    while queue:
        one = queue.pop(0)
        rank = _rank_of(one)
        if rank is None:
            queue += children(one)
        else:
            found[one] = rank
    return found


def _rank_of(pid: int) -> int | None:
    try:
        block = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    variables = dict(entry.partition(b"=")[::2] for entry in block.split(b"\0") if b"=" in entry)
    if b"LOCAL_RANK" not in variables or not variables.get(b"RANK", b"").isdigit():
        return None
    return int(variables[b"RANK"])


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; one without would die of it."""
    with suppress(OSError, ValueError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def send(pid: int, number: int) -> bool:
    """Send a signal; False when the process is gone."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def end_all(pid: int, *, grace_s: float) -> list[int]:
    """End everything below `pid`: SIGTERM, then SIGKILL after `grace_s`. Returns what does not die even so.

    Only where `adopt_orphans` worked are processes found whose own parent is gone.
    """
    for one in descendants(pid):
        send(one, signal.SIGTERM)
    _wait_gone(pid, grace_s)
    for _ in range(3):
        # A process that was killed while it forked leaves a child that only a second look finds.
        for one in descendants(pid):
            send(one, signal.SIGKILL)
        if _wait_gone(pid, 2.0):
            return []
    return list(_alive(pid))


def _wait_gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        reap()
        if not any(True for _ in _alive(pid)):
            return True
        if time.monotonic() > end:
            return False
        time.sleep(0.05)


def _alive(pid: int) -> Iterator[int]:
    for one in descendants(pid):
        with suppress(OSError):
            if (_PROC / str(one) / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield one


def reap() -> None:
    """Take the exit status of every dead child, so that none stays behind as a zombie."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
