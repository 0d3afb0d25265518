"""Does one condition of a rule hold for these facts? True, false, or unknown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from packaging.version import InvalidVersion, Version

from kernelguard.judge.bounds import Bounds, Truth, all_of, any_of, truth
from kernelguard.judge.facts import Facts


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one predicate says about some facts."""

    truth: Truth
    said: str = ""
    """Both sides, for a person: `triton 3.5.0 is in >=3.4.0,<3.7.1`. For an unknown `any`: what is left of it."""
    unknown: tuple[str, ...] = ()
    """Names of the facts that would decide it."""


class Predicate(Protocol):
    """One condition."""

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""

    def words(self) -> str:
        """The condition in words."""


VERSIONS = {
    "torch": "torch",
    "triton": "triton",
    "cuda": "torch's CUDA",
    "ptxas": "triton's ptxas",
    "glibc": "glibc",
    "python": "Python",
    "transformers": "transformers",
    "driver": "the NVIDIA driver",
}


@dataclass(frozen=True, slots=True)
class VersionIn:
    """`triton = ">=3.4.0,<3.7.1"`: the version of one tool. A tool that is known to be absent is in no range."""

    fact: str
    bounds: Bounds

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if self.fact not in facts.versions:
            return Verdict(Truth.UNKNOWN, unknown=(self.fact,))
        version = facts.versions[self.fact]
        if version is None:
            return Verdict(Truth.FALSE)
        held = self.bounds.hold(version)
        return Verdict(held, f"{VERSIONS[self.fact]} {version} is in {self.bounds.text}", _if_unknown(held, self.fact))

    def words(self) -> str:
        """The condition in words."""
        return f"{VERSIONS[self.fact]} is {self.bounds.text}"


CHOICES = {
    "machine": "the machine is {}",
    "dtype": "the run computes in {}",
    "phase": "the run is {}",
    "attention": "the attention implementation is {}",
    "model_types": "the model is of type {}",
    "quantization": "the checkpoint is quantized with {}",
    "settings": "the configuration says {}",
}


@dataclass(frozen=True, slots=True)
class OneOf:
    """`machine = ["aarch64"]`: one of these words is among the facts."""

    fact: str
    values: tuple[str, ...]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if self.fact not in facts.choices:
            return Verdict(Truth.UNKNOWN, unknown=(self.fact,))
        found = [value for value in facts.choices[self.fact] if value in self.values]
        return Verdict(truth(bool(found)), CHOICES[self.fact].format(_joined(found)))

    def words(self) -> str:
        """The condition in words."""
        return CHOICES[self.fact].format(_joined(self.values))


@dataclass(frozen=True, slots=True)
class HeadDim:
    """`head_dim = ">256"`: some attention of the model has heads of such a size."""

    bounds: Bounds

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if "head_dim" not in facts.choices:
            return Verdict(Truth.UNKNOWN, unknown=("head_dim",))
        found = [dim for dim in facts.choices["head_dim"] if self.bounds.hold(Version(dim)) is Truth.TRUE]
        return Verdict(truth(bool(found)), f"head_dim {_joined(found)} is {self.bounds.text}")

    def words(self) -> str:
        """The condition in words."""
        return f"head_dim is {self.bounds.text}"


FLAGS = {
    "packed": ("samples are packed", "samples are not packed"),
    "compile": ("the model is compiled", "the model is not compiled"),
    "use_kernels": ("use_kernels is asked for", "use_kernels is not asked for"),
    "liger": ("liger is asked for", "liger is not asked for"),
    "nvcc": ("an nvcc is there", "no nvcc is there"),
    "executed": ("the model's code was really imported", "the model's code was only read"),
    "gpu_seen_working": ("torch reached the GPU", "torch was not seen reaching the GPU"),
    "grouped_values": ("linear attention has more value heads than key heads", "value heads equal key heads"),
    "grouped_heads": ("the trainer's layers do not repeat key heads", "the layers are transformers' own"),
}


