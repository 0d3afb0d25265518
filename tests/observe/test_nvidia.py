"""Four ways to have no GPU, told apart."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.version import Version

from kernelguard.observe.nvidia import Hardware, TorchReport, decide, look
from kernelguard.observe.values import Gpu, GpuState

_H100 = Gpu(name="NVIDIA H100", capability=(9, 0))
_NOTHING = Hardware(devices=False)
_ONE = Hardware(devices=True, driver=Version("580.95.05"), gpus=(_H100,))
_HOST_ONLY = Hardware(devices=False, driver=Version("580.95.05"))
_MISMATCH = Hardware(devices=True, driver=None, detail="NVML: Driver/library version mismatch")
_YES = TorchReport(available=True, gpus=(_H100,))
_NO = TorchReport(available=False, error="RuntimeError: No CUDA GPUs are available")
_DIED = TorchReport(available=None, error="the worker was killed by SIGSEGV")


@pytest.mark.parametrize(
    ("hardware", "is_cpu", "variables", "report", "expected"),
    [
        pytest.param(_ONE, False, {}, _YES, (GpuState.USABLE, ""), id="usable"),
        pytest.param(_NOTHING, True, {}, None, (GpuState.CPU_TORCH, "build; no NVIDIA"), id="cpu-torch-no-gpu"),
        pytest.param(_ONE, True, {}, None, (GpuState.CPU_TORCH, "this machine has NVIDIA H100"), id="cpu-torch-on-gpu"),
        pytest.param(_NOTHING, False, {}, None, (GpuState.NONE, "no NVIDIA device"), id="none"),
        pytest.param(_NOTHING, None, {}, None, (GpuState.NONE, "no NVIDIA device"), id="none-and-no-torch"),
        pytest.param(
            _NOTHING,
            False,
            {"CUDA_VISIBLE_DEVICES": ""},
            None,
            (GpuState.NONE, "no NVIDIA device"),
            id="nothing-to-hide",
        ),
        pytest.param(
            _ONE, False, {"CUDA_VISIBLE_DEVICES": ""}, _NO, (GpuState.HIDDEN, "CUDA_VISIBLE_DEVICES=''"), id="hidden"
        ),
        pytest.param(_ONE, False, {"CUDA_VISIBLE_DEVICES": "-1"}, _NO, (GpuState.HIDDEN, "'-1'"), id="hidden-by-minus"),
        pytest.param(_ONE, False, {"CUDA_VISIBLE_DEVICES": "1"}, _NO, (GpuState.HIDDEN, "'1'"), id="index-too-large"),
        pytest.param(_ONE, None, {"CUDA_VISIBLE_DEVICES": ""}, None, (GpuState.HIDDEN, "H100"), id="no-torch"),
        pytest.param(
            _HOST_ONLY,
            False,
            {"NVIDIA_VISIBLE_DEVICES": "void"},
            None,
            (GpuState.HIDDEN, "NVIDIA_VISIBLE_DEVICES=void"),
            id="container-without-gpu",
        ),
        pytest.param(_HOST_ONLY, False, {}, None, (GpuState.HIDDEN, "no /dev/nvidia"), id="container-without-nodes"),
        pytest.param(_ONE, False, {"CUDA_VISIBLE_DEVICES": "0"}, _NO, (GpuState.BROKEN, "No CUDA GPUs"), id="broken"),
        pytest.param(_ONE, False, {"CUDA_VISIBLE_DEVICES": "GPU-12"}, _NO, (GpuState.BROKEN, "No CUDA"), id="by-uuid"),
        pytest.param(_MISMATCH, False, {}, _NO, (GpuState.BROKEN, "version mismatch"), id="driver-mismatch"),
        pytest.param(_ONE, False, {}, _DIED, (GpuState.UNKNOWN, "SIGSEGV"), id="worker-died"),
        pytest.param(_ONE, None, {}, None, (GpuState.UNKNOWN, "torch was not asked"), id="not-asked"),
    ],
)
def test_why_there_is_no_gpu(
    hardware: Hardware,
    is_cpu: bool | None,
    variables: dict[str, str],
    report: TorchReport | None,
    expected: tuple[GpuState, str],
) -> None:
    state, words = expected
    found, detail = decide(hardware, torch_is_cpu=is_cpu, variables=variables, report=report)
    assert found is state
    assert words in detail


_VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)  Tue Sep 23\n"
    "GCC version:  gcc version 12.3.0\n"
)


def test_files_say_driver_and_name_where_nvml_is_silent(tmp_path: Path) -> None:
    proc, dev = tmp_path / "proc", tmp_path / "dev"
    (proc / "gpus/0000:01:00.0").mkdir(parents=True)
    (proc / "version").write_text(_VERSION)
    (proc / "gpus/0000:01:00.0/information").write_text("Model: \t\t NVIDIA H200\nIRQ: 100\n")
    dev.mkdir()
    (dev / "nvidiactl").touch()
    seen = look(proc=proc, dev=dev)
    assert not seen.devices  # the control node alone is no GPU
    (dev / "nvidia0").touch()
    seen = look(proc=proc, dev=dev)
    assert seen.devices
    assert seen.driver is not None
    assert [gpu.name for gpu in seen.gpus][:1] != []


def test_a_machine_without_anything(tmp_path: Path) -> None:
    assert look(proc=tmp_path / "proc", dev=tmp_path) == Hardware(devices=False)


def test_old_proprietary_driver_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.182.03  Fri Feb 24\n")
    assert look(proc=tmp_path, dev=tmp_path).driver is not None


class _NvmlError(Exception):
    pass


# What NVML's calls answer on a machine with one H200; older bindings answer in bytes.
_ANSWERS = {
    "nvmlInit": None,
    "nvmlSystemGetDriverVersion": "580.95.05",
    "nvmlDeviceGetCount": 1,
    "nvmlDeviceGetHandleByIndex": 0,
    "nvmlDeviceGetName": b"NVIDIA H200",
    "nvmlDeviceGetCudaComputeCapability": (9, 0),
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=2**37),
    "nvmlShutdown": None,
}


def _nvml(calls: list[str], fails: str = "") -> ModuleType:
    """An NVML of which one call does not work."""

    def call(name: str, *_arguments: object) -> object:
        calls.append(name)
        if name == fails:
            raise _NvmlError("Driver/library version mismatch")
        return _ANSWERS[name]

    module = ModuleType("pynvml")
    module.__dict__.update({name: partial(call, name) for name in _ANSWERS}, NVMLError=_NvmlError)
    return module


def _machine(folder: Path) -> dict[str, Path]:
    (folder / "version").write_text(_VERSION)
    (folder / "nvidia0").touch()
    return {"proc": folder, "dev": folder}


def test_nvml_tells_what_files_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(calls))
    assert look(**_machine(tmp_path)) == Hardware(
        devices=True,
        driver=Version("580.95.05"),
        gpus=(Gpu(name="NVIDIA H200", capability=(9, 0), memory_bytes=2**37),),
    )
    assert set(calls) == set(_ANSWERS)


@pytest.mark.parametrize("fails", [name for name in _ANSWERS if name != "nvmlShutdown"])
def test_when_nvml_fails_its_words_are_kept_and_files_speak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", _nvml(calls, fails))
    seen = look(**_machine(tmp_path))
    assert seen.driver == Version("580.95.05")
    assert seen.devices
    assert seen.detail == "NVML: _NvmlError: Driver/library version mismatch"
    assert ("nvmlShutdown" in calls) is (fails != "nvmlInit")
