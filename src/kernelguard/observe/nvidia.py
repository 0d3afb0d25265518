"""Which NVIDIA GPUs and driver does this machine have, and why can or can't torch use them?

`look` asks NVML and the files under /proc and /dev; `decide` is a pure function over what was seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.observe.values import Gpu, GpuState

_PROC = Path("/proc/driver/nvidia")
_DEV = Path("/dev")
# The first line of /proc/driver/nvidia/version reads like `... Kernel Module for x86_64  580.95.05  Release Build ...`.
_KERNEL_MODULE = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)")
# Values with which NVIDIA's container runtime gives a container no device at all.
_NO_DEVICES = frozenset({"", "void", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The NVIDIA devices of this machine, as far as this process may see them."""

    devices: bool
    """There is at least one device node, or NVML lists a device."""
    driver: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    detail: str = ""
    """The original words of NVML, when it has something to complain about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchReport:
    """What the `gpu` worker saw in the observed interpreter."""

    available: bool | None
    """`torch.cuda.is_available()` and a successful initialization; None: the worker did not get that far."""
    gpus: tuple[Gpu, ...] = ()
    error: str = ""
    """The original exception, or how the worker ended."""


def look(*, proc: Path = _PROC, dev: Path = _DEV) -> Hardware:
    """Ask NVML where a driver may be present, and files otherwise."""
    from_files = _files(proc, dev)
    if not from_files.devices and from_files.driver is None and not (dev / "dxg").exists():
        # No driver here. (/dev/dxg is WSL, where the driver leaves no trace under /proc.)
        return from_files
    return _nvml(from_files)


def _files(proc: Path, dev: Path) -> Hardware:
    driver = None
    try:
        found = _KERNEL_MODULE.search((proc / "version").read_text(encoding="utf-8", errors="replace"))
        driver = Version(found.group(1)) if found else None
    except OSError:
        driver = None
    names = []
    for information in sorted((proc / "gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", information.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
        names.append(model.group(1).strip() if model else "NVIDIA GPU")
    devices = any(re.fullmatch(r"nvidia\d+", path.name) for path in dev.glob("nvidia*"))
    return Hardware(
        devices=devices, driver=driver, gpus=tuple(Gpu(name=name, capability=None) for name in names if devices)
    )


def _nvml(fallback: Hardware) -> Hardware:
    import pynvml  # noqa: PLC0415  # only where there is a driver

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Hardware(
            devices=fallback.devices, driver=fallback.driver, gpus=fallback.gpus, detail=f"NVML: {_words(error)}"
        )
    try:
        driver = Version(_text(pynvml.nvmlSystemGetDriverVersion()))
        gpus = tuple(_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))
    except (pynvml.NVMLError, InvalidVersion) as error:
        return Hardware(
            devices=fallback.devices, driver=fallback.driver, gpus=fallback.gpus, detail=f"NVML: {_words(error)}"
        )
    finally:
        pynvml.nvmlShutdown()
    return Hardware(devices=bool(gpus), driver=driver, gpus=gpus)


def _gpu(pynvml: Any, index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(name=_text(pynvml.nvmlDeviceGetName(handle)), capability=(major, minor), memory_bytes=int(total))


def _text(value: str | bytes) -> str:
    # pynvml returned bytes before 12.
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def decide(
    hardware: Hardware, *, torch_is_cpu: bool | None, variables: Mapping[str, str], report: TorchReport | None
) -> tuple[GpuState, str]:
    """Whether torch can use a GPU here, and in words why not. `report` None: torch was not asked."""
    if report is not None and report.available:
        return GpuState.USABLE, ""
    machine = _machine(hardware)
    if torch_is_cpu:
        return GpuState.CPU_TORCH, f"torch is a CPU-only build; {machine}"
    if not hardware.devices:
        asked = variables.get("NVIDIA_VISIBLE_DEVICES")
        if hardware.driver is not None:
            # /proc is shared with the host: its driver is loaded, but no device was given to this container.
            why = f"NVIDIA_VISIBLE_DEVICES={asked}" if asked in _NO_DEVICES else "no /dev/nvidia* device node"
            return GpuState.HIDDEN, f"driver {hardware.driver} is loaded on the host, but no GPU is given here: {why}"
        return GpuState.NONE, machine
    visible = variables.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and _hides_all(visible, len(hardware.gpus)):
        return GpuState.HIDDEN, f"CUDA_VISIBLE_DEVICES={visible!r} hides every GPU; {machine}"
    if report is None:
        return GpuState.UNKNOWN, f"torch was not asked; {machine}"
    if report.available is None:
        return GpuState.UNKNOWN, f"torch could not be asked: {report.error}; {machine}"
    words = "; ".join(part for part in (report.error, hardware.detail) if part)
    return GpuState.BROKEN, f"{words or 'torch.cuda.is_available() is False'}; {machine}"


def _machine(hardware: Hardware) -> str:
    if not hardware.devices:
        return "no NVIDIA device on this machine"
    names = ", ".join(gpu.name for gpu in hardware.gpus) or "an NVIDIA GPU"
    return f"this machine has {names} (driver {hardware.driver or 'unknown'})"


def _hides_all(visible: str, count: int) -> bool:
    """CUDA reads the list up to the first entry that is no device; an invalid first entry hides everything."""
    first = visible.split(",", maxsplit=1)[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return False
    if not first.isdecimal():
        return True
    # Without a count (NVML did not answer) an index cannot be judged.
    return bool(count) and int(first) >= count
