"""What did the host do, and for how long?

Operators with their own time, as torch's key_averages counts it; waits for the GPU; when it read data or compiled.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kernelguard.trace.intervals import Cover, Interval
from kernelguard.trace.recording import Kind, Recording

# Times are written in thousandths of a microsecond: a child may seem to end that much after its parent.
_ROUNDING = 0.004
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_WAIT = re.compile(r"^(cuda|hip)(Stream|Device|Event)Synchronize|^cu(Stream|Ctx|Event)Synchronize|^(cuda|hip)Memcpy$")
_DATA = re.compile(
    r"DataLoader|dataloader|^data[_ ](wait|load|fetch)|^(load|fetch|next)[_ ]?(data|batch)|get_batch", re.IGNORECASE
)
_COMPILE = re.compile(
    r"^_?compile.*\(dynamo_timed\)|^(_compile\.)?compile_inner|compile_fx|CompiledFxGraph\.compile|async_compile",
    re.IGNORECASE,
)
_MODULE_LOAD = re.compile(r"^cu(Module|Library)LoadData|^cudaLibraryLoadData")
_LAUNCH = re.compile(r"^(cuda|hip)(Launch|Graph|Module)|^cu(Launch|Graph)", re.IGNORECASE)
# Called by a forward pass and never by a derivative: inside the backward pass they are computed again.
_FORWARD_ONLY = {"aten::linear", "aten::scaled_dot_product_attention", "aten::conv1d", "aten::embedding"}
_ENGINE = "autograd::engine::evaluate_function"
# What key_averages leaves out.
_UNCOUNTED = {
    "[memory]", "[OutOfMemory]", "profiler::_record_function_enter", "profiler::_record_function_enter_new",
    "profiler::_record_function_exit", "aten::is_leaf", "aten::output_nr", "aten::_version",
}  # fmt: skip


@dataclass(slots=True, kw_only=True)
class Operator:
    """All calls of one name on the host. Microseconds."""

    name: str
    kind: Kind
    calls: int = 0
    self_host: float = 0.0
    """Without what it called."""
    total_host: float = 0.0
    self_device: float = 0.0
    """Of the kernels that it launched itself."""
    total_device: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """The host stood still until the GPU was through, always at the same place."""

    call: str
    """`cudaStreamSynchronize`."""
    operator: str
    """The outermost operator that asked for it; empty: called by the script itself."""
    count: int
    microseconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """The GPU stood still while the host was inside one long call that launched nothing."""

    operator: str
    calls: int
    microseconds: float
    """Of the GPU's standing still."""
    longest: float
    """Of the calls."""


STALL_US = 5000.0
"""A call that takes this long by itself prepares something: a plan for a new shape, an allocation, a file."""


@dataclass(slots=True, kw_only=True)
class HostFacts:
    """The host's side of a trace."""

    operators: list[Operator] = field(default_factory=list)
    """Most own time first."""
    steps: list[tuple[int, float, float]] = field(default_factory=list)
    """(number, begin, end) of each `ProfilerStep`."""
    busy: list[Interval] = field(default_factory=list)
    """Stretches in which some thread was inside an operator or a call of the runtime."""
    waiting: list[Interval] = field(default_factory=list)
    data: list[Interval] = field(default_factory=list)
    compiling: list[Interval] = field(default_factory=list)
    overhead: list[Interval] = field(default_factory=list)
    """The profiler's own work."""
    waits: tuple[Wait, ...] = ()
    long_calls: list[tuple[float, float, str]] = field(default_factory=list)
    """(begin, end, operator) of calls that took `STALL_US` by themselves and did not wait for the GPU."""
    module_loads: int = 0
    launches: int = 0
    threads: int = 0
    recomputed: float = 0.0
    """Microseconds on the GPU of products and attention of a forward pass that ran again inside the backward pass."""

    @property
    def self_host(self) -> float:
        """What key_averages prints as "Self CPU time total"."""
        return sum(operator.self_host for operator in self.operators)


@dataclass(slots=True)
class _Open:
    """An event that has not ended yet."""

    row: int
    end: float
    children: float = 0.0
    """Time of those directly below."""
    count: int = 0
    only: tuple[int, float, float] | None = None
    """The first child: name, duration, and the time of its own children."""
    only_below: tuple[int, tuple[int, float, float] | None] = (0, None)
    """Of that child: how many children, and its first."""
    device: float = 0.0
    outer: int = -1
    """Row of the outermost operator around it that is not one of autograd's."""
    backward: bool = False
    """Inside of what the autograd engine runs."""
    counted: bool = False
    """It, or an operator around it, is one of a forward pass that runs again."""


