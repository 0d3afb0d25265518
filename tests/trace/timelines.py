"""Traces made up moment by moment, so that a test knows where every microsecond went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from kernelguard.trace.profile import Profile, profile

GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_NTN"
ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >(int)"
NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


class Timeline:
    """A growing list of events; times are microseconds."""

    def __init__(self, *, gpu: str = "NVIDIA H200", rank: int | None = None) -> None:
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": gpu}]}
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 4}
        self._number = 0

    def add(self, category: str, name: str, start: float, duration: float, **arguments: Any) -> int:
        """Any event on the main thread; returns its External id."""
        self._number += 1
        arguments.setdefault("External id", self._number)
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}
            | {"args": arguments}
        )
        return int(arguments["External id"])

    def step(self, number: int, start: float, duration: float) -> None:
        self.add("user_annotation", f"ProfilerStep#{number}", start, duration)

    def op(self, name: str, start: float, duration: float, **arguments: Any) -> int:
        return self.add("cpu_op", name, start, duration, **arguments)

    def kernel(
        self, name: str, start: float, duration: float, *, launched: float, of: int | None = None, stream: int = 7
    ) -> None:
        """A kernel, and the call that launched it (2 µs)."""
        self._number += 1
        both = {"correlation": self._number, **({"External id": of} if of is not None else {})}
        self.add("cuda_runtime", "cudaLaunchKernel", launched, 2.0, **both)
        self.events.append(
            {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": duration}
            | {"args": {**both, "stream": stream, "device": 0}}
        )

    def wait(self, start: float, duration: float, call: str = "cudaStreamSynchronize") -> None:
        self.add("cuda_runtime", call, start, duration)

    def write(self, path: Path) -> Path:
        document = {**self.header, "traceEvents": self.events, "traceName": "x"}
        text = json.dumps(document).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

    def understood(self, folder: Path, **options: Any) -> Profile:
        return profile(self.write(folder / "trace.json"), **options)
