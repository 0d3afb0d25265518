"""A lock for a person: what was chosen for each need, what it cost, and what to know about it."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from kernelguard.lock.values import Lock, Role
from kernelguard.report.terminal import line, note
from kernelguard.resolve.values import Resolution


def print_lock(console: Console, lock: Lock, resolution: Resolution) -> None:
    """Print the choice and its reasons; the files themselves hold every pin."""
    note(console, "model", f"{lock.model.model_type} with transformers {lock.transformers}", width=14)
    cuda = f"CUDA {lock.torch.cuda}" if lock.torch.cuda else "CPU build"
    triton = f", triton {lock.torch.triton}" if lock.torch.triton else ""
    note(console, "torch", f"{lock.torch.version}, {cuda}{triton} (from {lock.torch.channel})", width=14)
    for pin in lock.pins:
        if pin.role is Role.KERNEL:
            note(console, pin.name, f"{pin.version}", width=14)
    for text in resolution.notes:
        note(console, "note", text, width=14)
    admits = "" if lock.admits_launch else "; it admits no launch, because it holds no GPU build"
    line(console, Text(f"{len(lock.pins)} distributions, {len(lock.hub)} hub kernels, hashed{admits}"))