def read_host(recording: Recording, device_by_operator: Mapping[int, float], window: Interval | None) -> HostFacts:
    """The host's facts; waits and launches are counted inside the window only (None: everywhere)."""
    facts = HostFacts()
    totals: dict[int, Operator] = {}
    waits: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
    lanes: dict[int, array[int]] = defaultdict(lambda: array("q"))
    for row, lane in enumerate(recording.host.lane):
        lanes[lane].append(row)
    facts.threads = len(lanes)
    reader = _Reader(
        recording=recording,
        facts=facts,
        totals=totals,
        waits=waits,
        device_by_operator=device_by_operator,
        window=window,
    )
    for lane in list(lanes):
        reader.thread(lanes.pop(lane))
    facts.busy, facts.waiting = Cover(facts.busy).merged, Cover(facts.waiting).merged
    facts.data, facts.compiling = Cover(facts.data).merged, Cover(facts.compiling).merged
    facts.steps.sort(key=lambda step: step[1])
    facts.operators = sorted((o for o in totals.values() if o.calls), key=lambda o: (-o.self_host, o.name))
    names = recording.names
    facts.waits = tuple(
        sorted(
            (
                Wait(call=call, operator=names[name] if name >= 0 else "", count=int(count), microseconds=spent)
                for (call, name), (count, spent) in waits.items()
            ),
            key=lambda w: (-w.microseconds, w.call, w.operator),
        )
    )
    return facts


