"""A lock for a person: what was chosen for each need, what it cost, and what to know about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from kernelguard.judge.values import Status
from kernelguard.lock.values import Lock, Role
from kernelguard.report.terminal import close, note, print_header


def lock_header(lock: Lock, path: Path, python: Path | None = None) -> Iterator[tuple[str, str]]:
    """What a lock is about, and the interpreter that is held against it."""
    target, torch = lock.target, lock.torch
    yield "lock", str(path)
    yield "model", f"{lock.model.model_type} ({lock.model.source})"
    yield "transformers", lock.transformers
    if python is not None:
        yield "environment", str(python)
    cuda = f"CUDA {torch.cuda}" if torch.cuda else "CPU build"
    yield "torch", ", ".join(filter(None, (torch.version, cuda, f"triton {torch.triton}" if torch.triton else "")))
    names = zip(target.gpus, target.capabilities, strict=False)
    gpus = ", ".join(f"{name} (sm_{capability.replace('.', '')})" for name, capability in names)
    yield "gpu", (gpus or "none") + (f", driver {target.driver} or later" if target.driver else "")


def print_lock(console: Console, lock: Lock, path: Path) -> None:
    """Print the choice and its reasons; the files themselves hold every pin."""
    print_header(console, lock_header(lock, path))
    for pin in lock.pins:
        if pin.role is Role.KERNEL:
            note(console, pin.name, pin.version, width=24)
    for text in lock.notes:
        note(console, "note", text)
    said = [f"{lock.model.model_type}, {len(lock.pins)} distributions and {len(lock.hub)} hub kernels, hashed"]
    if not lock.admits_launch:
        said.append("it admits no launch, because it holds no GPU build")
    close(console, Status.PASS, *said, code=0)
