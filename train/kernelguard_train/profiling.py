"""What does a step consist of? `report.profile` records one with torch's profiler: operators, kernels, time by part.

Of a step of many batches the last two and the update are recorded. The step is slower for it, so its time is left out
of the run's rates.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

SHOWN = 15
"""Rows of each table."""
_PARTS = (
    ("communication", r"nccl"),
    ("optimizer", r"adam|multi_tensor_apply|lpnorm"),
    ("attention", r"flash|fmha|attention|varlen|softmax_warp"),
    ("convolution", r"conv"),
    ("cross entropy", r"logsumexp|cross_entropy|log_softmax|nll_loss|online_softmax"),
    (
        "delta rule",
        r"^tilelang_|chunk_|wy_repr|solve_tril|kkt|recompute_w_u|l2norm|gdn|cumsum|fused_.*kernel_kernel|prepare_h",
    ),
    ("scan", r"_ssd|_state_passing|_bmm_chunk|mamba|selective"),
    ("products", r"gemm|nvjet|cutlass|xmma|cublas|splitk|gemv|s884|s1688|s16816"),
    ("norms", r"norm"),
    ("activations", r"silu|swiglu|sigmoid|softplus|mul"),
    ("copies", r"memcpy|memset|copy|cat|fill|index|embedding|chunk_cat|transpose"),
)


def part_of(kernel: str) -> str:
    """Which part of a step a GPU kernel belongs to, by its name."""
    lowered = kernel.lower()
    return next((part for part, pattern in _PARTS if re.search(pattern, lowered)), "other elementwise")


def busy(spans: list[tuple[float, float]]) -> float:
    """The time that at least one of the spans covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


_ON_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_ON_CPU = {"cpu_op", "cuda_runtime", "cuda_driver"}


def self_times(events: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Each operator's own milliseconds, call by call: what it took less what it called."""
    found: dict[str, list[float]] = defaultdict(list)
    for thread in {event["tid"] for event in events}:
        own = sorted((e for e in events if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"]))
        open_: list[list[Any]] = []  # [end, name, time left to it]

        def close(until: float, waiting: list[list[Any]]) -> None:
            while waiting and waiting[-1][0] <= until:
                _, name, left = waiting.pop()
                found[name].append(left / 1000)

        for event in own:
            close(event["ts"], open_)
            if open_:
                open_[-1][2] -= event["dur"]
            open_.append([event["ts"] + event["dur"], event["name"], event["dur"]])
        close(float("inf"), open_)
    return found


def summary(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a recorded step, from the events of a Chrome trace; times in ms."""
    whole = [event for event in trace if event.get("ph") == "X" and "dur" in event]
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in whole:
        if event.get("cat") in _ON_GPU:
            kernels[event["name"]].append(event["dur"] / 1000)
            spans.append((event["ts"] / 1000, (event["ts"] + event["dur"]) / 1000))
    parts: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "calls": 0})
    for name, times in kernels.items():
        parts[part_of(name)]["ms"] += sum(times)
        parts[part_of(name)]["calls"] += len(times)
    operators = self_times([event for event in whole if event.get("cat") in _ON_CPU])
    waits = [name for name in operators if "Synchronize" in name]
    return {
        "cpu_queue_ms": sum(sum(times) for name, times in operators.items() if name not in waits),
        "cpu_ops": sum(len(times) for name, times in operators.items() if not name.startswith("cu")),
        "host_waits": sum(len(operators[name]) for name in waits),
        "gpu_ms": sum(sum(times) for times in kernels.values()),
        "gpu_busy_ms": busy(spans),
        "gpu_ops": sum(len(times) for times in kernels.values()),
        "parts": dict(sorted(parts.items(), key=lambda item: -item[1]["ms"])),
        "top_gpu": [
            {"name": name[:160], "part": part_of(name), "calls": len(times), "ms": sum(times)}
            for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[: 3 * SHOWN]
        ],
        "top_cpu": [
            {"name": name[:160], "calls": len(times), "ms": sum(times)}
            for name, times in sorted(operators.items(), key=lambda item: -sum(item[1]))[:SHOWN]
        ],
    }


class Recorder:
    """Records from `start` to `finish`; writes the summary to `target` and the trace beside it. No target: nothing."""

    def __init__(self, target: Path | None) -> None:
        self.target = target
        self.profile: profile | None = None

    def start(self) -> None:
        """Begins to record."""
        if self.target is None or self.profile is not None:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
        self.profile = profile(activities=activities, record_shapes=True)
        self.profile.__enter__()  # type: ignore[no-untyped-call]

    def finish(self, **noted: Any) -> None:
        """Ends and writes; `noted` goes into the file too."""
        if self.target is None or self.profile is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.target.parent.mkdir(parents=True, exist_ok=True)
        trace = self.target.with_suffix(".trace.json")
        # Torch's own averages take ten times as long to make as this takes to write and read.
        self.profile.export_chrome_trace(str(trace))
        self.profile = None
        text = trace.read_text(encoding="utf-8", errors="replace")
        trace.unlink()
        # Kept, since `kernelguard profile RUN` and every other reader of traces sees more in it than the summary has.
        with gzip.open(trace.with_name(f"{trace.name}.gz"), "wt", encoding="utf-8", compresslevel=1) as kept:
            kept.write(text)
        try:
            found = noted | summary(json.loads(text, strict=False)["traceEvents"])
        except json.JSONDecodeError as error:  # some kernels' names are not escaped; the run must not end for that
            found = noted | {"problem": f"the trace that torch wrote cannot be read: {error}"}
        self.target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
