"""What does a trace say about a training run? Both sides of it, the steps, the drawing, and what bounds it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelguard.trace.bound import Bound, judge
from kernelguard.trace.device import DeviceFacts, Idle, PartTime, device_by_operator, read_device
from kernelguard.trace.host import HostFacts, Operator, Stall, Wait, read_host, step_names
from kernelguard.trace.implementations import Implementation, implementations
from kernelguard.trace.intervals import Bins, Cover, Interval
from kernelguard.trace.parts import Parts, Peak, peak_of
from kernelguard.trace.recording import Kind, Recording, record
from kernelguard.trace.runs import RunFacts
from kernelguard.trace.values import KernelRun
from kernelguard.trace.versions import versions

SLICES = 240
"""Of the drawing of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that the profiler was told of. Microseconds."""

    number: int
    begin: float
    wall: float
    busy: float
    """The GPU ran something."""
    launches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A step in slices; each number is the share of its slice, 0 to 1."""

    title: str
    begin: float
    width: float
    """Of the whole drawing, microseconds."""
    host: tuple[float, ...]
    """Inside an operator or a runtime call, not waiting."""
    waiting: tuple[float, ...]
    groups: Mapping[str, tuple[float, ...]]
    """By what bounds the kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One trace, understood. Microseconds, summed over the window."""

    source: str
    rank: int | None
    gpu: str
    peak: Peak | None
    window: Interval
    steps: tuple[Step, ...]
    """Empty: the trace has no step marks, and the window is the whole recording."""
    self_host: float
    """key_averages' "Self CPU time total"."""
    kernels_total: float
    """key_averages' "Self CUDA time total": all kernels and copies of the whole recording."""
    operators: tuple[Operator, ...]
    """Of the whole recording."""
    kernels: tuple[KernelRun, ...]
    """Of the window."""
    busy: float
    coarse: float
    idle: Idle
    parts: tuple[PartTime, ...]
    launches: int
    short: int
    short_us: float
    exposed_communication: float
    communication: float
    waits: tuple[Wait, ...]
    stalls: tuple[Stall, ...]
    recomputed: float
    """On the GPU: products and attention of forward passes that ran again inside the backward pass."""
    copies_to_host: int
    compilations: int
    compile_us: float
    module_loads: int
    implementations: tuple[Implementation, ...]
    timeline: Timeline | None
    has_shapes: bool
    notes: tuple[str, ...]
    events: int
    json_bytes: int
    versions: Mapping[str, str] = field(default_factory=dict)
    run: RunFacts | None = None
    bound: Bound = field(default_factory=Bound)

    @property
    def wall(self) -> float:
        """Microseconds of the window."""
        return self.window[1] - self.window[0]

    @property
    def step_count(self) -> int:
        """By which sums are divided; 1 without step marks."""
        return max(1, len(self.steps))


def profile(path: Path, *, run: RunFacts | None = None, tell: Callable[[int], None] | None = None) -> Profile:
    """Understand one trace file; `run` adds what our trainer wrote beside it.

    Raises:
        InputError: it is no usable trace.
    """
    return understand(record(path, tell), run=run)


def understand(recording: Recording, *, run: RunFacts | None = None) -> Profile:
    """The same for a recording in memory."""
    marks = sorted(step_names(recording), key=lambda mark: mark[1])
    window = _window(recording, marks)
    by_operator = device_by_operator(recording)
    host = read_host(recording, by_operator, window)
    parts = Parts()
    device = read_device(recording, host, window, parts)
    steps = tuple(_steps(recording, marks, device))
    gpu = _gpu_name(recording.header)
    peak = peak_of(gpu)
    notes = tuple(_notes(recording, host, device, marks))
    operators = {operator.name: operator.calls for operator in host.operators if operator.kind == Kind.OPERATOR}
    found = Profile(
        source=recording.source,
        rank=_rank(recording.header),
        gpu=gpu,
        peak=peak,
        window=window,
        steps=steps,
        self_host=host.self_host,
        kernels_total=sum(recording.device.duration),
        operators=tuple(host.operators),
        kernels=tuple(device.kernels),
        busy=device.busy,
        coarse=device.coarse,
        idle=device.idle,
        parts=tuple(sorted(device.parts, key=lambda part: -part.busy)),
        launches=device.launches,
        short=device.short,
        short_us=device.short_us,
        exposed_communication=device.exposed_communication,
        communication=device.communication,
        waits=host.waits,
        stalls=device.stalls,
        recomputed=host.recomputed,
        copies_to_host=sum(run.count for run in device.kernels if "DtoH" in run.name),
        compilations=_inside(host.compiling, window),
        compile_us=sum(
            min(e, window[1]) - max(b, window[0]) for b, e in host.compiling if e > window[0] and b < window[1]
        ),
        module_loads=host.module_loads,
        implementations=implementations(device.kernels, operators),
        timeline=_timeline(host, device, steps, parts),
        has_shapes=recording.has_shapes,
        notes=notes,
        events=recording.events,
        json_bytes=recording.json_bytes,
        versions=versions(recording.header),
        run=run,
    )
    return with_bound(found, judge(found))


