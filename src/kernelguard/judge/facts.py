"""What is known about this run that a rule can ask for? From the values of declare and observe to plain facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.declare.values import Declaration, Intent, Requirement
from kernelguard.observe.values import Environment, GpuState

_TRITON = ("triton", "pytorch-triton", "triton-nightly")


_SWITCHES = ("use_mamba_kernels",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Plain facts, each either known or unknown. "Known to be absent" is a known fact.

    A key that is missing from a mapping is unknown, and so is a None where a whole field may be None.
    """

    versions: Mapping[str, Version | None] = field(default_factory=dict)
    """By tool (`triton`, `cuda`, `driver`, ...). A None value: known to be absent, for example a CPU build of torch."""
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Facts that are words, such as `machine`; several for `model_types`. An empty tuple: known to be none."""
    flags: Mapping[str, bool] = field(default_factory=dict)
    gpus: tuple[tuple[int, int] | None, ...] | None = None
    """Compute capabilities of the GPUs; None inside: a GPU of unknown capability."""
    symbols: tuple[str, ...] | None = None
    """Kernel symbols that this run uses: declared, in at least one layer, and in the phase that is meant."""
    distributions: Mapping[str, str] | None = None
    """Version texts by normalized name."""
    via: Mapping[str, str] = field(default_factory=dict)
    """How a distribution gets there, by name: `release-wheel`, `index-wheel`, `sdist` or `source`."""
    variables: Mapping[str, str] | None = None
    """Environment variables that change which kernel runs."""

    @classmethod
    def of(
        cls,
        *,
        environment: Environment,
        declaration: Declaration | None,
        intent: Intent,
        via: Mapping[str, str] | None = None,
        executed: bool | None = None,
    ) -> Facts:
        """Collect the facts of a run. Pure; what the values leave open stays unknown.

        `executed`: whether the model's code was really imported; by default that is taken to be so on a live
        interpreter.
        """
        distributions = environment.distributions
        return cls(
            versions=dict(_versions(environment, declaration)),
            choices=dict(_choices(environment, declaration, intent)),
            flags=dict(_flags(environment, declaration, intent, environment.live if executed is None else executed)),
            gpus=_gpus(environment),
            symbols=None if declaration is None else _symbols(declaration, intent),
            distributions=None if distributions is None else {n: d.version for n, d in distributions.items()},
            via=dict(via or {}),
            variables=dict(environment.variables) if _was_seen(environment) else None,
        )


def _was_seen(environment: Environment) -> bool:
    """A real interpreter, here or captured elsewhere; a target has no list of distributions."""
    return environment.live or environment.distributions is not None


def _versions(environment: Environment, declaration: Declaration | None) -> Iterator[tuple[str, Version | None]]:
    known = {
        "torch": environment.torch,
        "cuda": environment.torch_cuda,
        "triton": environment.triton,
        "ptxas": environment.ptxas,
        "glibc": environment.glibc,
        "python": environment.python,
        "driver": environment.driver,
        "transformers": environment.transformers_version if declaration is None else declaration.transformers.version,
    }
    for name, version in known.items():
        if version is not None:
            yield name, version
    if environment.torch_cuda is None and environment.torch_is_cpu:
        yield "cuda", None
    installed = environment.distributions
    if installed is None:
        return
    if environment.triton is None:
        found = [installed[name].version for name in _TRITON if name in installed]
        if not found:
            yield "triton", None
        elif (version := _version(found[0])) is not None:
            yield "triton", version
    if environment.torch is None and "torch" not in installed:
        yield from (("torch", None), ("cuda", None))


def _choices(
    environment: Environment, declaration: Declaration | None, intent: Intent
) -> Iterator[tuple[str, tuple[str, ...]]]:
    if environment.machine is not None:
        yield "machine", (environment.machine,)
    yield "dtype", (intent.dtype,)
    yield "phase", (str(intent.phase),)
    # Nothing said: transformers takes sdpa or eager, never a package.
    yield "attention", (intent.attn_implementation,) if intent.attn_implementation else ()
    if declaration is None:
        return
    raws = [declaration.config.raw, *(part.raw for part in declaration.config.parts)]
    yield "model_types", tuple(dict.fromkeys(part.model_type for part in declaration.config.parts))
    methods = [q.get("quant_method") for raw in raws if isinstance(q := raw.get("quantization_config"), Mapping)]
    yield "settings", tuple(dict.fromkeys(text for raw in raws for text in _settings(raw)))
    yield "quantization", tuple(dict.fromkeys(str(method) for method in methods))
    if dims := tuple(dict.fromkeys(str(dim) for raw in raws if (dim := _head_dim(raw)) is not None)):
        yield "head_dim", dims


def _flags(
    environment: Environment, declaration: Declaration | None, intent: Intent, executed: bool
) -> Iterator[tuple[str, bool]]:
    yield from (
        ("packed", intent.packed),
        ("compile", intent.compile),
        ("use_kernels", intent.use_kernels),
        ("liger", intent.liger),
        ("grouped_heads", intent.grouped_heads),
        ("executed", executed),
        # Not about the GPU but about what was seen, hence always known. A target is described, not seen.
        ("gpu_seen_working", environment.gpu_state is GpuState.USABLE and _was_seen(environment)),
    )
    if environment.cuda_toolkit is not None:
        # None means "not found", and nvcc can hide in more places than were looked at: that stays unknown.
        yield "nvcc", True
    if declaration is not None and (grouped := _grouped_values(declaration)) is not None:
        yield "grouped_values", grouped


def _gpus(environment: Environment) -> tuple[tuple[int, int] | None, ...] | None:
    if environment.gpus:
        return tuple(gpu.capability for gpu in environment.gpus)
    # A machine that was described as having none has none. A live one without a GPU may be where the run is prepared.
    return () if not environment.live and environment.gpu_state is GpuState.NONE else None


def _symbols(declaration: Declaration, intent: Intent) -> tuple[str, ...]:
    return tuple(
        dict.fromkeys(
            path.symbol
            for path in declaration.fast_paths
            if path.layers != 0
            and not path.disabled_by
            and intent.phase in path.phases
            and (path.requirement is not Requirement.OPT_IN or intent.use_kernels)
        )
    )


def _grouped_values(declaration: Declaration) -> bool | None:
    """Whether linear attention has more value heads than key heads; None: the config does not say."""
    pairs = [
        (part.raw["linear_num_key_heads"], part.raw["linear_num_value_heads"])
        for part in declaration.config.parts
        if "linear_num_key_heads" in part.raw and "linear_num_value_heads" in part.raw
    ]
    return any(keys != values for keys, values in pairs) if pairs else None


def _settings(raw: Mapping[str, Any]) -> Iterator[str]:
    """The switches of a configuration that rules ask about: `use_mamba_kernels=False`."""
    for name in _SWITCHES:
        if isinstance(value := raw.get(name), bool):
            yield f"{name}={value}"


def _head_dim(raw: Mapping[str, Any]) -> int | None:
    given = raw.get("head_dim")
    if isinstance(given, int):
        return given
    if "qk_rope_head_dim" in raw:
        # Latent attention: the size is not hidden_size / heads, and how it is put together differs by model.
        return None
    hidden, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads > 0 else None


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None
