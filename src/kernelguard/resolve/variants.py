"""Which build variant of a hub kernel would `kernels` load on a machine that is not this one, and why not the others?

The rules are those of `kernels` 0.17 (variants.py); a test holds them against the real package over a generated grid.
One thing is different on purpose: where `kernels` leaves a tie to the order of a set, the name decides here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from packaging.version import Version

_ARCH = re.compile(
    r"(?:(?P<torch>torch)(?P<torch_v>\d\d+)(?:-(?P<abi>cxx11|cxx98))?"
    r"|(?P<stable>torch-stable-abi)(?P<stable_v>\d\d+)"
    r"|(?P<tvm>tvm-ffi)(?P<tvm_v>\d\d+))"
    r"-(?P<backend>[a-z]+)(?P<backend_v>\d\d+)?-(?P<machine>[^-]+)-(?P<os>[^-]+)"
)
_VERSIONED = {"cu": "cuda", "rocm": "rocm", "xpu": "xpu", "cann": "cann"}
_PLAIN = frozenset({"cpu", "metal", "neuron", "tpu"})
_METAL_NEEDS = Version("26.0")
_ABI3_ON_FREE_THREADED = Version("3.15")


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What decides which variant fits: a machine, perhaps a hypothetical one."""

    backend: str
    """`cuda`, `rocm`, `xpu`, `cann`, or `cpu`, `metal`, `neuron`, `tpu`."""
    backend_version: Version | None
    """With `cuda` that of torch's build, never the driver's."""
    machine: str
    """`x86_64`, `aarch64`."""
    os: str = "linux"
    torch: Version | None = None
    cxx11_abi: bool | None = None
    tvm_ffi: Version | None = None
    macos: Version | None = None
    python: Version | None = None
    free_threaded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The name of a folder below `build/`, read."""

    name: str
    framework: str
    """`torch`, `torch-stable-abi`, `tvm-ffi`, or `noarch`."""
    version: Version | None = None
    cxx11_abi: bool | None = None
    backend: str = ""
    """As in `System`; `universal` for the old name of noarch."""
    backend_version: Version | None = None
    machine: str = ""
    os: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantDecision:
    """Whether one variant fits; `reason` names both sides and is empty when it does."""

    name: str
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.reason


@lru_cache(maxsize=4096)
def parse_variant(name: str) -> Variant | None:
    """Read a variant's name; None: it is none that `kernels` would look at."""
    if name.startswith("torch-") and not name.startswith("torch-stable-abi"):
        return Variant(name=name, framework="noarch", backend=name.removeprefix("torch-"))
    shape = _ARCH.fullmatch(name)
    if shape is None:
        return None
    word, digits = shape["backend"], shape["backend_v"]
    if (word in _VERSIONED) != bool(digits) or word not in {*_VERSIONED, *_PLAIN}:
        return None
    framework = shape["torch"] or shape["stable"] or shape["tvm"]
    written = shape["torch_v"] or shape["stable_v"] or shape["tvm_v"]
    return Variant(
        name=name,
        framework=framework,
        # The first digit is the major: torch213 is 2.13.
        version=Version(f"{written[0]}.{written[1:]}"),
        cxx11_abi=None if shape["abi"] is None else shape["abi"] == "cxx11",
        backend=_VERSIONED.get(word, word),
        # The last digit is the minor: cu130 is 13.0, xpu20253 is 2025.3.
        backend_version=Version(f"{digits[:-1]}.{digits[-1]}") if digits else None,
        machine=shape["machine"],
        os=shape["os"],
    )


def choose_variant(names: Iterable[str], system: System) -> tuple[str | None, tuple[VariantDecision, ...]]:
    """The variant that `kernels` would load, and the decision about each, in its order of preference."""
    decided = []
    for name in sorted(set(names)):
        variant = parse_variant(name)
        reason = f"{name!r} is no variant name" if variant is None else _unfit(variant, system)
        decided.append((_preference(variant, accepted=not reason), VariantDecision(name=name, reason=reason)))
    decided.sort(key=lambda pair: (pair[0], pair[1].name))
    decisions = tuple(decision for _, decision in decided)
    return (decisions[0].name if decisions and decisions[0].fits else None), decisions


def _unfit(variant: Variant, system: System) -> str:
    if variant.framework == "noarch":
        backend = "npu" if system.backend == "cann" else system.backend
        if variant.backend in {backend, "universal"}:
            return ""
        return f"it is for {variant.backend}, the machine's backend is {backend}"
    if system.free_threaded and (system.python is None or system.python < _ABI3_ON_FREE_THREADED):
        return f"compiled variants use the stable ABI, which free-threaded Python {system.python} does not have"
    if variant.machine != system.machine:
        return f"it is for {variant.machine}, the machine is {system.machine}"
    if variant.os != system.os:
        return f"it is for {variant.os}, the machine runs {system.os}"
    return _unfit_framework(variant, system) or _unfit_backend(variant, system)


def _unfit_framework(variant: Variant, system: System) -> str:
    torch = None if system.torch is None else Version(f"{system.torch.major}.{system.torch.minor}")
    if variant.framework == "torch":
        if variant.version != torch:
            return f"built for torch {variant.version}, the set has {torch or 'none'}"
        if variant.cxx11_abi is not None and variant.cxx11_abi != system.cxx11_abi:
            return f"built with the {_abi(variant.cxx11_abi)} C++ ABI, the set's torch has {_abi(system.cxx11_abi)}"
    elif variant.framework == "torch-stable-abi":
        if torch is None or variant.version is None or variant.version > torch:
            return f"needs torch {variant.version} or newer, the set has {torch or 'none'}"
    elif variant.version != system.tvm_ffi:
        return f"built for tvm-ffi {variant.version}, the set has {system.tvm_ffi or 'none'}"
    return ""


def _unfit_backend(variant: Variant, system: System) -> str:
    if variant.backend == system.backend == "cuda":
        mine, have = variant.backend_version, system.backend_version
        if mine is None or have is None or mine.major != have.major or mine.minor > have.minor:
            return f"built for CUDA {mine}, the set's torch has CUDA {have}"
        return ""
    if (variant.backend, variant.backend_version) != (system.backend, system.backend_version):
        mine_text = f"{variant.backend} {variant.backend_version or ''}".strip()
        return f"built for {mine_text}, the machine has {system.backend} {system.backend_version or ''}".strip()
    if variant.backend == "metal" and (system.macos is None or system.macos < _METAL_NEEDS):
        return f"needs macOS {_METAL_NEEDS} or newer, the machine has {system.macos or 'none'}"
    return ""


def _abi(new: bool | None) -> str:
    return "an unknown one" if new is None else "new" if new else "old"


def _preference(variant: Variant | None, *, accepted: bool) -> tuple[int, ...]:
    """Smaller is better: stable ABI, then exact torch, then tvm-ffi and noarch, then universal."""
    if variant is None:
        return (2,)
    rejected = 0 if accepted else 1
    if variant.framework == "noarch":
        return rejected, 2, 0, 0, int(variant.backend == "universal")
    newest_backend = -variant.backend_version.minor if variant.backend_version is not None else 0
    if variant.framework == "torch-stable-abi" and variant.version is not None:
        return rejected, 0, -variant.version.major, -variant.version.minor, newest_backend
    if variant.framework == "torch":
        return rejected, 1, 0, int(variant.cxx11_abi is not None), newest_backend
    return rejected, 2, 0, 0, newest_backend
