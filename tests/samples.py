"""A lock without any file behind it, to be changed where a test needs it otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kernelguard.lock.values import Lock, LockedModel, LockedPath, LockedTarget, LockedTorch, Pin, Role

SHA = "a" * 64
_TARGET = LockedTarget(
    spec="h100",
    python="3.12",
    machine="x86_64",
    glibc="2.28",
    driver="580",
    gpus=("NVIDIA H100",),
    capabilities=("9.0",),
)


def pin(name: str, version: str, role: Role = Role.KERNEL, **more: Any) -> Pin:
    """A wheel for every platform, at an address that nobody has."""
    wheel = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    url = f"https://host.example/{wheel}"
    return replace(Pin(name=name, version=version, filename=wheel, url=url, sha256=SHA, role=role), **more)


def hopper(spec: str = "h100") -> LockedTarget:
    """One `h100` or `h200`."""
    return replace(_TARGET, spec=spec, gpus=(f"NVIDIA {spec.upper()}",))


def sample_lock(**changes: Any) -> Lock:
    """For one H100: torch 2.13 for CUDA 13.0, and fla-core for the gated delta rule."""
    lock = Lock(
        model=LockedModel(source="model", model_type="qwen3_5", sha256=SHA),
        intent=(("dtype", "bfloat16 (assumed)"), ("phase", "training")),
        transformers="5.24.0",
        target=_TARGET,
        torch=LockedTorch(version="2.13.0", cuda="13.0", channel="index", cxx11_abi=True, triton="3.7.1"),
        fast_paths=(LockedPath(symbol="chunk_gated_delta_rule", package="fla", served_by="fla-core 0.6.0", layers=48),),
        pins=(pin("torch", "2.13.0", Role.TORCH), pin("fla-core", "0.6.0")),
        admits_launch=True,
    )
    return replace(lock, **changes)