def with_bound(found: Profile, bound: Bound) -> Profile:
    """The same profile with another judgement: several ranks know more than one."""
    from dataclasses import replace  # noqa: PLC0415

    return replace(found, bound=bound)


def _window(recording: Recording, marks: Sequence[tuple[int, float, float]]) -> Interval:
    """From the first step to the end of the last one's kernels; without marks the whole recording."""
    device, host = recording.device, recording.host
    last_kernel = max((device.end(row) for row in range(len(device))), default=0.0)
    if marks:
        begin, end = marks[0][1], max(mark[2] for mark in marks)
        return begin, max(end, last_kernel)
    starts = [min(rows.start) for rows in (device, host) if len(rows)]
    if len(device):
        # The profiler itself waits for the GPU and writes after the last kernel; that is not the run's time.
        return min(starts), last_kernel
    return min(starts), max(host.end(row) for row in range(len(host)))


def _steps(recording: Recording, marks: Sequence[tuple[int, float, float]], device: DeviceFacts) -> Sequence[Step]:
    found = []
    rows = recording.device
    for index, (number, begin, _) in enumerate(marks):
        end = marks[index + 1][1] if index + 1 < len(marks) else device.window[1]
        busy = sum(min(e, end) - max(b, begin) for b, e, _ in device.pieces if e > begin and b < end)
        launches = sum(begin <= start < end for start in rows.start)
        found.append(Step(number=number, begin=begin, wall=end - begin, busy=busy, launches=launches))
    return found


def _timeline(host: HostFacts, device: DeviceFacts, steps: Sequence[Step], parts: Parts) -> Timeline | None:
    """The step nearest to the median; without step marks the whole window."""
    if steps:
        middle = statistics.median(step.wall for step in steps)
        chosen = min(steps, key=lambda step: (abs(step.wall - middle), step.number))
        begin, width, title = chosen.begin, chosen.wall, f"step {chosen.number}"
    else:
        begin, width, title = device.window[0], device.window[1] - device.window[0], "the whole recording"
    if width <= 0:
        return None
    busy, waiting = Bins(begin, begin + width, SLICES), Bins(begin, begin + width, SLICES)
    for low, high in host.busy:
        busy.add(low, high)
    for low, high in host.waiting:
        waiting.add(low, high)
    groups: dict[str, Bins] = {}
    for low, high, part in device.pieces:
        bins = groups.setdefault(parts.parts[part].bound, Bins(begin, begin + width, SLICES))
        bins.add(low, high)
    return Timeline(
        title=title,
        begin=begin,
        width=width,
        host=tuple(max(0.0, b - w) for b, w in zip(busy.shares, waiting.shares, strict=True)),
        waiting=waiting.shares,
        groups={name: bins.shares for name, bins in groups.items()},
    )


def _inside(intervals: Sequence[Interval], window: Interval) -> int:
    return sum(end > window[0] and begin < window[1] for begin, end in intervals)


def _gpu_name(header: Mapping[str, Any]) -> str:
    devices = header.get("deviceProperties")
    if isinstance(devices, list):
        names = [str(d["name"]) for d in devices if isinstance(d, dict) and d.get("name")]
        if names:
            return names[0]
    return ""


def _rank(header: Mapping[str, Any]) -> int | None:
    info = header.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return rank if isinstance(rank, int) else None


def _notes(recording: Recording, host: HostFacts, device: DeviceFacts, marks: Sequence[Any]) -> Sequence[str]:
    """What the reader must know about the recording itself."""
    notes = []
    if not marks:
        notes.append("no step marks: call prof.step() after each step; the whole recording is taken for one")
    if not len(recording.device):
        notes.append("no GPU activity: record with ProfilerActivity.CUDA on a GPU")
    if device.devices > 1:
        notes.append(f"{device.devices} GPUs in one trace: the busiest is shown")
    if recording.python_frames:
        notes.append(
            f"recorded with Python stacks ({recording.python_frames} frames), which slow the host down: "
            "with_stack=False shows the gaps as they are"
        )
    overhead = Cover(host.overhead).length(*device.window)
    if overhead > 0.02 * (device.window[1] - device.window[0]):
        notes.append(f"the profiler's own work took {overhead / 1000:,.1f} ms of it: a run without it waits less")
    if not recording.has_shapes:
        notes.append("no input shapes: record_shapes=True lets the roofline be drawn")
    if recording.unreadable:
        notes.append(f"{recording.unreadable} events are no JSON and were left out")
    if recording.untimed:
        notes.append(f"{recording.untimed} events have no usable time and were left out")
    if host.module_loads:
        notes.append(f"{host.module_loads} GPU modules were loaded: kernels were compiled or used for the first time")
    return notes
