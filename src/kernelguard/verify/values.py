"""What `verify` hands on: a verdict, kernel by kernel, with every number it rests on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kernelguard.judge.values import Level
from kernelguard.trace.values import FastPathTrace

SCHEMA = 1
"""Version of the verdict document. Keys are only ever added."""


class Outcome(StrEnum):
    """What became of one kernel. The first four are about the kernel; the rest say why nothing can be said."""

    RIGHT = "right"
    """Output and every gradient within what plain torch's own error allows."""
    WRONG = "wrong"
    """At least one tensor is not."""
    RAISED = "raised"
    """The package cannot be imported, or the call raises."""
    CRASHED = "crashed"
    """The kernel's process died from a signal."""
    NO_BACKWARD = "no-backward"
    """The output is right, and a backward is not implemented: by design for kernels that only decode."""
    LOADED = "loaded"
    """It can be imported; nothing was executed, because nothing was asked to be."""
    HUNG = "hung"
    """It did not end within its time limit: hung, or only slow to compile."""
    OUT_OF_MEMORY = "out-of-memory"
    NO_DRIVER = "no-driver"
    """CUDA does not come up here."""
    UNREACHABLE = "unreachable"
    """The kernel is to be loaded from a hub that cannot be reached from here, and it is not in the cache."""
    UNREADABLE = "unreadable"
    """The worker ended without a result, or with one that cannot be read."""
    REFERENCE = "reference"
    """The reference itself could not be computed, so there is nothing to compare with."""
    NO_PROBE = "no-probe"
    """kernelguard has no probe for this kernel."""


