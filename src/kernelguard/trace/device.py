"""What did the GPU do, and why did it stand still? Time by part of the step, gaps and what the host did meanwhile."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kernelguard.trace.host import HostFacts, Stall
from kernelguard.trace.intervals import Cover, Interval, gaps
from kernelguard.trace.parts import Parts
from kernelguard.trace.recording import Kind, Recording, Rows
from kernelguard.trace.values import KernelRun

SILENT_US = 1000.0
"""Where no thread ran anything of torch for this long, the script did something else: data, logging, plain Python."""
SHORT_US = 10.0
"""A kernel shorter than this costs about as much to launch as to run."""
_NEAR_US = 20.0


@dataclass(slots=True, kw_only=True)
class Idle:
    """Microseconds in which nothing ran on the GPU, by what it was waiting for."""

    launch: float = 0.0
    """The host was still calling operators: what came next had not been launched."""
    after_wait: float = 0.0
    """Of `launch`: right after the host had waited for the GPU, so that nothing was queued."""
    stalled: float = 0.0
    """Of `launch`, and not of `after_wait`: the host was inside one long call (`Stall`)."""
    data: float = 0.0
    """The host was reading data, as its own marks say."""
    compiling: float = 0.0
    script: float = 0.0
    """No thread ran anything of torch for at least a millisecond."""
    device: float = 0.0
    """What came next was already launched: between kernels, and where one stream waits for another."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.launch + self.data + self.compiling + self.script + self.device


@dataclass(slots=True, kw_only=True)
class PartTime:
    """One part of the step. Microseconds."""

    name: str
    title: str
    bound: str
    busy: float = 0.0
    """Without what ran at the same time as another kernel, so that the parts add up."""
    kernels: float = 0.0
    """Sum over all kernels."""
    launches: int = 0
    short_us: float = 0.0
    """Of `kernels`: those shorter than `SHORT_US`."""
    operations: float = 0.0
    """Floating-point operations of products whose shapes are known."""
    operations_time: float = 0.0
    """Of the kernels whose operations are known."""
    bytes: float = 0.0
    """At least read and written, where shapes are known."""
    bytes_time: float = 0.0


@dataclass(slots=True, kw_only=True)
class DeviceFacts:
    """The GPU's side of a trace, inside its window."""

    window: Interval = (0.0, 0.0)
    busy: float = 0.0
    """Some kernel or copy ran."""
    exposed_communication: float = 0.0
    """Communication and nothing else ran."""
    communication: float = 0.0
    idle: Idle = field(default_factory=Idle)
    stalls: tuple[Stall, ...] = ()
    """Most time first."""
    parts: list[PartTime] = field(default_factory=list)
    kernels: list[KernelRun] = field(default_factory=list)
    """Most expensive first; copies included."""
    launches: int = 0
    short: int = 0
    short_us: float = 0.0
    """Of kernels shorter than `SHORT_US`."""
    pieces: list[tuple[float, float, int]] = field(default_factory=list)
    """(begin, end, part) of what ran, without overlaps, joined where one part follows itself closely."""
    coarse: float = 0.0
    """Share of millisecond slices in which something ran: what a utilization counter sees."""
    devices: int = 0

    @property
    def seconds_of_kernels(self) -> float:
        """Microseconds of all kernels and copies, overlapping ones counted twice: key_averages' total."""
        return sum(run.microseconds for run in self.kernels)


def device_by_operator(recording: Recording) -> dict[int, float]:
    """Microseconds on the GPU by the External id of the operator that launched it."""
    spent: dict[int, float] = {}
    rows = recording.device
    for row, external in enumerate(rows.external):
        if external >= 0:
            spent[external] = spent.get(external, 0.0) + rows.duration[row]
    return spent


def busiest_device(recording: Recording) -> tuple[str | None, int]:
    """The device with the most GPU time, and how many there are."""
    spent: dict[str, float] = {}
    rows = recording.device
    for row, lane in enumerate(rows.lane):
        device = recording.lanes[lane][0]
        spent[device] = spent.get(device, 0.0) + rows.duration[row]
    return max(spent, key=lambda d: spent[d], default=None), len(spent)


