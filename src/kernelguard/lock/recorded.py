"""A lock of what is installed already: for machines that were set up by hand, where no index can be asked.

It pins versions and the digest of every file's digest, so that it can be held against that environment and against
every rank. It cannot be installed from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kernelguard.declare.values import FastPath, Intent, ModelConfig
from kernelguard.errors import UndeterminedError
from kernelguard.lock.check import Inventory
from kernelguard.lock.parts import locked_intent, locked_model
from kernelguard.lock.record import record_digest
from kernelguard.lock.values import Lock, LockedPath, LockedTarget, LockedTorch, Pin, Role
from kernelguard.observe.values import KERNEL_DISTRIBUTIONS, Bindings, BoundTo, Environment
from kernelguard.resolve.archs import text as capability_text
from kernelguard.resolve.matrix import matrix

NOTE = "recorded from an installed environment: it can be checked, and nothing can be installed from it"
_NOT_PINNED = frozenset({"pip"})
_TORCH_FAMILY = ("torch", "triton", "nvidia-", "cuda-")


def record_lock(
    model: ModelConfig,
    intent: Intent,
    fast_paths: Sequence[FastPath],
    *,
    environment: Environment,
    inventory: Inventory,
    bindings: Bindings | None,
) -> Lock:
    """The lock of an environment as it is.

    `inventory` has to hold every RECORD (`take_inventory(..., records=True)`), with the distributions of
    `kernel_distributions` hashed; `fast_paths` are those that the run needs. What holds no kernel and has no RECORD
    that its files equal is left out, and a note says so.

    Raises:
        UndeterminedError: something that a lock needs is not installed, or is not what its RECORD says.
    """
    if environment.torch is None or environment.python is None or environment.machine is None:
        raise UndeterminedError(f"{environment.origin} has no torch, so there is nothing to lock")
    kernels = {name for path in fast_paths for name in _distributions(path, environment)}
    # A verdict is of all kernel packages that are installed, so a lock that left one out would fit none. What is
    # compared of transformers is its release, which a lock has in any case.
    held = kernels | (set(KERNEL_DISTRIBUTIONS) - {"transformers"})
    pins, left_out = [], []
    for name, found in sorted(inventory.distributions.items()):
        if name in _NOT_PINNED:
            continue
        torch = name.startswith(_TORCH_FAMILY)
        if name not in held and not torch and (found["changed"] or not found["record"]):
            # What another package manager installed, or a person changed; it holds no kernel.
            left_out.append(name)
            continue
        if found["changed"]:
            path, problem = found["changed"][0]
            raise UndeterminedError(
                f"{name}: {path} {problem}; what was changed by hand cannot be locked", hint=_hint(name, kernels)
            )
        if not found["record"]:
            raise UndeterminedError(
                f"{name} {found['version']} has no RECORD, so nothing says what its files are",
                hint=_hint(name, kernels),
            )
        digest = record_digest((path, sha) for path, sha in found["record"])
        pins.append(
            Pin(
                name=name,
                version=str(found["version"]),
                filename=f"{name}-{found['version']}.dist-info/RECORD",
                url=f"file://{found['location']}",
                sha256=digest,
                role=Role.KERNEL if name in kernels else Role.TORCH if torch else Role.DEPENDENCY,
                source="recorded from an installed environment",
                files_sha256=digest,
            )
        )
    served = {path.symbol: _served(path, environment, bindings) for path in fast_paths}
    gpus = [gpu for gpu in environment.gpus if gpu.capability is not None]
    cuda = environment.torch_cuda
    return Lock(
        model=locked_model(model),
        intent=tuple(sorted(locked_intent(intent))),
        transformers=str(environment.transformers_version or ""),
        target=LockedTarget(
            spec="this machine",
            python=f"{environment.python.major}.{environment.python.minor}",
            machine=environment.machine,
            glibc=str(environment.glibc or ""),
            driver=matrix().drivers.floor_text(cuda) if cuda is not None else "",
            gpus=tuple(dict.fromkeys(gpu.name for gpu in gpus)),
            capabilities=tuple(sorted({capability_text(g.capability) for g in gpus if g.capability is not None})),
        ),
        torch=LockedTorch(
            version=str(environment.torch),
            cuda=str(cuda or ""),
            channel="installed",
            cxx11_abi=bool(environment.cxx11_abi),
            triton=str(environment.triton or ""),
        ),
        fast_paths=tuple(
            LockedPath(symbol=p.symbol, package=p.package, served_by=served[p.symbol], layers=p.layers)
            for p in fast_paths
        ),
        pins=tuple(pins),
        admits_launch=cuda is not None and bool(gpus) and all(served.values()),
        notes=(NOTE, *([f"not pinned, as no RECORD tells their files: {', '.join(left_out)}"] if left_out else [])),
    )


def _hint(name: str, needed: Collection[str]) -> str:
    """What to do about a kernel distribution that cannot be pinned."""
    unused = "" if name in needed else f", or pip uninstall {name}, which this run does not need"
    return f"pip install --force-reinstall --no-deps {name}{unused}"


def kernel_distributions(fast_paths: Sequence[FastPath], environment: Environment) -> frozenset[str]:
    """The installed distributions that serve fast paths, and torch and triton themselves."""
    return frozenset({name for p in fast_paths for name in _distributions(p, environment)} | {"torch", "triton"})


def _distributions(path: FastPath, environment: Environment) -> list[str]:
    """What holds the package of a fast path: `fla` is in two distributions."""
    owners = [n for n, d in (environment.distributions or {}).items() if path.package in d.top_level]
    named = [path.distribution] if path.distribution in (environment.distributions or {}) else []
    return [*owners, *named]


def _served(path: FastPath, environment: Environment, bindings: Bindings | None) -> str:
    """`causal-conv1d 1.7.0`, where the model is really bound to it."""
    mine = [b for b in (bindings.bindings if bindings is not None else ()) if b.symbol == path.symbol]
    if not any(b.bound_to in {BoundTo.KERNEL, BoundTo.HUB} for b in mine):
        return ""
    for name in _distributions(path, environment):
        return f"{name} {(environment.distributions or {})[name].version}"
    return path.package
