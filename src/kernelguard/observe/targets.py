"""What does a target written by hand (`h100,torch=2.12.1`) say about the machine?

The names are data, in `matrices/targets.toml`.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from packaging.version import InvalidVersion, Version

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.observe.values import Environment, Gpu, GpuState

CPU = "cpu"
KEYS = ("gpu", "driver", "cuda", "python", "platform", "machine", "glibc", "torch", "triton", "transformers")
_MACHINES = {"x86_64": "x86_64", "amd64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}
_OLDEST_PYTHON = Version("3.9")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownGpu:
    """One row of `matrices/targets.toml`."""

    name: str
    product: str
    capability: tuple[int, int]
    machine: str | None
    """The CPU that this GPU is built together with; None: sold for any."""
    aliases: tuple[str, ...]
    source: str
    retrieved: str


@cache
def known_gpus() -> tuple[KnownGpu, ...]:
    """The GPUs that a target can name."""
    document = tomllib.loads((data.matrices() / "targets.toml").read_text(encoding="utf-8"))
    return tuple(
        KnownGpu(
            name=row["name"],
            product=row["product"],
            capability=_capability(row["capability"]),
            machine=row.get("machine"),
            aliases=tuple(row.get("aliases", ())),
            source=row.get("source", document["source"]),
            retrieved=document["retrieved"],
        )
        for row in document["gpu"]
    )


def _capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def target(spec: str) -> Environment:
    """The environment that `spec` describes: a name, or `key=value` pairs, or both, separated by commas.

    What it does not say stays unknown (None).

    Raises:
        InputError: a name, key or value means nothing, or two of them contradict each other. All problems are named.
    """
    problems: list[str] = []
    given = _pairs(spec, problems)
    found = _read(given, problems)
    problems += _contradictions(found)
    if problems:
        names = ", ".join([CPU, *(gpu.name for gpu in known_gpus())])
        raise InputError(
            f"target {spec!r}: " + "; ".join(problems),
            hint=f"names: {names}. Keys: {', '.join(KEYS)}, as in h100,torch=2.12.1",
        )
    return _environment(spec, found)


@dataclass(slots=True, kw_only=True)
class _Found:
    """The values of one target, parsed."""

    cpu: bool = False
    gpu: KnownGpu | None = None
    platform: str | None = None
    platform_machine: str | None = None
    platform_glibc: Version | None = None
    machine: str | None = None
    versions: dict[str, Version]


def _pairs(spec: str, problems: list[str]) -> dict[str, str]:
    given: dict[str, str] = {}
    for position, part in enumerate(spec.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            key, value = "gpu", key
            if position > 0 and value:
                problems.append(f"{value!r} is no key=value (only the first part may be a bare name)")
                continue
        key = key.lower()
        if key not in KEYS:
            problems.append(f"unknown key {key!r}{_nearest(key, KEYS)}")
        elif not value:
            problems.append(f"{key} has no value" if equals else "an empty part")
        elif key in given:
            problems.append(f"{key} is given twice, as {given[key]!r} and as {value!r}")
        else:
            given[key] = value
    return given


def _read(given: Mapping[str, str], problems: list[str]) -> _Found:
    found = _Found(versions={})
    for key, value in given.items():
        try:
            _READERS[key](found, value)
        except ValueError as error:
            problems.append(str(error))
    return found


def _read_gpu(found: _Found, value: str) -> None:
    wanted = _squeezed(value)
    if wanted in {CPU, "none"}:
        found.cpu = True
        return
    names = {_squeezed(name): gpu for gpu in known_gpus() for name in (gpu.name, *gpu.aliases)}
    if wanted not in names:
        raise ValueError(f"unknown GPU {value!r}{_nearest(wanted, [CPU, *names])}")
    found.gpu = names[wanted]


def _read_platform(found: _Found, value: str) -> None:
    """`linux`, `linux-x86_64`, or a wheel's platform tag such as `manylinux_2_28_x86_64`."""
    shape = re.fullmatch(r"(?:linux|manylinux_(\d+)_(\d+))(?:[-_](x86_64|amd64|aarch64|arm64))?", value.lower())
    if shape is None:
        raise ValueError(
            f"platform {value!r} is none that fused kernels are built for (linux, linux-x86_64, manylinux_2_28_aarch64)"
        )
    found.platform = value
    if shape[1] is not None:
        found.platform_glibc = Version(f"{shape[1]}.{shape[2]}")
    if shape[3] is not None:
        found.platform_machine = _MACHINES[shape[3]]


def _read_machine(found: _Found, value: str) -> None:
    if value.lower() not in _MACHINES:
        raise ValueError(f"unknown machine {value!r}{_nearest(value.lower(), _MACHINES)}")
    found.machine = _MACHINES[value.lower()]


