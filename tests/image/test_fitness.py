"""What an image has, and what that means. The facts are those that `look.py` prints."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.image import look
from kernelguard.image.fitness import Situation, image_findings
from kernelguard.judge.values import Status
from kernelguard.resolve.matrix import matrix

GOOD = {
    "python": "3.12.3",
    "executable": "/opt/venv/bin/python",
    "triton": "3.7.1",
    "torch": "2.13.0",
    "torch_cuda": "13.0",
    "compiler": "cc",
    "libc_headers": True,
    "python_headers": True,
    "include": "/usr/local/include/python3.12",
    "nvcc": "",
    "uncompiled": [],
    "compat": [],
    "shm_bytes": 16 << 30,
    "devices": ["/dev/nvidia0"],
    "control": True,
    "libcuda": True,
    "driver": "580.95.05",
    "environment": {},
    "databricks_python": False,
    "os": "debian 12",
    "distributions": {},
}


def codes(status: Status = Status.FAIL, *, driver: str = "", tags: tuple[str, ...] = (), **changes: Any) -> set[str]:
    how = {n: changes.pop(n) for n in ("gpu_asked", "ranks", "platform", "shm") if n in changes}
    how["shm_bytes"] = how.pop("shm", None)
    situation = Situation(drivers=matrix().drivers, driver=Version(driver) if driver else None, **how)
    return {f.code for f in image_findings({**GOOD, **changes}, situation, tags=tags) if f.status is status}


def test_nothing_is_said_of_a_good_one() -> None:
    assert codes(gpu_asked=True, ranks=8) == codes(Status.WARN) == codes(Status.UNKNOWN) == set()
    assert codes(Status.PASS) == {"image-fit"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"compiler": ""}, "image-no-compiler"),
        ({"libc_headers": False}, "image-no-compiler"),
        ({"python_headers": False}, "image-no-python-headers"),
        ({"environment": {"NVIDIA_VISIBLE_DEVICES": "void"}}, "image-hides-gpus"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, "image-hides-gpus"),
        ({"environment": {"NVIDIA_DRIVER_CAPABILITIES": "utility"}}, "image-hides-gpus"),
        ({"driver": "570.86.15"}, "image-driver-too-old"),
        ({"compat": ["/usr/local/cuda/compat"]}, "image-cuda-compat"),
        ({"shm_bytes": 64 << 20, "ranks": 8}, "image-shm"),
        ({"shm": 64 << 20, "ranks": 2}, "image-shm"),
        ({"platform": "air"}, "image-air"),
    ],
)
def test_one_thing_is_wrong(changes: dict[str, Any], code: str) -> None:
    assert codes(**changes) == {code}


def test_packages_without_bytecode_are_a_warning() -> None:
    assert codes(Status.WARN, uncompiled=["torch"]) == {"image-no-bytecode"}
    assert codes(uncompiled=["torch"]) == set()


def test_bytecode_is_looked_for_where_this_python_would_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "compiled_or_not"
    package.mkdir()
    for name in ("__init__", "one", "two"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    assert look.uncompiled("compiled_or_not")
    compileall.compile_dir(package, quiet=1)
    assert not look.uncompiled("compiled_or_not")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path / "elsewhere"))
    assert look.uncompiled("compiled_or_not")
    assert not look.uncompiled("no_such_package")


def test_triton_alone_needs_a_compiler() -> None:
    assert codes(triton="", compiler="", python_headers=False) == set()


def test_an_old_driver_and_a_container_without_a_gpu_are_told_apart() -> None:
    without = codes(gpu_asked=True, devices=[], libcuda=False, driver="550.54.14")
    assert without == {"image-no-gpu-passed"}, "not the driver's age"
    assert codes(gpu_asked=True, driver="550.54.14") == {"image-driver-too-old"}
    assert codes(gpu_asked=True, libcuda=False) == {"image-no-gpu-passed"}
    assert codes(devices=[], libcuda=False, driver="") == set(), "nobody asked for one"


def test_shared_memory_is_no_concern_of_one_process() -> None:
    assert codes(shm_bytes=64 << 20, ranks=1) == set()
    assert codes(Status.WARN, shm_bytes=64 << 20) == {"image-shm"}


def test_what_is_no_image_to_train_in_is_not_a_pass() -> None:
    assert codes(Status.UNKNOWN, torch="", triton="", torch_cuda="") == {"image-no-torch"}
    assert codes(Status.PASS, torch="", triton="", torch_cuda="") == set()


def test_latest_is_a_warning() -> None:
    assert codes(Status.WARN, tags=("train:latest", "train:v1")) == {"image-latest"}


def test_the_facts_are_what_this_machine_has() -> None:
    script = Path(look.__file__)
    done = subprocess.run([sys.executable, "-I", script], capture_output=True, text=True, check=True)
    facts = json.loads(done.stdout)
    assert set(facts) == set(GOOD)
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["distributions"]["pytest"] == pytest.__version__
    assert facts["python_headers"] is Path(facts["include"], "Python.h").is_file()