def read_device(recording: Recording, host: HostFacts, window: Interval, parts: Parts) -> DeviceFacts:
    """The GPU's facts inside the window."""
    rows = recording.device
    facts = DeviceFacts(window=window)
    device, facts.devices = busiest_device(recording)
    mine = [lane[0] == device for lane in recording.lanes]
    inside = [row for row in range(len(rows)) if mine[rows.lane[row]] and window[0] <= rows.start[row] < window[1]]
    inside.sort(key=rows.start.__getitem__)
    part_of = [parts.index(name) for name in recording.names] if inside else []
    facts.parts = [PartTime(name=p.name, title=p.title, bound=p.bound) for p in parts.parts]
    _count(recording, rows, inside, part_of, facts)
    _work(recording, rows, inside, part_of, facts)
    cover = _sweep(rows, inside, part_of, facts)
    _gaps(recording, host, cover, facts)
    facts.parts = [part for part in facts.parts if part.launches]
    return facts


def _count(recording: Recording, rows: Rows, inside: list[int], part_of: list[int], facts: DeviceFacts) -> None:
    """By name and by part."""
    counts: dict[int, list[float]] = {}
    for row in inside:
        name, duration = rows.name[row], rows.duration[row]
        entry = counts.setdefault(name, [0, 0.0])
        entry[0] += 1
        entry[1] += duration
        part = facts.parts[part_of[name]]
        part.launches += 1
        part.kernels += duration
        if rows.kind[row] == Kind.KERNEL and duration < SHORT_US:
            facts.short += 1
            part.short_us += duration
            facts.short_us += duration
    facts.launches = len(inside)
    facts.kernels = sorted(
        (KernelRun(name=recording.names[n], count=int(c), microseconds=t) for n, (c, t) in counts.items()),
        key=lambda run: (-run.microseconds, run.name),
    )


def _work(recording: Recording, rows: Rows, inside: list[int], part_of: list[int], facts: DeviceFacts) -> None:
    """Operations and bytes of each part, from the shapes of the operators that launched its kernels."""
    host = recording.host
    launched: dict[int, float] = {}
    part: dict[int, int] = {}
    for row in inside:
        external = rows.external[row]
        if external < 0 or rows.kind[row] != Kind.KERNEL:
            if rows.kind[row] == Kind.COPY and rows.amount[row] > 0:
                entry = facts.parts[part_of[rows.name[row]]]
                # A copy inside the GPU reads and writes each byte; across the bus it only writes or reads.
                inner = "DtoD" in recording.names[rows.name[row]]
                entry.bytes += rows.amount[row] * (2 if inner else 1)
                entry.bytes_time += rows.duration[row]
            continue
        launched[external] = launched.get(external, 0.0) + rows.duration[row]
        part.setdefault(external, part_of[rows.name[row]])
    for row, external in enumerate(host.external):
        if external not in launched or host.kind[row] != Kind.OPERATOR:
            continue
        entry = facts.parts[part[external]]
        operations, read = host.amount[row], host.bytes_read[row]
        if operations == operations:  # noqa: PLR0124 - not NaN
            entry.operations += operations
            entry.operations_time += launched[external]
        if read == read:  # noqa: PLR0124 - not NaN
            entry.bytes += read + host.bytes_written[row]
            entry.bytes_time += launched[external]


def _sweep(
    rows: Rows, inside: list[int], part_of: list[int], facts: DeviceFacts
) -> tuple[array[float], array[float], array[int]]:
    """Give each instant to one kernel, computing before communication; returns what is covered by anything.

    The answer is three columns: where each covered stretch begins and ends, and the row that comes first in it.
    """
    names = [part.name for part in facts.parts]
    communication = names.index("communication")
    pieces = facts.pieces
    until = facts.window[0]
    for row in inside:
        part = part_of[rows.name[row]]
        if part == communication:
            continue
        end = min(rows.end(row), facts.window[1])
        begin = max(rows.start[row], until)
        if end > begin:
            facts.parts[part].busy += end - begin
            _piece(pieces, begin, end, part)
            until = end
    computing = sum(part.busy for part in facts.parts)
    starts, ends, firsts = array("d"), array("d"), array("q")
    for row in inside:
        begin, end = rows.start[row], min(rows.end(row), facts.window[1])
        if ends and begin <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(begin)
            ends.append(end)
            firsts.append(row)
    facts.busy = sum(end - begin for begin, end in zip(starts, ends, strict=True))
    facts.exposed_communication = max(0.0, facts.busy - computing)
    facts.communication = facts.parts[communication].kernels
    facts.parts[communication].busy = facts.exposed_communication
    _exposed(rows, inside, part_of, communication, facts)
    _coarse(starts, ends, facts)
    return starts, ends, firsts


