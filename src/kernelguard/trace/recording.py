"""What of a trace is kept? Each timed event as one row of plain columns, some forty bytes, whatever the file holds."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.trace.stream import HINT, TraceStream
from kernelguard.trace.work import work

LARGEST_ROWS = 12_000_000
"""Timed events of one trace; more than half a gigabyte of columns."""
NOT_KNOWN = -1


class Kind(IntEnum):
    """What a row is; kineto's categories, those that matter."""

    OPERATOR = 0
    """`cpu_op`: an operator or record_function on the host."""
    ANNOTATION = 1
    """`user_annotation`: a range that a person or the profiler named."""
    RUNTIME = 2
    """A call of the CUDA runtime or driver."""
    OVERHEAD = 3
    KERNEL = 4
    COPY = 5
    """`gpu_memcpy` and `gpu_memset`."""


_KINDS = {
    "cpu_op": Kind.OPERATOR,
    "user_annotation": Kind.ANNOTATION,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "overhead": Kind.OVERHEAD,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.COPY,
    "gpu_memset": Kind.COPY,
    # Until torch 1.11.
    "Operator": Kind.OPERATOR,
    "Runtime": Kind.RUNTIME,
    "Kernel": Kind.KERNEL,
    "Memcpy": Kind.COPY,
    "Memset": Kind.COPY,
}
HOST_KINDS = (Kind.OPERATOR, Kind.ANNOTATION, Kind.RUNTIME, Kind.OVERHEAD)
DEVICE_KINDS = (Kind.KERNEL, Kind.COPY)


@dataclass(slots=True)
class Rows:
    """Columns of equal length, one row for each timed event of one side (host or device)."""

    start: array[float] = field(default_factory=lambda: array("d"))
    """Microseconds since the first event of the file that was read."""
    duration: array[float] = field(default_factory=lambda: array("d"))
    kind: array[int] = field(default_factory=lambda: array("b"))
    name: array[int] = field(default_factory=lambda: array("i"))
    """Index into `Recording.names`."""
    lane: array[int] = field(default_factory=lambda: array("i"))
    """Index into `Recording.lanes`: a host thread, or a device's stream."""
    external: array[int] = field(default_factory=lambda: array("q"))
    """kineto's External id: on an operator its own, on what it launched that of the operator."""
    correlation: array[int] = field(default_factory=lambda: array("q"))
    """Ties a runtime call to what it started on the device."""
    amount: array[float] = field(default_factory=lambda: array("d"))
    """Device: bytes of a copy. Host: floating-point operations by an operator's shapes; NaN: not known."""
    bytes_read: array[float] = field(default_factory=lambda: array("f"))
    """Host: of an operator's inputs, by their shapes; NaN: not recorded."""
    bytes_written: array[float] = field(default_factory=lambda: array("f"))
    """Host: of its largest input, as which its output is taken."""

    def __len__(self) -> int:
        return len(self.start)

    def end(self, row: int) -> float:
        """When a row's event ended."""
        return self.start[row] + self.duration[row]


@dataclass(slots=True, kw_only=True)
class Recording:
    """One trace, read."""

    source: str
    names: Sequence[str]
    lanes: Sequence[tuple[str, str]]
    """(process or device, thread or stream) as the file writes them."""
    host: Rows
    device: Rows
    header: Mapping[str, Any]
    """What stands beside the events: device properties, distributed info."""
    events: int
    unreadable: int
    untimed: int
    """Those whose time is no number, or that last less than nothing: left out."""
    python_frames: int
    """Python stack frames, which are counted and passed over."""
    json_bytes: int

    @property
    def has_shapes(self) -> bool:
        """Whether operators have their input shapes (`record_shapes=True`)."""
        return any(read == read for read in self.host.bytes_read)  # noqa: PLR0124 - NaN is the only value that differs from itself