class _Reader:
    """Walks one thread after the other; names are judged once each."""

    def __init__(
        self,
        *,
        recording: Recording,
        facts: HostFacts,
        totals: dict[int, Operator],
        waits: dict[tuple[str, int], list[float]],
        device_by_operator: Mapping[int, float],
        window: Interval | None,
    ) -> None:
        self.recording, self.rows, self.facts, self.totals, self.waits = recording, recording.host, facts, totals, waits
        self.device, self.window = device_by_operator, window
        names = recording.names
        self.step = {i: int(m[1]) for i, n in enumerate(names) if (m := _STEP.match(n))}
        self.is_wait = [bool(_WAIT.search(n)) for n in names]
        self.is_data = [bool(_DATA.search(n)) for n in names]
        self.is_compile = [bool(_COMPILE.search(n)) for n in names]
        self.is_load = [bool(_MODULE_LOAD.search(n)) for n in names]
        self.is_launch = [bool(_LAUNCH.search(n)) for n in names]
        self.uncounted = {i for i, n in enumerate(names) if n in _UNCOUNTED}
        self.is_engine = [n.startswith(_ENGINE) for n in names]
        self.is_forward = [n in _FORWARD_ONLY for n in names]
        self.is_wrapper = [n.startswith("autograd::engine") or n.endswith(("Backward0", "Backward1")) for n in names]
        # All steps are one line of the table, as in key_averages.
        self.alias = dict.fromkeys(self.step, min(self.step, default=0))

    def thread(self, found: array[int]) -> None:
        """One thread's events: who is inside whom."""
        rows, stack = self.rows, list[_Open]()
        ordered = sorted(found, key=rows.duration.__getitem__, reverse=True)
        ordered.sort(key=rows.start.__getitem__)
        for row in ordered:
            if rows.name[row] in self.uncounted:
                continue
            begin, end = rows.start[row], rows.end(row)
            while stack and (begin >= stack[-1].end - 1e-6 or end > stack[-1].end + _ROUNDING):
                self._close(stack)
            self._note(row, begin, end, stack)
            opened = _Open(row, end, device=self.device.get(rows.external[row], 0.0) if self._owns(row) else 0.0)
            opened.outer = self._outer(row, stack)
            above = stack[-1] if stack else None
            opened.backward = self.is_engine[rows.name[row]] or (above is not None and above.backward)
            opened.counted = above is not None and (
                above.counted or (above.backward and self.is_forward[rows.name[above.row]])
            )
            stack.append(opened)
        while stack:
            self._close(stack)

    def _owns(self, row: int) -> bool:
        return self.rows.kind[row] in (Kind.OPERATOR, Kind.ANNOTATION)

    def _outer(self, row: int, stack: list[_Open]) -> int:
        if stack and stack[-1].outer >= 0:
            return stack[-1].outer
        name = self.rows.name[row]
        return row if self.rows.kind[row] == Kind.OPERATOR and not self.is_wrapper[name] else -1

    def _note(self, row: int, begin: float, end: float, stack: list[_Open]) -> None:
        """What this event says besides its time."""
        rows, facts = self.rows, self.facts
        name, kind = rows.name[row], rows.kind[row]
        if name in self.step and kind == Kind.ANNOTATION:
            facts.steps.append((self.step[name], begin, end))
        inside = self._inside(begin)
        if kind == Kind.RUNTIME:
            facts.launches += inside and self.is_launch[name]
            facts.module_loads += inside and self.is_load[name]
            if self.is_wait[name]:
                facts.waiting.append((begin, end))
                if inside:
                    outer = stack[-1].outer if stack else -1
                    entry = self.waits[self.recording.names[name], rows.name[outer] if outer >= 0 else -1]
                    entry[0] += 1
                    entry[1] += end - begin
        elif kind == Kind.OVERHEAD:
            facts.overhead.append((begin, end))
        elif self.is_data[name]:
            facts.data.append((begin, end))
        elif self.is_compile[name]:
            facts.compiling.append((begin, end))
        if kind != Kind.ANNOTATION and all(rows.kind[o.row] == Kind.ANNOTATION for o in stack):
            facts.busy.append((begin, end))

    def _close(self, stack: list[_Open]) -> None:
        """The innermost open event is over: book its time, and tell the one around it."""
        closed = stack.pop()
        rows, row = self.rows, closed.row
        name, duration = rows.name[row], rows.duration[row]
        if closed.count == 1 and closed.only is not None and closed.only[0] == name:
            # key_averages takes a call that does nothing but call itself again for one.
            _, inner, below = closed.only
            operator = self._operator(closed.only[0], row)
            operator.calls -= 1
            operator.total_host -= inner
            operator.self_host -= inner - below
            operator.total_device -= closed.device - self.device.get(rows.external[row], 0.0) if self.device else 0.0
            closed.children, (closed.count, closed.only) = below, closed.only_below
        operator = self._operator(name, row)
        operator.calls += 1
        operator.total_host += duration
        operator.self_host += duration - closed.children
        if closed.backward and self.is_forward[name] and not closed.counted and self._inside(rows.start[row]):
            self.facts.recomputed += closed.device
        if duration - closed.children >= STALL_US and self._prepares(name, row):
            outer = rows.name[closed.outer] if closed.outer >= 0 else name
            own = name if rows.kind[row] == Kind.OPERATOR else outer
            begin = rows.start[row]
            self.facts.long_calls.append((begin, begin + duration, self.recording.names[own]))
        operator.total_device += closed.device
        if self._owns(row):
            operator.self_device += self.device.get(rows.external[row], 0.0)
        if stack:
            parent = stack[-1]
            parent.children += duration
            parent.device += closed.device
            parent.count += 1
            if parent.count == 1:
                parent.only = (name, duration, closed.children)
                parent.only_below = (closed.count, closed.only)

    def _inside(self, begin: float) -> bool:
        return self.window is None or self.window[0] <= begin < self.window[1]

    def _prepares(self, name: int, row: int) -> bool:
        """Whether a long call is one that holds up what comes after it, and has no other name here."""
        if self.is_wait[name] or self.is_data[name] or self.is_compile[name] or self.is_wrapper[name]:
            return False
        return self.rows.kind[row] in (Kind.OPERATOR, Kind.RUNTIME)

    def _operator(self, name: int, row: int) -> Operator:
        name = self.alias.get(name, name)
        operator = self.totals.get(name)
        if operator is None:
            text = "ProfilerStep*" if name in self.step else self.recording.names[name]
            operator = self.totals[name] = Operator(name=text, kind=Kind(self.rows.kind[row]))
        return operator


def step_names(recording: Recording) -> Iterator[tuple[int, float, float]]:
    """(number, begin, end) of each step that the profiler was told of."""
    numbers = {i: int(m[1]) for i, n in enumerate(recording.names) if (m := _STEP.match(n))}
    if not numbers:
        return
    rows = recording.host
    for row, name in enumerate(rows.name):
        if name in numbers and rows.kind[row] == Kind.ANNOTATION:
            yield numbers[name], rows.start[row], rows.end(row)
