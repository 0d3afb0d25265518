"""Dockerfiles that people bring: what is found in them, and what must not be."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.image.asking import Asked, lint_file
from kernelguard.image.dockerfile import chain, read_dockerfile
from kernelguard.image.fitness import Situation
from kernelguard.image.lint import lint
from kernelguard.judge.values import Status
from kernelguard.resolve.matrix import matrix

DEVEL = "FROM nvidia/cuda:12.8.1-devel-ubuntu22.04\nRUN apt-get install -y python3-dev python3-pip\n"
SLIM = "FROM python:3.12-slim-bookworm\n"
GOOD = (
    "FROM python:3.12-slim-bookworm@sha256:" + "a" * 64 + "\n"
    "RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*\n"
    "RUN pip install --require-hashes -r requirements.txt torch==2.13.0\n"
)


def codes(text: str, status: Status = Status.FAIL, *, driver: str = "", platform: str = "") -> set[str]:
    situation = Situation(drivers=matrix().drivers, driver=Version(driver) if driver else None, platform=platform)
    return {f.code for f in lint(text, situation, matrix()) if f.status is status}


def silent(text: str, **how: str) -> bool:
    found = {status: codes(text, status, **how) for status in (Status.FAIL, Status.WARN, Status.UNKNOWN)}
    return not any(found.values())


@pytest.mark.parametrize("driver", ["", "580.95.05"])
def test_nothing_is_said_of_a_good_one(driver: str) -> None:
    assert silent(GOOD, driver=driver)
    assert codes(GOOD, Status.PASS) == {"image-fit"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("RUN pip install torch==2.13.0", True),
        ("RUN pip install flash-linear-attention", True),
        ("RUN uv pip install --system liger-kernel", True),
        ("RUN apt-get install -y gcc libc6-dev\nRUN pip install torch==2.13.0", False),
        ("RUN apt-get install -y build-essential && pip install torch==2.13.0", False),
        ("RUN apt-get install -y clang libc6-dev && pip install torch==2.13.0", False),
        ("RUN apt-get install -y gcc libc6-dev && pip install torch==2.13.0 && apt-get purge -y gcc", True),
        ("RUN pip install numpy", False),
        ("RUN pip install torch==2.13.0 --index-url https://example.invalid/whl/cpu", False),
        ("RUN apt-get install -y libgcc-s1 && pip install torch==2.13.0", True),
    ],
)
def test_a_compiler_in_the_image_that_runs(lines: str, said: bool) -> None:
    assert ("image-no-compiler" in codes(f"{SLIM}{lines}\n")) is said


def test_the_compiler_has_to_be_in_the_last_stage() -> None:
    built = f"FROM python:3.12 AS build\nRUN python -m venv /venv && /venv/bin/pip install torch==2.13.0\n{SLIM}"
    assert "image-no-compiler" in codes(f"{built}COPY --from=build /venv /venv\n")
    assert "image-no-compiler" not in codes(f"{built}RUN apt-get install -y gcc\nCOPY --from=build /venv /venv\n")
    # A stage that starts from another has what that one installed.
    inherits = "FROM python:3.12-slim AS base\nRUN apt-get install -y gcc\nFROM base\nRUN pip install torch==2.13.0\n"
    assert "image-no-compiler" not in codes(inherits)


def test_an_unknown_base_is_unknown() -> None:
    text = "FROM registry.example/team/train:7\nRUN pip install torch==2.13.0\n"
    assert codes(text) == set()
    assert codes(text, Status.UNKNOWN) == {"image-no-compiler"}


def test_python_h_is_needed_too() -> None:
    base = "FROM ubuntu:24.04\nRUN apt-get install -y gcc libc6-dev python3 python3-pip"
    assert "image-no-python-headers" in codes(f"{base}\nRUN pip install torch==2.13.0\n")
    assert "image-no-python-headers" not in codes(f"{base} python3-dev\nRUN pip install torch==2.13.0\n")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("RUN pip install causal-conv1d --no-build-isolation", True),
        ("RUN pip install flash-attn==2.8.3", True),
        ("RUN git clone x && cd x && python setup.py install", True),
        ("RUN TORCH_CUDA_ARCH_LIST=9.0 pip install causal-conv1d --no-build-isolation", False),
        ("ENV TORCH_CUDA_ARCH_LIST=9.0\nRUN pip install causal-conv1d --no-build-isolation", False),
        ("ARG TORCH_CUDA_ARCH_LIST=9.0\nRUN pip install mamba-ssm --no-build-isolation", False),
        ("ENV FLASH_ATTN_CUDA_ARCHS=90\nRUN pip install flash-attn==2.8.3", False),
        ("RUN pip install ./flash_attn-2.8.3-cp312-cp312-linux_x86_64.whl", False),
        ("RUN pip install einops", False),
        ("ARG TORCH_CUDA_ARCH_LIST\nRUN pip install causal-conv1d --no-build-isolation", None),
    ],
)
def test_a_source_build_needs_its_arch_list(line: str, said: bool | None) -> None:
    assert ("image-no-arch-list" in codes(f"{DEVEL}{line}\n")) is bool(said)
    assert ("image-no-arch-list" in codes(f"{DEVEL}{line}\n", Status.WARN)) is (said is None)


@pytest.mark.parametrize(
    ("toolkit", "torch", "said"),
    [
        ("11.8.0", "torch==2.1.0+cu121 --index-url https://example.invalid/whl/cu121", True),
        ("11.8.0", "torch", True),
        ("12.8.1", "torch==2.9.0", False),
        ("12.8.1", "torch==2.13.0", True),
        ("13.0.1", "torch==2.13.0", False),
        ("12.4.1", "torch==2.9.0 --index-url https://example.invalid/whl/cu128", False),
    ],
)
def test_nvcc_and_torch_of_one_major(toolkit: str, torch: str, said: bool) -> None:
    text = f"FROM nvidia/cuda:{toolkit}-devel-ubuntu22.04\nENV TORCH_CUDA_ARCH_LIST=9.0\nRUN pip install {torch}\n"
    built = f"{text}RUN pip install apex --no-build-isolation\n"
    assert ("image-toolkit-mismatch" in codes(built)) is said
    assert "image-toolkit-mismatch" not in codes(text), "without a source build nvcc does not matter"


@pytest.mark.parametrize(
    ("text", "driver", "said"),
    [
        ("FROM nvidia/cuda:12.8.1-base-ubuntu22.04\n", "550", True),
        ("FROM nvidia/cuda:12.8.1-base-ubuntu22.04\n", "551.78", True),
        ("FROM nvidia/cuda:12.8.1-base-ubuntu22.04\n", "570.86.15", False),
        ("FROM nvidia/cuda:12.4.1-base-ubuntu22.04\n", "550", False),
        ("FROM nvidia/cuda:12.8.1-base-ubuntu22.04\nENV NVIDIA_DISABLE_REQUIRE=1\n", "550", False),
        ('FROM ubuntu:22.04\nENV NVIDIA_REQUIRE_CUDA="cuda>=12.8 brand=tesla,driver>=470"\n', "550", True),
        ("FROM python:3.12\nRUN pip install torch==2.13.0\n", "570", True),
        ("FROM python:3.12\nRUN pip install torch==2.13.0\n", "580", False),
        ("FROM python:3.12\nRUN pip install torch==2.9.0\n", "535", False),
        ("FROM nvidia/cuda:12.8.1-base-ubuntu22.04\n", "", False),
    ],
)
def test_the_driver_that_the_image_demands(text: str, driver: str, said: bool) -> None:
    assert ("image-driver-too-old" in codes(text, driver=driver)) is said


@pytest.mark.parametrize(
    ("base", "said"),
    [
        ("python", True),
        ("python:latest", True),
        ("ghcr.io/team/train", True),
        ("localhost:5000/train", True),
        ("localhost:5000/train:1", False),
        ("python:3.12", False),
        ("python@sha256:" + "0" * 64, False),
    ],
)
def test_latest(base: str, said: bool) -> None:
    assert ("image-latest" in codes(f"FROM {base}\n", Status.WARN)) is said


def test_a_stage_of_ones_own_and_scratch_are_no_images() -> None:
    assert "image-latest" not in codes("FROM python:3.12 AS Base\nFROM base\nFROM scratch\n", Status.WARN)
    assert "image-latest" in codes("ARG TAG\nFROM python:$TAG\n", Status.WARN)
    assert "image-latest" not in codes("ARG TAG=3.12\nFROM python:${TAG}\n", Status.WARN)


@pytest.mark.parametrize(
    ("line", "code", "status"),
    [
        ("RUN pip install flash-attn || true", "image-swallowed-failure", Status.FAIL),
        ('RUN pip install flash-attn || echo "no FA2"', "image-swallowed-failure", Status.FAIL),
        ("RUN set +e; pip install causal-conv1d", "image-swallowed-failure", Status.FAIL),
        ("RUN pip install black || true", "image-swallowed-failure", Status.WARN),
        ("RUN python -c 'import torch; assert torch.cuda.is_available()'", "image-build-probes-gpu", Status.FAIL),
        ("RUN nvidia-smi", "image-build-probes-gpu", Status.FAIL),
        ("RUN CAUSAL_CONV1D_SKIP_CUDA_BUILD=TRUE pip install causal-conv1d", "image-skips-cuda-build", Status.FAIL),
        ("ENV MAMBA_SKIP_CUDA_BUILD=TRUE\nRUN pip install mamba-ssm", "image-skips-cuda-build", Status.FAIL),
        ("ENV CUDA_VISIBLE_DEVICES=", "image-hides-gpus", Status.FAIL),
        ("ENV NVIDIA_VISIBLE_DEVICES=void", "image-hides-gpus", Status.FAIL),
        ("RUN pip install torch==2.12.0\nRUN pip install torch==2.13.0", "image-torch-moved", Status.FAIL),
        ("RUN pip install torch==2.13.0\nRUN pip install -U trl", "image-torch-moved", Status.WARN),
        ("RUN apt-get install -y cuda-compat-12-8", "image-cuda-compat", Status.WARN),
    ],
)
def test_a_line_that_costs_a_run(line: str, code: str, status: Status) -> None:
    assert code in codes(f"{DEVEL}{line}\n", status)


@pytest.mark.parametrize(
    "line",
    [
        "RUN test -f x || true",
        "RUN CUDA_VISIBLE_DEVICES= pip install einops",
        "ENV CUDA_VISIBLE_DEVICES=0",
        "RUN pip install torch==2.13.0\nRUN pip install -U --no-deps trl",
        "RUN pip install torch==2.13.0\nRUN pip install -U pip",
        "RUN pip install torch==2.13.0 && pip install trl",
        "# RUN pip install flash-attn || true",
    ],
)
def test_a_line_that_costs_nothing(line: str) -> None:
    said = {"image-swallowed-failure", "image-hides-gpus", "image-torch-moved"}
    assert not said & (codes(f"{DEVEL}{line}\n") | codes(f"{DEVEL}{line}\n", Status.WARN))


@pytest.mark.parametrize(("driver", "status"), [("580.95", Status.FAIL), ("550.54.14", Status.FAIL), ("520", None)])
def test_cuda_compat_on_a_driver_that_is_new_enough(driver: str, status: Status | None) -> None:
    text = f"{DEVEL}ENV LD_LIBRARY_PATH=/usr/local/cuda/compat:$LD_LIBRARY_PATH\nRUN pip install torch==2.9.0\n"
    assert ("image-cuda-compat" in codes(text, driver=driver)) is (status is not None)


def test_what_ai_runtime_asks_for() -> None:
    scratch = "FROM ubuntu:24.04\nWORKDIR /app\nCMD python train.py\n"
    assert "image-air" in codes(scratch, platform="air")
    assert "image-air" not in codes(scratch)
    good = (
        "FROM ubuntu:24.04\nENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility\n"
        "ENV OPENSSL_FORCE_FIPS_MODE=0\n"
        "RUN mkdir -p /databricks/python/bin && ln -s /usr/bin/python3 /databricks/python/bin/python\n"
    )
    assert "image-air" not in codes(good, platform="air") | codes(good, Status.WARN, platform="air")
    relative = f"{good}WORKDIR /app\nCMD python train.py\n"
    assert codes(relative, Status.WARN, platform="air") == {"image-air"}
    assert "image-air" not in codes(relative.replace("train.py", "/app/train.py"), Status.WARN, platform="air")


def test_continuations_comments_heredocs_and_variables_are_read() -> None:
    text = (
        "# syntax=docker/dockerfile:1\nARG BASE=python:3.12\nFROM --platform=linux/amd64 ${BASE} AS One\n"
        'ENV A=1 B="two words"\nRUN pip install \\\n  # a comment\n\n  flash-attn \\\n  || true\n'
        "RUN <<EOF\npip install causal-conv1d\nEOF\nFROM one\nENV C $B\nRUN echo $C\n"
    )
    first, last = read_dockerfile(text)
    assert (first.base, first.name) == ("python:3.12", "one")
    assert next(i.text for i in first.instructions if i.word == "RUN") == "pip install flash-attn || true"
    assert "pip install causal-conv1d" in first.instructions[-1].text
    assert last.environment == {"A": "1", "B": "two words", "C": "two words"}
    assert chain((first, last), last) == (first, last)


@pytest.mark.parametrize("text", ["", "# only words\n", "RUN true\nFROM python\n"])
def test_what_is_no_dockerfile(text: str) -> None:
    with pytest.raises(InputError):
        read_dockerfile(text)


def test_the_context_is_looked_at_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Dockerfile").write_text(GOOD)
    assert {f.code for f in lint_file(tmp_path, Asked())} == {"image-fit"}
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("agent.sock")
        with (tmp_path / "model.safetensors").open("wb") as handle:
            os.truncate(handle.fileno(), 10 << 30)
        os.mkfifo(tmp_path / "pipe")
        told = {f.reason for f in lint_file(tmp_path, Asked()) if f.code == "image-context"}
        assert len(told) == 3
        assert any("agent.sock is a socket" in reason for reason in told)
        assert any("model.safetensors has 10.0 GB" in reason for reason in told)
        (tmp_path / ".dockerignore").write_text("*.sock\n**/*.safetensors\npipe\n")
        assert {f.code for f in lint_file(tmp_path, Asked())} == {"image-fit"}
