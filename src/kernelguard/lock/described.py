"""Which machine does a lock describe? The environment that it would make, for a check that executes nothing."""

from __future__ import annotations

from contextlib import suppress

from packaging.version import InvalidVersion, Version

from kernelguard.lock.values import Lock
from kernelguard.observe.values import Distribution, Environment, Gpu, GpuState


def environment_of(lock: Lock, origin: str) -> Environment:
    """The environment that installing the lock would make; `origin` names it in the report."""
    target, torch = lock.target, lock.torch
    places = [*((p.name, p.version) for p in lock.pins), *((p.name, p.version) for p in lock.sources)]
    capabilities = [tuple(int(part) for part in c.split(".")[:2]) for c in target.capabilities]
    gpus = tuple(
        Gpu(name=name, capability=(c[0], c[1]) if len(c) == 2 else None)
        for name, c in zip(target.gpus or target.capabilities, capabilities, strict=False)
    )
    no_gpu = not lock.admits_launch
    return Environment(
        origin=origin,
        live=False,
        python=_version(target.python),
        system="Linux",
        machine=target.machine,
        glibc=_version(target.glibc),
        torch=_version(torch.version),
        torch_cuda=_version(torch.cuda),
        torch_is_cpu=not torch.cuda,
        cxx11_abi=torch.cxx11_abi,
        triton=_version(torch.triton),
        driver=_version(target.driver),
        gpus=gpus,
        gpu_state=GpuState.NONE if no_gpu else GpuState.USABLE,
        gpu_detail="the lock is for machines without a GPU" if no_gpu else "as the lock says; nothing was looked at",
        distributions={
            name: Distribution(name=name, version=version, location="", top_level=()) for name, version in places
        },
        transformers_version=_version(lock.transformers),
    )


def _version(text: str) -> Version | None:
    with suppress(InvalidVersion):
        return Version(text)
    return None
