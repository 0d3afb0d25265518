"""Which software was a trace recorded with? What kineto writes into its head; torch's own version it does not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def versions(header: Mapping[str, Any]) -> dict[str, str]:
    """Versions by what they are of, as far as the trace tells."""
    info = header.get("distributedInfo")
    found = {
        "CUDA driver": _cuda(header.get("cuda_driver_version")),
        "CUDA runtime": _cuda(header.get("cuda_runtime_version")),
        "NCCL": info.get("nccl_version") if isinstance(info, dict) else None,
    }
    return {name: version for name, version in found.items() if isinstance(version, str) and version}


def _cuda(number: Any) -> str | None:
    """13000 is 13.0: CUDA's own way of counting, which is not the version of the driver's package."""
    if not isinstance(number, int) or isinstance(number, bool) or number < 1000:
        return None
    return f"{number // 1000}.{number % 1000 // 10}"
