"""What does a step consist of? `report.profile` records one with torch's profiler: operators, kernels, time by part.

Of a step of many batches the last two and the update are recorded. The step is slower for it, so its time is left out
of the run's rates.
"""

from __future__ import annotations

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
    ("delta rule", r"chunk_|wy_repr|solve_tril|kkt|recompute_w_u|l2norm|gdn|cumsum|fused_.*kernel_kernel|prepare_h"),
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


def summary(events: list[Any], averages: list[Any]) -> dict[str, Any]:
    """The figures of a recorded step, times in ms."""
    kernels: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name].append(event.time_range.elapsed_us() / 1000)
            spans.append((event.time_range.start / 1000, event.time_range.end / 1000))
    parts: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "calls": 0})
    for name, times in kernels.items():
        parts[part_of(name)]["ms"] += sum(times)
        parts[part_of(name)]["calls"] += len(times)
    operators = [row for row in averages if row.self_cpu_time_total > 0]
    waiting = [row for row in operators if "Synchronize" in row.key]
    on_cpu = sum(row.self_cpu_time_total for row in operators) - sum(row.self_cpu_time_total for row in waiting)
    return {
        "cpu_queue_ms": on_cpu / 1000,
        "cpu_ops": sum(row.count for row in operators if not row.key.startswith("cuda")),
        "host_waits": sum(row.count for row in waiting),
        "gpu_ms": sum(sum(times) for times in kernels.values()),
        "gpu_busy_ms": busy(spans),
        "gpu_ops": sum(len(times) for times in kernels.values()),
        "parts": dict(sorted(parts.items(), key=lambda item: -item[1]["ms"])),
        "top_gpu": [
            {"name": name[:160], "part": part_of(name), "calls": len(times), "ms": sum(times)}
            for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[: 3 * SHOWN]
        ],
        "top_cpu": [
            {"name": row.key[:160], "calls": row.count, "ms": row.self_cpu_time_total / 1000}
            for row in sorted(operators, key=lambda row: -row.self_cpu_time_total)[:SHOWN]
        ],
    }


class Recorder:
    """Records from `start` to `finish`, and writes the summary to `target`; without one it does nothing."""

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
        self.profile = profile(activities=activities)
        self.profile.__enter__()

    def finish(self, **noted: Any) -> None:
        """Ends and writes; `noted` goes into the file too."""
        if self.target is None or self.profile is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)
        found = noted | summary(list(self.profile.events() or ()), list(self.profile.key_averages()))
        self.profile = None
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
