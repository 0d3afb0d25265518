"""What did step 1 really run? Operators and GPU kernels under torch.profiler, and calls counted at the kernels' door.

Rows 10, 11 and 19 of the catalogue in docs/guard.md.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kernelguard.guard.expectation import Expectation, Finding
from kernelguard.guard.live_choices import FUSE_ALL
from kernelguard.guard.live_functions import Bound, cell_of

# Operators that only a slow path runs, whatever the model; a ticket says more.
_SLOW_ANYWHERE: Mapping[str, tuple[str, ...]] = {
    "scaled_dot_product_attention": ("aten::_scaled_dot_product_attention_math",),
    "grouped_mm": ("transformers::grouped_mm_fallback",),
}


@dataclass
class StepTrace:
    """What ran in the recorded part of step 1."""

    ops: Counter[str] = field(default_factory=Counter)
    kernels: Counter[str] = field(default_factory=Counter)
    problem: str = ""
    """Why there is no trace."""


class Recorder:
    """Records from `start` to `stop`; a profiler of the script's own is left alone."""

    def __init__(self) -> None:
        self._profiler: Any = None
        self.running = False

    def start(self) -> str:
        """Begin; returns why that cannot be done now, or an empty text."""
        import torch

        if torch.autograd._profiler_enabled():  # noqa: SLF001  # there is no public name for it
            return "the script's own profiler is running"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            with warnings.catch_warnings():
                # torch 2.11 says so of each one-cycle recording; whoever reads the log did not ask for it.
                warnings.filterwarnings("ignore", message=".*Profiler clears events")
                self._profiler = torch.profiler.profile(activities=activities)
                self._profiler.__enter__()
        except (RuntimeError, TypeError) as error:
            return f"torch.profiler does not start: {error}"
        self.running = True
        return ""

    def stop(self) -> StepTrace:
        """End, and count what ran."""
        import torch

        self.running = False
        if torch.cuda.is_available():
            # A kernel that has not ended is not in the trace.
            torch.cuda.synchronize()
        try:
            self._profiler.__exit__(None, None, None)
            events = self._profiler.profiler.kineto_results.events()
        except (RuntimeError, AttributeError) as error:
            return StepTrace(problem=f"torch.profiler gave no trace: {error}")
        trace = StepTrace()
        for event in events:
            on_gpu = "CUDA" in str(event.device_type())
            (trace.kernels if on_gpu else trace.ops)[event.name()] += 1
        self._profiler = None
        return trace


class CallCounter:
    """Counts the calls of bound kernels by putting a counting function into the cell that holds each one.

    That a function is bound does not mean that the model gets to it. The cells are put back by `restore`.
    """

    def __init__(self, entries: Iterable[Bound]) -> None:
        self.counts: dict[tuple[str, str], int] = {}
        self._cells: list[tuple[Any, Any]] = []
        for entry in entries:
            cell = cell_of(entry) if entry.mechanism == "package" else None
            if cell is None:
                continue
            key = (entry.module, entry.symbol)
            self.counts[key] = 0
            original = cell.cell_contents
            self._cells.append((cell, original))
            cell.cell_contents = self._counting(key, original)

    def _counting(self, key: tuple[str, str], original: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[key] += 1
            return original(*args, **kwargs)

        return counted

    def restore(self) -> None:
        """Put the kernels back."""
        for cell, original in self._cells:
            cell.cell_contents = original
        self._cells = []


def base_name(name: str) -> str:
    """A kernel's own name, as `trace/names.py` makes it: `conv_kernel<>` for `void ns::conv_kernel<T>(Params)`."""
    bare = re.sub(r"^void\s+|\(anonymous namespace\)::", "", name)
    head, angle, _ = bare.partition("<")
    words = head.partition("(")[0].replace("::", " ").split()
    head = words[-1] if words else bare
    return head + ("<>" if angle else "")


def judge_trace(trace: StepTrace, counts: Mapping[tuple[str, str], int], expected: Expectation) -> Iterator[Finding]:
    """What step 1 ran that it should not have, and what it did not run."""
    yield from _never_called(counts, expected)
    if trace.problem:
        status = "unknown" if expected.ticketed and expected.kernels else "warn"
        yield Finding("not-traced", status, f"step 1 could not be traced: {trace.problem}")
        return
    launched = {base_name(name) for name in trace.kernels}
    slow: dict[str, tuple[str, ...]] = dict(expected.fallbacks)
    for symbol, ops in _SLOW_ANYWHERE.items():
        slow.setdefault(symbol, ops)
    for symbol, ops in slow.items():
        seen = [f"{op} ({trace.ops[op]}x)" for op in ops if trace.ops[op]]
        if seen:
            # Where the kernel itself is known to have run, the same operators belong to something else. Without a GPU,
            # torch's own attention has only that form.
            proven = any(count for (_, name), count in counts.items() if name == symbol)
            proven = proven or bool(launched.intersection(expected.kernels.get(symbol, ())))
            status = "fail" if (symbol in expected.fallbacks or trace.kernels) and not proven else "warn"
            yield Finding("fallback-ran", status, f"step 1 ran {', '.join(seen)}: the slow form of {symbol}",
                          "kernelguard profile TRACE shows where")  # fmt: skip
    if expected.device != "cuda":
        return
    if expected.kernels and not launched:
        status = "unknown" if expected.ticketed else "warn"
        yield Finding("not-traced", status, "step 1 shows no GPU kernel at all: the profiler could not see the GPU")
        return
    for symbol, patterns in expected.kernels.items():
        if patterns and not launched.intersection(patterns) and _matters(symbol, expected):
            yield Finding("kernel-not-launched", "fail", f"step 1 launched none of the kernels of {symbol} "
                          f"({', '.join(patterns[:3])})", "it is bound and fails over inside its package")  # fmt: skip


def _never_called(counts: Mapping[tuple[str, str], int], expected: Expectation) -> Iterator[Finding]:
    """Bound kernels that the model goes around (row 16 among others)."""
    for (module, symbol), count in counts.items():
        if count or not _matters(symbol, expected):
            continue
        beside = {other: n for (place, other), n in counts.items() if place == module and other != symbol}
        if any(beside.get(fused) for fused in FUSE_ALL):
            # It does the work of the convolution and of the scan in one.
            continue
        if symbol in FUSE_ALL and any(beside.values()):
            why = "a cache in training makes the layer go around it"
        elif expected.ticketed:
            why = "a setting or another class goes around it"
        else:
            # Nobody said that this model has such a layer at all.
            continue
        text = f"{symbol} is bound, and step 1 never called it: {why}"
        yield Finding("never-called", "fail", text, "config.use_cache = False; kernelguard check MODEL names settings")


def _matters(symbol: str, expected: Expectation) -> bool:
    """Whether a symbol is one that this run calls: with a ticket, only those with layers."""
    layers = [path.layers for path in expected.paths if path.symbol == symbol]
    return not layers or any(count != 0 for count in layers)
