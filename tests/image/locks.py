"""A small lock, and resolved images, without any file behind them."""

from __future__ import annotations

from kernelguard.image.values import Resolved
from kernelguard.lock.values import Lock
from samples import pin, sample_lock

__all__ = ["pin", "resolved", "small_lock"]


def resolved(name: str, digest: str = "sha256:" + "d" * 64) -> Resolved:
    return Resolved(name=name, reference=f"{name.partition(':')[0]}@{digest}", digest=digest)


def small_lock() -> Lock:
    return sample_lock(
        intent=(("packed", "True"), ("signals", "position_ids,seq_idx"), ("dtype", "bfloat16 (assumed)")),
    )
