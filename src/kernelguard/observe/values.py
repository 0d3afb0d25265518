"""What `observe` hands on: the environment of an interpreter, and what its fast paths are really bound to.

Everything here can cross a file boundary (`kernelguard observe -o`), so every value is plain and has a JSON form;
the schema is `schemas/environment.schema.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from packaging.version import Version


class GpuState(StrEnum):
    """Why a GPU can or cannot be used; three different 'no' that need three different fixes."""

    USABLE = "usable"
    NONE = "none"
    """No NVIDIA device on this machine."""
    HIDDEN = "hidden"
    """There is one, but CUDA_VISIBLE_DEVICES (or NVIDIA_VISIBLE_DEVICES) hides it from this process."""
    CPU_TORCH = "cpu-torch"
    """torch is a CPU-only build, whatever the machine has."""
    BROKEN = "broken"
    """A device and a CUDA torch, but CUDA does not come up; `detail` has the original words."""
    UNKNOWN = "unknown"
    """Not looked at, or the worker died."""


KERNEL_DISTRIBUTIONS = (
    "apex",
    "causal-conv1d",
    "fla-core",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flash-linear-attention",
    "flash-qla",
    "kernels",
    "liger-kernel",
    "mamba-ssm",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "tilelang",
    "torch",
    "transformers",
    "triton",
)
"""Distributions that hold kernels, or choose them: each one that is installed is part of a verdict and of a lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU."""

    name: str
    capability: tuple[int, int] | None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """An installed distribution as its metadata says."""

    name: str
    """Normalized (PEP 503)."""
    version: str
    """As written; may be no PEP 440 version."""
    location: str
    top_level: tuple[str, ...] = ()
    """Import names of top-level packages, where RECORD or top_level.txt tells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A machine and an interpreter. Captured on one machine, usable on another; a target is one written by hand.

    None means "not known", never "absent".
    """

    origin: str
    """`/path/to/python`, `file env.json` or `target h100`."""
    live: bool
    """An interpreter on this machine, in which workers can run."""
    executable: str | None = None
    python: Version | None = None
    system: str | None = None
    """`platform.system()`: Linux, Darwin, Windows."""
    machine: str | None = None
    """`x86_64`, `aarch64`."""
    glibc: Version | None = None
    torch: Version | None = None
    torch_cuda: Version | None = None
    """The CUDA that torch was built for; None with `torch_is_cpu` means a CPU build."""
    torch_is_cpu: bool | None = None
    cxx11_abi: bool | None = None
    triton: Version | None = None
    ptxas: Version | None = None
    driver: Version | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_state: GpuState = GpuState.UNKNOWN
    gpu_detail: str = ""
    distributions: Mapping[str, Distribution] | None = None
    """By normalized name; None: not known (a target)."""
    transformers_root: str | None = None
    transformers_version: Version | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    """Only those that change which kernel runs (see `observe/interpreter.py`), never secrets."""
    cuda_toolkit: Version | None = None
    """nvcc's version, where one is on PATH or CUDA_HOME."""
    problems: tuple[str, ...] = ()
    """What could not be observed, one sentence each."""


class ImportOutcome(StrEnum):
    """What happened when a module was really imported in its own process."""

    OK = "ok"
    ABSENT = "absent"
    """No such module can be found; nothing is installed under that name."""
    RAISED = "raised"
    """It is there, but importing it raises; `error` has the exception word for word."""
    CRASHED = "crashed"
    """The process died from a signal."""
    HUNG = "hung"
    EXITED = "exited"
    """The module called exit()."""
    NOT_TRIED = "not-tried"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportFact:
    """The real import of one module, in a process of its own."""

    module: str
    outcome: ImportOutcome
    error_type: str = ""
    error: str = ""
    """The original message, word for word."""
    missing_module: str = ""
    """`ModuleNotFoundError.name`, when that was the cause: `triton`."""
    signal: str = ""
    """`SIGABRT`, `SIGSEGV`, ..."""
    file: str = ""
    """`__file__`; empty for a namespace package."""
    search_path: tuple[str, ...] = ()
    """`__path__`, for packages; shows which folder shadows which."""
    symbols: Mapping[str, bool] = field(default_factory=dict)
    """Which of the asked names the module has."""
    distributions: tuple[str, ...] = ()
    """Installed distributions that own this top-level import name."""
    version: str = ""
    """`__version__` of the top-level package, where it has one."""


class BoundTo(StrEnum):
    """What stands behind a fast path in the imported modeling module."""

    KERNEL = "kernel"
    """A function of the package that the model wants."""
    HUB = "hub"
    """A function of the `kernels` hub."""
    TORCH = "torch"
    """The model's own PyTorch code, or None."""
    OTHER = "other"
    """Something that is neither: a third party replaced it."""
    UNKNOWN = "unknown"
    """The shape of the wrapper is not known, or it could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """The function one fast path is really bound to."""

    symbol: str
    module: str
    """The modeling module it was read from."""
    bound_to: BoundTo
    target: str = ""
    """`fla.ops.gated_delta_rule.chunk.chunk_gated_delta_rule` or the torch function's dotted name."""
    file: str = ""
    distribution: str = ""
    parameters: tuple[str, ...] = ()
    """Names that reach the function: of its own signature, without `*args` and `**kwargs`."""
    accepts_any_keyword: bool = False
    """It has `**kwargs`: an unknown keyword is swallowed, which proves nothing."""
    detail: str = ""
    """Why it is unknown, or the original exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateFact:
    """The value a gate (`is_fast_path_available`) has in the imported module; None: could not be read."""

    module: str
    name: str
    value: bool | None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """What the binding worker saw when it imported the model's code the way the training process will."""

    bindings: tuple[Binding, ...] = ()
    gates: tuple[GateFact, ...] = ()
    imports: tuple[ImportFact, ...] = ()
    """Every package of every fast path, each imported in its own process, torch first (as transformers does)."""
    modules: tuple[ImportFact, ...] = ()
    """The modeling modules themselves."""
    layer_counts: Mapping[str, int] = field(default_factory=dict)
    """Modules of each owner class in the model built on the meta device; empty when that did not work."""
    cuda_available: bool | None = None
    """`torch.cuda.is_available()` in that process."""
    problems: tuple[str, ...] = ()