class _Table:
    """Gives each distinct value a small number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._index: dict[Any, int] = {}

    def number(self, value: Any) -> int:
        found = self._index.get(value)
        if found is None:
            found = self._index[value] = len(self.values)
            self.values.append(value)
        return found


def record(path: Path, tell: Callable[[int], None] | None = None) -> Recording:
    """Read one trace; `tell` is called with the bytes of the file that are behind.

    Raises:
        InputError: it is missing, damaged, cut off, another tool's, or has too many events.
    """
    stream = TraceStream(path, tell)
    recording = _fill(stream, str(path))
    recording.header = {k: v for k, v in stream.header.items() if k != "traceEvents"}
    recording.events, recording.unreadable = stream.events, stream.skipped
    recording.json_bytes = stream.read_bytes
    if not len(recording.host) and not len(recording.device):
        raise InputError(
            f"{path} holds {stream.events} events, but no operator and no kernel of torch.profiler: another tool wrote "
            "it, or nothing ran while it recorded",
            hint=HINT,
        )
    return recording


def record_events(events: Iterator[Any], source: str) -> Recording:
    """The same for events that are already in memory."""
    return _fill((event for event in events if isinstance(event, dict)), source)


def _fill(events: Any, source: str) -> Recording:
    names, lanes = _Table(), _Table()
    host, device = Rows(), Rows()
    frames, untimed, lost, base = 0, 0, 0, None
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat")
        kind = _KINDS.get(category) if isinstance(category, str) else None
        if kind is None:
            frames += category == "python_function"
            continue
        start, duration = _time(event.get("ts")), _time(event.get("dur", 0.0))
        if start is None or duration is None or duration < 0.0:
            untimed += 1
            lost += kind in DEVICE_KINDS
            continue
        base = start if base is None else base
        arguments = event.get("args")
        if not isinstance(arguments, dict):
            arguments = {}
        rows = device if kind in DEVICE_KINDS else host
        rows.start.append(start - base)
        rows.duration.append(duration)
        rows.kind.append(kind)
        name = str(event.get("name", ""))
        rows.name.append(names.number(name))
        rows.lane.append(lanes.number((str(event.get("pid")), str(event.get("tid")))))
        rows.external.append(_whole(arguments.get("External id", arguments.get("external id"))))
        rows.correlation.append(_whole(arguments.get("correlation")))
        if rows is device:
            rows.amount.append(_number(arguments.get("bytes")))
            continue
        done = work(name, arguments) if kind is Kind.OPERATOR and "Input Dims" in arguments else None
        rows.amount.append(done.operations if done else float("nan"))
        rows.bytes_read.append(done.read if done else float("nan"))
        rows.bytes_written.append(done.written if done else float("nan"))
        if len(host) + len(device) > LARGEST_ROWS:
            raise InputError(
                f"{source} has more than {LARGEST_ROWS // 1_000_000} million timed events",
                hint="record fewer steps: torch.profiler.schedule(wait=5, warmup=1, active=2, repeat=1)",
            )
    if lost and not len(device):
        raise InputError(
            f"{source}: no GPU event is left: the time of all {lost} is no number, or they last less than nothing",
            hint=HINT,
        )
    return Recording(
        source=source,
        names=names.values,
        lanes=lanes.values,
        host=host,
        device=device,
        header={},
        events=len(host) + len(device),
        unreadable=0,
        untimed=untimed,
        python_frames=frames,
        json_bytes=0,
    )


def _time(value: Any) -> float | None:
    """Microseconds of an event, None where there is no finite number; older writers put some into quotes."""
    if type(value) is not float:
        try:
            value = float(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else None
        except (ValueError, OverflowError):
            value = None
    return value if value is not None and -1e300 < value < 1e300 else None


def _number(value: Any) -> float:
    """A number of an event; older writers put some of them into quotes."""
    if type(value) is float and -1e300 < value < 1e300:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if abs(value) < 1e300 else 0.0  # NaN too
    if isinstance(value, str):
        try:
            return _number(float(value))
        except ValueError:
            return 0.0
    return 0.0


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63:
        return value
    return NOT_KNOWN
