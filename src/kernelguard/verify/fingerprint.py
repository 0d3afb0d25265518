"""What exactly were the numbers measured on? Versions, the GPU, and the bytes of the compiled parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernelguard.observe.values import Environment
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Fingerprint

_KERNEL_DISTRIBUTIONS = (
    "apex",
    "causal-conv1d",
    "fla-core",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flash-linear-attention",
    "flash-qla",
    "kernels",
    "liger-kernel",
    "mamba-ssm",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "tilelang",
    "torch",
    "transformers",
    "triton",
)
_LARGE_BYTES = 512 * 2**20


def fingerprint(
    environment: Environment, requests: Sequence[ProbeRequest], *, model_type: str, binaries: Mapping[str, str]
) -> Fingerprint:
    """The fingerprint of an environment and of what was probed in it; pure."""

    def text(value: object) -> str:
        return "" if value is None else str(value)

    gpu = environment.gpus[0] if environment.gpus else None
    distributions = environment.distributions or {}
    return Fingerprint(
        gpu=gpu.name if gpu else "",
        capability=gpu.capability if gpu else None,
        driver=text(environment.driver),
        torch=text(environment.torch),
        cuda=text(environment.torch_cuda),
        triton=text(environment.triton),
        ptxas=text(environment.ptxas),
        transformers=text(environment.transformers_version),
        python=text(environment.python),
        machine=text(environment.machine),
        distributions={n: distributions[n].version for n in _KERNEL_DISTRIBUTIONS if n in distributions},
        binaries=dict(binaries),
        model_type=model_type,
        shapes=shapes_digest(requests),
    )


def shapes_digest(requests: Iterable[ProbeRequest]) -> str:
    """sha256 over every operation, dtype, shape and length; the order of the requests does not matter."""
    asked: list[dict[str, Any]] = []
    for request in requests:
        cases = [{k: v for k, v in c.to_json().items() if k not in {"repeats", "force", "pin"}} for c in request.cases]
        asked.append({"package": request.package, "symbol": request.symbol, "dtype": request.dtype, "cases": cases})
    asked.sort(key=lambda row: (row["package"], row["symbol"]))
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()


def binary_digests(environment: Environment) -> dict[str, str]:
    """sha256 of the shared objects and of ptxas of every kernel distribution, by path below its site-packages.

    torch itself is named by its version: hashing its gigabytes would take longer than the probes. A file that cannot
    be read has `unreadable: <reason>` in place of a digest.
    """
    found: dict[str, str] = {}
    for name in _KERNEL_DISTRIBUTIONS:
        distribution = (environment.distributions or {}).get(name)
        if distribution is None or name in {"torch", "transformers"}:
            continue
        site = Path(distribution.location)
        for top in distribution.top_level:
            for file in _binaries(site, top):
                found[str(file.relative_to(site))] = _digest(file)
    return dict(sorted(found.items()))


def _binaries(site: Path, top: str) -> Iterable[Path]:
    folder = site / top
    yield from site.glob(f"{top}*.so")
    if folder.is_dir():
        yield from (f for f in folder.rglob("*.so*") if f.is_file())
        yield from (f for f in folder.rglob("ptxas*") if f.is_file())


def _digest(file: Path) -> str:
    try:
        if file.stat().st_size > _LARGE_BYTES:
            return f"unreadable: larger than {_LARGE_BYTES} bytes"
        with file.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        return f"unreadable: {error.strerror}"