def _read_cuda(found: _Found, value: str) -> None:
    tag = re.fullmatch(r"cu(\d\d)(\d)", value.lower())
    _read_version("cuda")(found, f"{tag[1]}.{tag[2]}" if tag else value)
    if not Version("10.0") <= found.versions["cuda"] < Version("100"):
        raise ValueError(f"cuda {value!r} is no CUDA release (13.0, 12.8 or cu128)")


def _read_python(found: _Found, value: str) -> None:
    _read_version("python")(found, value)
    version = found.versions["python"]
    if version < _OLDEST_PYTHON or len(version.release) < 2:
        raise ValueError(f"python {value!r} is no version like 3.12, from {_OLDEST_PYTHON} on")


def _read_version(key: str) -> Callable[[_Found, str], None]:
    def read(found: _Found, value: str) -> None:
        try:
            found.versions[key] = Version(value)
        except InvalidVersion:
            raise ValueError(f"{key} {value!r} is no version") from None

    return read


_READERS: Mapping[str, Callable[[_Found, str], None]] = {
    "gpu": _read_gpu,
    "platform": _read_platform,
    "machine": _read_machine,
    "cuda": _read_cuda,
    "python": _read_python,
    **{key: _read_version(key) for key in ("driver", "glibc", "torch", "triton", "transformers")},
}


def _contradictions(found: _Found) -> list[str]:
    problems = []
    versions = found.versions
    if found.cpu:
        problems += [
            f"{CPU} is a machine without an NVIDIA GPU, but {key}={versions[key]} is given"
            for key in ("driver", "cuda")
            if key in versions
        ]
    if found.machine and found.platform_machine and found.machine != found.platform_machine:
        problems.append(f"machine={found.machine} contradicts platform={found.platform}")
    glibc = versions.get("glibc")
    if glibc is not None and found.platform_glibc is not None and glibc < found.platform_glibc:
        problems.append(f"glibc={glibc} is older than what platform={found.platform} stands for")
    machine = found.machine or found.platform_machine
    if found.gpu is not None and found.gpu.machine is not None and machine not in {None, found.gpu.machine}:
        problems.append(f"{found.gpu.name} comes with an {found.gpu.machine} CPU, but {machine} is given")
    built_for = _torch_build(versions.get("torch"))
    cuda = versions.get("cuda")
    if built_for == CPU and cuda is not None:
        problems.append(f"torch={versions['torch']} is a CPU build, but cuda={cuda} is given")
    elif isinstance(built_for, Version) and cuda is not None and built_for.release[:2] != cuda.release[:2]:
        problems.append(f"torch={versions['torch']} is built for CUDA {built_for}, but cuda={cuda} is given")
    return problems


def _torch_build(torch: Version | None) -> Version | str | None:
    """What the local part of torch's version says: a CUDA release, `cpu`, or nothing."""
    local = "" if torch is None or torch.local is None else torch.local
    if local == CPU:
        return CPU
    tag = re.fullmatch(r"cu(\d\d)(\d)", local)
    return Version(f"{tag[1]}.{tag[2]}") if tag else None


def _environment(spec: str, found: _Found) -> Environment:
    versions = found.versions
    built_for = _torch_build(versions.get("torch"))
    cuda = versions.get("cuda") or (built_for if isinstance(built_for, Version) else None)
    gpu = found.gpu
    # A Grace chip brings its CPU along; for the others x86_64 is what is rented unless something else is said.
    machine = found.machine or found.platform_machine or (gpu.machine if gpu else None) or "x86_64"
    state, detail = GpuState.UNKNOWN, "the target names no GPU"
    if found.cpu:
        state, detail = GpuState.NONE, "the target has no GPU"
    elif built_for == CPU:
        state, detail = GpuState.CPU_TORCH, f"the target's torch {versions['torch']} is a CPU build"
    elif gpu is not None:
        state, detail = GpuState.USABLE, "as the target says; nothing was looked at"
    return Environment(
        origin=f"target {spec}",
        live=False,
        python=versions.get("python"),
        system="Linux",
        machine=machine,
        glibc=versions.get("glibc") or found.platform_glibc,
        torch=versions.get("torch"),
        torch_cuda=cuda,
        torch_is_cpu=True if built_for == CPU else (False if cuda is not None else None),
        triton=versions.get("triton"),
        driver=versions.get("driver"),
        gpus=() if gpu is None else (Gpu(name=gpu.product, capability=gpu.capability),),
        gpu_state=state,
        gpu_detail=detail,
        transformers_version=versions.get("transformers"),
    )


def _squeezed(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _nearest(word: str, words: Mapping[str, object] | tuple[str, ...] | list[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
