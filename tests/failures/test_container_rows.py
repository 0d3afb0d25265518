"""Rows about containers: Dockerfiles and images as people brought them, and the lock that would have built them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from image.locks import resolved, small_lock
from image.test_fitness import codes as of_image
from image.test_lint import codes as of_dockerfile
from kernelguard.errors import InputError
from kernelguard.image.fitness import Situation
from kernelguard.image.lint import lint
from kernelguard.image.recipe import make_recipe
from kernelguard.image.values import Builder
from kernelguard.judge.values import Status
from kernelguard.lock.values import SourcePin
from kernelguard.resolve.matrix import matrix


def says(text: str, driver: str = "") -> str:
    situation = Situation(drivers=matrix().drivers, driver=Version(driver) if driver else None)
    return " ".join(f.reason for f in lint(text, situation, matrix()) if f.status is Status.FAIL)


def test_f01_a_base_image_that_the_driver_refuses() -> None:
    told = says("FROM nvidia/cuda:12.8.1-base-ubuntu22.04\n", "551.78")
    assert "supports up to CUDA 12.4" in told
    assert "cuda>=12.8" in told


def test_f02_torch_for_cuda_13_and_a_driver_before_580() -> None:
    assert of_image(driver="570.86.15") == {"image-driver-too-old"}
    assert "wants CUDA 13.0" in says("FROM python:3.12\nRUN pip install torch==2.13.0\n", "570.86.15")


def test_f03_a_build_without_a_gpu_and_without_an_arch_list() -> None:
    base = "FROM nvidia/cuda:13.0.1-devel-ubuntu22.04\nRUN pip install torch==2.13.0\n"
    assert "image-no-arch-list" in of_dockerfile(f"{base}RUN pip install --no-build-isolation causal-conv1d\n")
    assert "image-build-probes-gpu" in of_dockerfile(f"{base}RUN python -c 'import torch; torch.cuda.init()'\n")
    source = _source()
    with pytest.raises(InputError, match="no list of GPU archs"):
        _recipe(sources=(replace(source, archs=()),))
    assert "TORCH_CUDA_ARCH_LIST='9.0'" in _recipe(sources=(source,)).dockerfile


def test_f06_no_compiler_in_the_image_that_runs() -> None:
    moved = (
        "FROM nvidia/cuda:12.8.1-devel-ubuntu22.04 AS build\nRUN pip install torch==2.9.0\n"
        "FROM nvidia/cuda:12.8.1-runtime-ubuntu22.04\nCOPY --from=build /opt/venv /opt/venv\n"
    )
    assert "image-no-compiler" in of_dockerfile(moved)
    assert of_image(compiler="") == {"image-no-compiler"}
    assert "gcc libc6-dev" in _recipe().dockerfile, "what is built here has one"


def test_f07_a_compiler_is_asked_for_whenever_triton_is_there() -> None:
    assert "image-no-compiler" in of_dockerfile("FROM python:3.12-slim\nRUN pip install torch==2.13.0\n")
    assert of_image(compiler="", torch_cuda="12.8", driver="") == {"image-no-compiler"}


@pytest.mark.parametrize("megabytes", [16, 64])
def test_f09_shared_memory_of_a_container(megabytes: int) -> None:
    assert of_image(shm_bytes=megabytes << 20, ranks=8) == {"image-shm"}


def test_f10_no_gpu_was_passed_in() -> None:
    assert of_image(gpu_asked=True, devices=[], libcuda=False) == {"image-no-gpu-passed"}


def test_f11_nvcc_and_torch_of_different_cudas() -> None:
    text = "FROM nvidia/cuda:11.8.0-devel-ubuntu22.04\nENV TORCH_CUDA_ARCH_LIST=8.0\nRUN pip install torch apex\n"
    assert "image-toolkit-mismatch" in of_dockerfile(text)
    with pytest.raises(InputError, match=r"built with nvcc 11\.8"):
        _recipe(sources=(replace(_source(), nvcc="11.8"),))


def _source() -> SourcePin:
    return SourcePin(
        name="causal-conv1d",
        version="1.7.0",
        url="file:///nowhere/causal_conv1d-1.7.0.tar.gz",
        sha256="0" * 64,
        commit="",
        requires=("ninja",),
        archs=("9.0",),
        arch_variable="TORCH_CUDA_ARCH_LIST",
        archs_note="",
        nvcc="13.0",
        cxx=17,
    )


def _recipe(**changes: Any) -> Any:
    from kernelguard.image.recipe import Extras
    from kernelguard.image.values import ContextFile

    lock = replace(small_lock(), **changes)
    files = (ContextFile(path="causal_conv1d-1.7.0.tar.gz", content=b"", sha256="0" * 64),)
    extras = Extras(sources=tuple((f"{n}-{pin.name}", files) for n, pin in enumerate(lock.sources)))
    return make_recipe(
        lock,
        name="kernelguard.lock",
        base=resolved("python:3.12-slim-bookworm"),
        toolkit=resolved("nvidia/cuda:13.0.1-devel-ubuntu22.04"),
        builder=Builder.LEGACY,
        cache=Path("/nowhere"),
        extras=extras,
    )
