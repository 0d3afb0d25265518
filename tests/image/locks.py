"""A small lock, and resolved images, without any file behind them."""

from __future__ import annotations

from kernelguard.image.values import Resolved
from kernelguard.lock.values import Lock, LockedModel, LockedPath, LockedTarget, LockedTorch, Pin, Role


def resolved(name: str, digest: str = "sha256:" + "d" * 64) -> Resolved:
    return Resolved(name=name, reference=f"{name.partition(':')[0]}@{digest}", digest=digest)


def pin(name: str, version: str, role: Role = Role.DEPENDENCY, *, direct: bool = False) -> Pin:
    filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    return Pin(
        name=name,
        version=version,
        filename=filename,
        url=f"https://files.example/{filename}",
        sha256="1" * 64,
        role=role,
        direct=direct,
    )


def small_lock() -> Lock:
    return Lock(
        model=LockedModel(source="model", model_type="qwen3_5", sha256="2" * 64),
        intent=(("packed", "True"), ("signals", "position_ids,seq_idx"), ("dtype", "bfloat16 (assumed)")),
        transformers="5.24.0",
        target=LockedTarget(
            spec="h100",
            python="3.12",
            machine="x86_64",
            glibc="2.28",
            driver="580",
            gpus=("NVIDIA H100",),
            capabilities=("9.0",),
        ),
        torch=LockedTorch(version="2.13.0", cuda="13.0", channel="index", cxx11_abi=True, triton="3.7.1"),
        fast_paths=(LockedPath(symbol="chunk_gated_delta_rule", package="fla", served_by="fla-core 0.6.0", layers=48),),
        pins=(pin("torch", "2.13.0", Role.TORCH), pin("fla-core", "0.6.0", Role.KERNEL)),
        admits_launch=True,
    )