@dataclass(frozen=True, slots=True)
class Flag:
    """`packed = true`: something is or is not so."""

    fact: str
    value: bool

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if self.fact not in facts.flags:
            return Verdict(Truth.UNKNOWN, unknown=(self.fact,))
        return Verdict(truth(facts.flags[self.fact] is self.value), self.words())

    def words(self) -> str:
        """The condition in words."""
        return FLAGS[self.fact][0 if self.value else 1]


@dataclass(frozen=True, slots=True)
class GpuIs:
    """`gpu = ["9.0", "10.*"]`: one of the GPUs has such a compute capability."""

    patterns: tuple[str, ...]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if facts.gpus is None:
            return Verdict(Truth.UNKNOWN, unknown=("gpu",))
        for capability in facts.gpus:
            if capability is not None and self._fits(capability):
                return Verdict(Truth.TRUE, f"the GPU has compute capability {capability[0]}.{capability[1]}")
        return Verdict(Truth.UNKNOWN, unknown=("gpu",)) if None in facts.gpus else Verdict(Truth.FALSE)

    def _fits(self, capability: tuple[int, int]) -> bool:
        return not {f"{capability[0]}.{capability[1]}", f"{capability[0]}.*"}.isdisjoint(self.patterns)

    def words(self) -> str:
        """The condition in words."""
        return f"the GPU has compute capability {_joined(self.patterns)}"


@dataclass(frozen=True, slots=True)
class Uses:
    """`symbols = ["chunk_kda"]`: the run uses one of these kernels."""

    symbols: tuple[str, ...]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if facts.symbols is None:
            return Verdict(Truth.UNKNOWN, unknown=("model",))
        found = self.used(facts)
        return Verdict(truth(bool(found)), f"the run uses {_joined(found, 'and')}")

    def used(self, facts: Facts) -> tuple[str, ...]:
        """Those of the symbols that the run uses."""
        return tuple(symbol for symbol in self.symbols if symbol in (facts.symbols or ()))

    def words(self) -> str:
        """The condition in words."""
        return f"the run uses {_joined(self.symbols)}"


@dataclass(frozen=True, slots=True)
class Installed:
    """`packages = { "fla-core|flash-linear-attention" = "<0.5.0" }`: a distribution is there, in such a version.

    Of several names the first that is installed decides: old flash-linear-attention held what fla-core holds now.
    """

    names: tuple[str, ...]
    bounds: Bounds

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if facts.distributions is None:
            return Verdict(Truth.UNKNOWN, unknown=(self.names[0],))
        name = next((name for name in self.names if name in facts.distributions), None)
        if name is None:
            return Verdict(Truth.FALSE)
        text = facts.distributions[name]
        if not self.bounds.clauses:
            return Verdict(Truth.TRUE, f"{name} {text} is installed")
        try:
            held = self.bounds.hold(Version(text))
        except InvalidVersion:
            held = Truth.UNKNOWN
        return Verdict(held, f"{name} {text} is in {self.bounds.text}", _if_unknown(held, name))

    def words(self) -> str:
        """The condition in words."""
        return f"{_joined(self.names)} {self.bounds.text or 'of any version'} is installed"


@dataclass(frozen=True, slots=True)
class Absent:
    """`absent = ["tilelang"]`: a distribution is not installed."""

    name: str

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if facts.distributions is None:
            return Verdict(Truth.UNKNOWN, unknown=(self.name,))
        return Verdict(truth(self.name not in facts.distributions), self.words())

    def words(self) -> str:
        """The condition in words."""
        return f"{self.name} is not installed"