def _exposed(rows: Rows, inside: list[int], part_of: list[int], communication: int, facts: DeviceFacts) -> None:
    """Pieces of communication that nothing else hides, for the drawing."""
    computing = Cover((begin, end) for begin, end, _ in facts.pieces)
    alone = []
    for row in inside:
        if part_of[rows.name[row]] == communication:
            begin, end = rows.start[row], min(rows.end(row), facts.window[1])
            alone += gaps(computing.parts(begin, end), begin, end)
    for begin, end in Cover(alone).merged:
        facts.pieces.append((begin, end, communication))


def _piece(pieces: list[tuple[float, float, int]], begin: float, end: float, part: int) -> None:
    """Join what follows closely: a step has a million kernels and a drawing some hundred slices."""
    if pieces and pieces[-1][2] == part and begin - pieces[-1][1] < 0.5:
        pieces[-1] = (pieces[-1][0], end, part)
    else:
        pieces.append((begin, end, part))


def _coarse(starts: array[float], ends: array[float], facts: DeviceFacts) -> None:
    slices: set[int] = set()
    for begin, end in zip(starts, ends, strict=True):
        first, last = int((begin - facts.window[0]) // 1000), int((end - facts.window[0]) // 1000)
        slices.update(range(first, last + 1))
    count = max(1, math.ceil((facts.window[1] - facts.window[0]) / 1000))
    facts.coarse = min(1.0, len(slices) / count)


def _gaps(
    recording: Recording,
    host: HostFacts,
    cover: tuple[array[float], array[float], array[int]],
    facts: DeviceFacts,
) -> None:
    """Book every gap to what the GPU was waiting for."""
    starts, ends, firsts = cover
    launched = _launch_times(recording, {recording.device.correlation[row] for row in firsts})
    begin, window_end = facts.window
    data, compiling, waiting = Cover(host.data), Cover(host.compiling), Cover(host.waiting)
    silent = Cover(gaps(host.busy, begin, window_end, at_least=SILENT_US))
    wait_ends = array("d", (end for _, end in waiting.merged))
    calls = deque(sorted(host.long_calls))
    stalls: dict[str, list[float]] = {}
    at = begin
    for index in range(len(firsts) + 1):
        last = index == len(firsts)
        until = window_end if last else starts[index]
        while calls and calls[0][1] <= at:
            calls.popleft()
        if until > at:
            launch = None if last else launched.get(recording.device.correlation[firsts[index]])
            if launch is not None and launch < at and not last:
                facts.idle.device += until - at
            else:
                _host_gap(
                    at,
                    until,
                    launch=until if launch is None else min(launch, until),
                    data=data,
                    compiling=compiling,
                    silent=silent,
                    wait_ends=wait_ends,
                    calls=calls,
                    stalls=stalls,
                    idle=facts.idle,
                )
        if not last:
            at = max(at, ends[index])
    facts.stalls = tuple(
        Stall(operator=name, calls=int(count), microseconds=spent, longest=longest)
        for name, (count, spent, longest) in sorted(stalls.items(), key=lambda item: -item[1][1])
    )


def _host_gap(
    begin: float,
    end: float,
    *,
    launch: float,
    data: Cover,
    compiling: Cover,
    silent: Cover,
    wait_ends: array[float],
    calls: Iterable[tuple[float, float, str]],
    stalls: dict[str, list[float]],
    idle: Idle,
) -> None:
    """A gap that ends with a kernel whose launch came late: what the host did until then is to blame."""
    rest = launch - begin
    read = data.length(begin, launch)
    compiled = min(rest - read, compiling.length(begin, launch))
    script = min(rest - read - compiled, silent.length(begin, launch))
    idle.data += read
    idle.compiling += compiled
    idle.script += script
    launching = end - begin - read - compiled - script
    idle.launch += launching
    place = bisect_left(wait_ends, begin - _NEAR_US)
    if place < len(wait_ends) and wait_ends[place] <= min(end, begin + 5 * _NEAR_US):
        idle.after_wait += launching
        return
    left = launching
    for first, last, name in calls:
        if first >= launch:
            break
        inside = min(last, launch, end) - max(first, begin)
        if inside <= 0 or left <= 0:
            continue
        inside = min(inside, left)
        left -= inside
        idle.stalled += inside
        entry = stalls.setdefault(name, [0, 0.0, 0.0])
        entry[0] += 1
        entry[1] += inside
        entry[2] = max(entry[2], last - first)


def _launch_times(recording: Recording, wanted: set[int]) -> Mapping[int, float]:
    """When the host called what started these, by correlation."""
    rows = recording.host
    return {
        correlation: rows.start[row]
        for row, correlation in enumerate(rows.correlation)
        if correlation in wanted and correlation >= 0 and rows.kind[row] == Kind.RUNTIME
    }