UNTOLD = frozenset(
    {
        Outcome.HUNG,
        Outcome.OUT_OF_MEMORY,
        Outcome.NO_DRIVER,
        Outcome.UNREACHABLE,
        Outcome.UNREADABLE,
        Outcome.REFERENCE,
        Outcome.NO_PROBE,
    }
)
"""The outcomes that mean "could not tell", never "failed"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorError:
    """One output or gradient beside the fp64 reference. Errors are relative; None: there was nothing to measure."""

    role: str
    """`output` or `gradient`."""
    name: str
    state: str
    """`right`, `wrong`, `missing` (no gradient at all), `not-finite` or `wrong-shape`."""
    error: float | None = None
    """Over the whole tensor."""
    plain: float | None = None
    """What plain torch has in the same dtype."""
    allowed: float | None = None
    worst: float | None = None
    """Of the worst row, beside an average row."""
    worst_plain: float | None = None
    worst_allowed: float | None = None
    zero: bool = False
    """All numbers are 0."""
    dtype: str = ""
    detail: str = ""

    @property
    def label(self) -> str:
        """`gradient of k`, for a person."""
        return f"gradient of {self.name}" if self.role == "gradient" else self.name

    def describe(self) -> str:
        """What is wrong with it, in words, with both numbers."""
        if self.state == "missing":
            return f"{self.label} is missing"
        if self.state == "not-finite":
            return f"{self.label} is not finite ({self.detail})"
        if self.state == "wrong-shape":
            return f"{self.label} has shape {self.detail}"
        zero = " and is zero everywhere" if self.zero else ""
        if (self.error or 0.0) > (self.allowed or 0.0):
            numbers = f"off by {self.error:.2g}, where plain torch is off by {self.plain:.2g}"
        else:
            numbers = f"off by {self.worst:.2g} in its worst row, where plain torch is off by {self.worst_plain:.2g}"
        return f"{self.label} is {numbers}{zero}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One set of inputs."""

    name: str
    lengths: tuple[int, ...]
    shape: Mapping[str, Any]
    outcome: Outcome
    tensors: tuple[TensorError, ...] = ()
    runs: int = 0
    """How often it ran with equal inputs."""
    differing: Mapping[str, float] = field(default_factory=dict)
    """Tensors that were not bit-identical from run to run, each with the relative difference."""
    unstable: tuple[TensorError, ...] = ()
    """Tensors that were wrong in a later run."""
    seconds: float = 0.0
    """The first call, with compiling and tuning."""
    warm_seconds: float = 0.0
    """The last call."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One configuration of one autotuned kernel, and what came out when it was pinned."""

    kernel: str
    key: str
    """What the autotuner remembers its choice under: sizes, flags and dtypes."""
    config: str
    case: str = ""
    """The inputs it was measured with; of several, those with which it was wrong."""
    state: str
    """`right`, `wrong`, `error` (it raised or crashed), `refused` (this GPU cannot run it), `not-measured`."""
    picked: bool = False
    """The autotuner took it by itself."""
    tensors: tuple[TensorError, ...] = ()
    """Every output and gradient as they were with it; where several kernels were pinned at once, with all of them."""
    detail: str = ""

    @property
    def wrong(self) -> tuple[TensorError, ...]:
        """The tensors that are not right."""
        return tuple(t for t in self.tensors if t.state != "right")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Everything about one kernel."""

    symbol: str
    package: str
    op: str
    outcome: Outcome
    reason: str = ""
    """One sentence; empty when it is right."""
    error_type: str = ""
    error: str = ""
    """The original exception, word for word."""
    target: str = ""
    file: str = ""
    dtype: str = ""
    trains: bool = True
    """The run needs its gradients."""
    cases: tuple[CaseResult, ...] = ()
    configurations: tuple[Configuration, ...] = ()
    seconds: float = 0.0
    backends: Mapping[str, str] = field(default_factory=dict)
    """Other implementations that the package can hand this call to, each with what became of it: `ran`, `not
    installed`, `switched off`, `not usable here`, or why it declined. Empty: the package hands nothing on."""
    forward_kernels: tuple[str, ...] = ()
    """GPU kernels that the profiler saw in the forward, without arguments; empty: not recorded."""
    backward_kernels: tuple[str, ...] = ()
    quick: Mapping[str, Any] = field(default_factory=dict)
    """A request for `workers/probe.py` that asks the same about a short input, for a look before each launch."""

    @property
    def deterministic(self) -> bool | None:
        """Equal inputs gave equal bits; None: not tried."""
        tried = [c for c in self.cases if c.runs > 1]
        return not any(c.differing for c in tried) if tried else None

    @property
    def wrong_configurations(self) -> tuple[Configuration, ...]:
        """Those that can be picked and do not compute the right thing."""
        return tuple(c for c in self.configurations if c.state in {"wrong", "error"})

    @property
    def unmeasured_configurations(self) -> tuple[Configuration, ...]:
        """Those that can be picked and of which nothing is known."""
        return tuple(c for c in self.configurations if c.state == "not-measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class SignalCheck:
    """Whether packed samples stay apart when these boundary signals are sent, in a cut-down model of this config."""

    signals: tuple[str, ...]
    left_out: str = ""
    """The one signal that was left out of the run's; empty: none was; `nothing`: all that exist were sent."""
    leak_gradient: float | None = None
    """The largest gradient of one sample's loss with respect to another sample's embeddings; 0 or it leaks."""
    leaking_layers: tuple[str, ...] = ()
    """Layers that leak by themselves, with the model's own inputs."""
    tremor: float = 0.0
    """How much logits differ between two runs with equal inputs."""
    leak_logit: float | None = None
    """How much other samples' logits change when one sample is replaced."""
    allowed_logit: float = 0.0
    """More than that is a leak: twice what equal inputs differ by, or twice what rounding the embeddings once does.

    Mamba-2's scan adds up across a boundary and subtracts again; what that leaves is rounding, and no gradient.
    """
    loss_packed: float | None = None
    loss_unpacked: float | None = None
    worst_parameter: str = ""
    worst_error: float | None = None
    """The largest relative difference of a parameter's gradient, packed beside one sample at a time."""
    allowed: float | None = None
    """What rounding alone does to that parameter's gradient, with a small factor."""
    isolated: bool | None = None
    """None: it could not be run; `detail` says why."""
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """What the numbers were measured on. A verdict says nothing about any other."""

    gpu: str = ""
    capability: tuple[int, int] | None = None
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    triton: str = ""
    ptxas: str = ""
    transformers: str = ""
    python: str = ""
    machine: str = ""
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Version by distribution, for every package that holds a kernel."""
    binaries: Mapping[str, str] = field(default_factory=dict)
    """sha256 by file, below site-packages, of their compiled parts."""
    records: Mapping[str, str] = field(default_factory=dict)
    """By distribution: one sha256 over what its RECORD says of each file, as `files_sha256` in a lock."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that decide which kernel runs or how it is compiled."""
    model_type: str = ""
    shapes: str = ""
    """sha256 over every operation, dtype, shape and length that was probed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What was verified: which model, for which run. Part of the verdict, because it holds for nothing else."""

    source: str
    """The path or hub id that was given."""
    model_type: str
    config_sha256: str
    """Of the config.json in canonical form, as in a lock."""
    lock: str = ""
    """Digest of the lock that was verified; empty: none was given."""
    length: int = 0
    """The training length in tokens."""
    intent: Mapping[str, Any] = field(default_factory=dict)
    """Every field of the intent."""
    layers: tuple[str, ...] = ()
    """The kind of each layer, the first one first; empty: the config does not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsedPath:
    """One fast path of the model, and what it was bound to while it was verified."""

    symbol: str
    package: str
    module: str
    """Where the kernel is imported from."""
    mechanism: str
    training: bool
    layers: int | None = None
    called_in: str = ""
    """The module of the model's code that calls it."""
    bound_to: str = ""
    """`kernel`, `fallback`, ...; empty: bindings were not looked at."""
    target: str = ""
    """The function that it was bound to."""
    distribution: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One real training step of the cut-down model, as the profiler saw it."""

    fast_paths: tuple[FastPathTrace, ...] = ()
    launches: int = 0
    """GPU kernels in the step."""
    gpu_microseconds: float = 0.0
    first_step_seconds: float | None = None
    """The first step of the process, with everything that Triton still had to compile or tune."""
    step_seconds: float | None = None
    """A later one."""
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer of one run of `kernelguard verify`."""

    level: Level
    """What was really executed; only `gpu` says anything about numbers on a GPU."""
    fingerprint: Fingerprint
    probes: tuple[ProbeResult, ...] = ()
    isolation: tuple[SignalCheck, ...] = ()
    signals: tuple[str, ...] | None = None
    """What the run sends; None: it does not pack."""
    subject: Subject | None = None
    """None: single kernels were measured, without a model around them."""
    fast_paths: tuple[UsedPath, ...] = ()
    trace: StepTrace | None = None
    """None: no step was recorded."""
    seconds: float = 0.0
    created: str = ""
    """UTC, ISO 8601."""
    problems: tuple[str, ...] = ()
    """What could not be observed, one sentence each."""
    cache_problems: tuple[str, ...] = ()
    """What the folder of `--warm-cache` lacks, one sentence each: it costs the run's start time, and is no fault."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: seconds by part of the run; parts that ran side by side overlap."""