@dataclass(frozen=True, slots=True)
class Differ:
    """`differ = ["fla-core", "flash-linear-attention"]`: both are installed, in different versions."""

    names: tuple[str, str]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if facts.distributions is None:
            return Verdict(Truth.UNKNOWN, unknown=self.names)
        one, other = (facts.distributions.get(name) for name in self.names)
        if one is None or other is None:
            return Verdict(Truth.FALSE)
        try:
            differ = Version(one).public != Version(other).public
        except InvalidVersion:
            differ = one != other
        return Verdict(truth(differ), f"{self.names[0]} is {one}, {self.names[1]} is {other}")

    def words(self) -> str:
        """The condition in words."""
        return f"{self.names[0]} and {self.names[1]} are installed in different versions"


VIA = {
    "release-wheel": "the wheel of its GitHub release",
    "index-wheel": "a wheel from an index",
    "sdist": "its sdist on the package index",
    "source": "a build from source",
}


@dataclass(frozen=True, slots=True)
class Via:
    """`via = { causal-conv1d = ["sdist"] }`: how a distribution gets there."""

    name: str
    values: tuple[str, ...]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if self.name not in facts.via:
            return Verdict(Truth.UNKNOWN, unknown=(f"how {self.name} is installed",))
        value = facts.via[self.name]
        return Verdict(truth(value in self.values), f"{self.name} comes as {VIA.get(value, value)}")

    def words(self) -> str:
        """The condition in words."""
        return f"{self.name} comes as {_joined([VIA[value] for value in self.values])}"


@dataclass(frozen=True, slots=True)
class Variable:
    """`variables = { USE_HUB_KERNELS = ["0", "no"] }`: an environment variable has such a value, in either case."""

    name: str
    values: tuple[str, ...]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        if facts.variables is None:
            return Verdict(Truth.UNKNOWN, unknown=(self.name,))
        value = facts.variables.get(self.name)
        matches = value is not None and value.lower() in {v.lower() for v in self.values}
        return Verdict(truth(matches), f"{self.name}={value} is set")

    def words(self) -> str:
        """The condition in words."""
        return f"{self.name} is set to {_joined(self.values)}"


@dataclass(frozen=True, slots=True)
class AnyOf:
    """`any = [{...}, {...}]`: one of several groups of conditions holds."""

    groups: tuple[tuple[Predicate, ...], ...]

    def test(self, facts: Facts) -> Verdict:
        """Hold it against the facts."""
        results = [[predicate.test(facts) for predicate in group] for group in self.groups]
        truths = [all_of(v.truth for v in verdicts) for verdicts in results]
        held = any_of(truths)
        if held is Truth.TRUE:
            return Verdict(held, ", ".join(v.said for v in results[truths.index(held)]))
        if held is Truth.FALSE:
            return Verdict(held)
        still = [
            [(predicate, verdict) for predicate, verdict in zip(group, verdicts, strict=True) if verdict.unknown]
            for group, verdicts, group_truth in zip(self.groups, results, truths, strict=True)
            if group_truth is Truth.UNKNOWN
        ]
        names = (name for pairs in still for _, verdict in pairs for name in verdict.unknown)
        left = [" and ".join(open_words(*pair) for pair in pairs) for pairs in still]
        return Verdict(held, _either(left), tuple(dict.fromkeys(names)))

    def words(self) -> str:
        """The condition in words."""
        return _either([" and ".join(p.words() for p in group) for group in self.groups])


def walk(predicates: Iterable[Predicate]) -> Iterable[Predicate]:
    """All predicates, those inside `any` included."""
    for predicate in predicates:
        yield predicate
        if isinstance(predicate, AnyOf):
            for group in predicate.groups:
                yield from walk(group)


def open_words(predicate: Predicate, verdict: Verdict) -> str:
    """What is left open of a condition that is unknown, in words."""
    return verdict.said if isinstance(predicate, AnyOf) else predicate.words()


def _either(conditions: Sequence[str]) -> str:
    return ("either " if len(conditions) > 1 else "") + ", or ".join(conditions)


def _if_unknown(held: Truth, fact: str) -> tuple[str, ...]:
    return (fact,) if held is Truth.UNKNOWN else ()


def _joined(words: Sequence[str], last: str = "or") -> str:
    return f" {last} ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else ""
