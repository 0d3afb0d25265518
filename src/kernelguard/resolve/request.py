"""What the resolver is asked: needs, target and options, with what nobody said filled in and noted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.observe.values import Environment, Gpu, GpuState
from kernelguard.resolve.values import Need

_PYTHON = Version("3.12")
"""Assumed when the target does not say: every kernel package with wheels has some for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the user allows beyond a wheel that was built for exactly this torch."""

    allow_source_build: bool = False
    cross_torch: bool = False
    """Use a wheel that was built for a slightly older torch minor; it is then marked for verification."""
    shims: frozenset[str] = frozenset()
    """Names of shims that the run will install, `fla-conv`."""
    pre_releases: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAnswer:
    """What the rules say about one hypothetical environment: (rule id, reason) each."""

    against: tuple[tuple[str, str], ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    """Rules that may apply; the target does not say enough to tell."""
    warnings: tuple[tuple[str, str], ...] = ()


RuleCheck = Callable[[Environment, Mapping[str, str]], RuleAnswer]
"""Takes a hypothetical environment, and how each distribution would get there (`release-wheel`, `index-wheel`, `sdist`,
`source`), by name."""


def no_rules(_environment: Environment, _via: Mapping[str, str]) -> RuleAnswer:
    """For a caller that wants to know what fits, whatever it computes."""
    return RuleAnswer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One question to the resolver."""

    needs: tuple[Need, ...]
    environment: Environment
    """The target; several GPUs in it are a mixed fleet that one set has to serve."""
    transformers: Version | None = None
    options: Options = Options()

    @property
    def on_cpu(self) -> bool:
        """Whether the target has no GPU that torch could use."""
        return self.environment.gpu_state in {GpuState.NONE, GpuState.CPU_TORCH}

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """GPUs with a known compute capability, each kind once."""
        return tuple({gpu.capability: gpu for gpu in self.environment.gpus if gpu.capability is not None}.values())


def complete_target(environment: Environment) -> tuple[Environment, tuple[str, ...]]:
    """The target with its gaps filled where a set cannot be named otherwise, and one sentence for each assumption."""
    notes = []
    python = environment.python
    if python is None:
        python = _PYTHON
        notes.append(f"the target says no Python version; {_PYTHON} is assumed (python=3.11 in the target changes it)")
    machine = environment.machine
    if machine is None:
        machine = "x86_64"
        notes.append("the target says no machine; x86_64 is assumed (machine=aarch64 in the target changes it)")
    if environment.glibc is None:
        notes.append("the target says no glibc; the floors of the chosen files are stated instead of checked")
    if environment.driver is None and environment.gpus:
        notes.append("the target says no driver; the floor of the chosen CUDA is stated instead of checked")
    return dataclasses.replace(environment, python=python, machine=machine), tuple(notes)


def fleet(environments: Sequence[Environment]) -> Environment:
    """One environment for machines that one set has to serve: all their GPUs, and the lowest driver and glibc.

    Raises:
        InputError: they differ in something that one set cannot differ in; every difference is named.
    """
    first = environments[0]
    problems = [
        f"{name}: {', '.join(sorted(str(v) for v in values))}"
        for name in (
            "python",
            "system",
            "machine",
            "torch",
            "torch_cuda",
            "torch_is_cpu",
            "triton",
            "transformers_version",
        )
        if len(values := {getattr(e, name) for e in environments} - {None}) > 1
    ]
    states = {e.gpu_state for e in environments}
    if len(states) > 1:
        problems.append(f"GPU state: {', '.join(sorted(states))}")
    if problems:
        raise InputError(
            f"these targets cannot share one set, they differ in {'; '.join(problems)}",
            hint="lock each of them by itself",
        )
    return dataclasses.replace(
        first,
        origin=first.origin
        if len(environments) == 1
        else "target " + " + ".join(e.origin.removeprefix("target ") for e in environments),
        python=_some(e.python for e in environments),
        torch=_some(e.torch for e in environments),
        torch_cuda=_some(e.torch_cuda for e in environments),
        triton=_some(e.triton for e in environments),
        transformers_version=_some(e.transformers_version for e in environments),
        # Of a floor that one machine does not state nothing can be said for the fleet.
        driver=_lowest([e.driver for e in environments]),
        glibc=_lowest([e.glibc for e in environments]),
        cuda_toolkit=_lowest([e.cuda_toolkit for e in environments]),
        gpus=tuple(gpu for e in environments for gpu in e.gpus),
    )


def _some(values: Iterable[Version | None]) -> Version | None:
    return next((v for v in values if v is not None), None)


def _lowest(values: Sequence[Version | None]) -> Version | None:
    known = [v for v in values if v is not None]
    return min(known) if len(known) == len(values) else None
