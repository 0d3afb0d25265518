"""Whose is a container, or a name? The id of a run, and whether that run still lives."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path


def id_of(pid: int) -> str:
    """This machine, process and moment, so that a later run can tell whether its owner still lives."""
    return f"{_machine()}-{pid}-{_started(pid)}"


def abandoned(run_id: str) -> bool:
    """Whether this is the id of a run on this machine whose process is gone."""
    machine, _, rest = run_id.partition("-")
    pid, _, started = rest.partition("-")
    return machine == _machine() and pid.isdigit() and _started(int(pid)) != started


def _machine() -> str:
    # A host name is nobody else's business, and may hold what a tag cannot.
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = f"{socket.gethostname()} {boot.read_text('utf-8') if boot.is_file() else ''}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty: there is none. Tells a new process with an old number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
