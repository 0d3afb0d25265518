"""What exactly were the numbers measured on? Versions, the GPU, and the bytes of the compiled parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from kernelguard.lock.record import parse_record, record_digest
from kernelguard.observe.values import KERNEL_DISTRIBUTIONS, Distribution, Environment
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Fingerprint

_SWITCHES = ("FLA_", "TRITON_", "CAUSAL_CONV1D_", "MAMBA_", "FLASH_ATTENTION_", "FLASH_ATTN_")
"""Environment variables that decide which kernel runs or how it is compiled."""
_LARGE_BYTES = 512 * 2**20


def fingerprint(
    environment: Environment,
    requests: Sequence[ProbeRequest],
    *,
    model_type: str,
    binaries: Mapping[str, str],
    records: Mapping[str, str] | None = None,
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
        distributions={n: distributions[n].version for n in KERNEL_DISTRIBUTIONS if n in distributions},
        binaries=dict(binaries),
        variables={k: v for k, v in environment.variables.items() if k.startswith(_SWITCHES) and not k.endswith("DIR")},
        records=dict(records or {}),
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
    for name in KERNEL_DISTRIBUTIONS:
        distribution = (environment.distributions or {}).get(name)
        if distribution is None or name in {"torch", "transformers"}:
            continue
        site = Path(distribution.location)
        for top in distribution.top_level:
            for file in _binaries(site, top):
                found[str(file.relative_to(site))] = _digest(file)
    return dict(sorted(found.items()))


def record_digests(environment: Environment) -> dict[str, str]:
    """By kernel distribution: one sha256 over its RECORD, which covers the Python files that Triton compiles as well.

    It says which build was installed, and equals `files_sha256` of a lock's pin. One without a RECORD is left out; one
    that cannot be read has `unreadable: <reason>` in place of a digest.
    """
    found: dict[str, str] = {}
    for name in KERNEL_DISTRIBUTIONS:
        distribution = (environment.distributions or {}).get(name)
        record = None if distribution is None else _record(distribution)
        if record is None:
            continue
        try:
            found[name] = record_digest(parse_record(record.read_text("utf-8")))
        except (OSError, ValueError) as error:
            found[name] = f"unreadable: {error}"
    return found


def _record(distribution: Distribution) -> Path | None:
    """The RECORD in the distribution's own metadata folder, `causal_conv1d-1.7.0.dist-info`."""
    for folder in Path(distribution.location).glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").partition("-")
        same = canonicalize_name(name) == distribution.name and version == distribution.version
        if same and (folder / "RECORD").is_file():
            return folder / "RECORD"
    return None


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
