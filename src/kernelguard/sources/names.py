"""What does a wheel's name say: for which Python, machine and glibc, built for which torch, CUDA and C++ ABI?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_sdist_filename
from packaging.utils import parse_wheel_filename as _parse_wheel
from packaging.version import InvalidVersion, Version

from kernelguard.sources.values import BuiltFor

_LEGACY_GLIBC = {"manylinux1": "2.5", "manylinux2010": "2.12", "manylinux2014": "2.17"}
_CUDA = r"cu\.?(?P<cuda>\d+(?:\.\d+)?)"
_TORCH = r"(?:torch|pt)\.?(?P<torch>\d+\.\d+)(?:\.\d+)?"
_ABI = r"(?:\.?cxx11abi\.?(?P<abi>true|false))?"
# cu12torch2.8cxx11abitrue, cu.13.0.torch.2.12, cu12.8torch2.10.0cxx11abitrue, torch2.9cu130
_BUILT = (re.compile(rf"{_CUDA}\.?{_TORCH}{_ABI}"), re.compile(rf"{_TORCH}\.?{_CUDA}{_ABI}"))
_NEWEST_TORCH_MAJOR = 9
"""A larger number is the release of an NGC container (25.11), not of torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileName:
    """A distribution file's name, read."""

    distribution: str
    version: Version
    sdist: bool
    pythons: tuple[str, ...] | None = None
    machines: tuple[str, ...] | None = None
    glibc: Version | None = None
    python_floor: SpecifierSet = field(default_factory=SpecifierSet)
    """Of a stable-ABI wheel, `>=3.9`."""
    pure: bool = False


def read_file_name(name: str) -> FileName | None:
    """Read the name of a wheel or sdist; None: it is neither, or a wheel for something that is not CPython 3."""
    if name.endswith(".whl"):
        try:
            distribution, version, _, tags = _parse_wheel(name)
        except (InvalidWheelFilename, InvalidVersion):
            return None
        return _of_tags(canonicalize_name(distribution), version, tags)
    try:
        distribution, version = parse_sdist_filename(name)
    except (InvalidSdistFilename, InvalidVersion):
        return None
    return FileName(distribution=canonicalize_name(distribution), version=version, sdist=True)


def _of_tags(distribution: str, version: Version, tags: Iterable[Tag]) -> FileName | None:
    tags = sorted(tags, key=str)
    pythons: set[str] = set()
    floors: list[Version] = []
    any_python = False
    for tag in tags:
        major_minor = re.fullmatch(r"cp3(\d+)", tag.interpreter)
        if tag.interpreter in {"py3", "cp3"} or (tag.interpreter.startswith("py3") and tag.abi == "none"):
            any_python = True
            if minor := tag.interpreter[3:]:
                floors.append(Version(f"3.{minor}"))
        elif major_minor and tag.abi == "abi3":
            any_python = True
            floors.append(Version(f"3.{major_minor[1]}"))
        elif major_minor:
            pythons.add(tag.abi if tag.abi.startswith("cp3") else tag.interpreter)
    if not any_python and not pythons:
        return None
    machines, glibc = _platforms([tag.platform for tag in tags])
    return FileName(
        distribution=distribution,
        version=version,
        sdist=False,
        pythons=None if any_python else tuple(sorted(pythons)),
        machines=machines,
        glibc=glibc,
        python_floor=SpecifierSet(f">={min(floors)}") if floors else SpecifierSet(),
        pure=machines is None,
    )


def _platforms(platforms: Iterable[str]) -> tuple[tuple[str, ...] | None, Version | None]:
    """Machines (a foreign platform by its own name) and the lowest glibc that any of the tags admits."""
    machines: set[str] = set()
    floors: list[Version] = []
    bare = False
    for platform in platforms:
        if platform == "any":
            return None, None
        linux = re.fullmatch(r"(?:linux|(manylinux(?:1|2010|2014))|manylinux_(\d+)_(\d+))_(x86_64|aarch64)", platform)
        if linux is None:
            machines.add(platform)
            continue
        machines.add(linux[4])
        if linux[1]:
            floors.append(Version(_LEGACY_GLIBC[linux[1]]))
        elif linux[2]:
            floors.append(Version(f"{linux[2]}.{linux[3]}"))
        else:
            bare = True
    return tuple(sorted(machines)), min(floors) if floors and not bare else None


def built_for(version: Version) -> BuiltFor | None:
    """What the local part of a version says about torch, CUDA and ABI; None: nothing."""
    local = version.local or ""
    for pattern in _BUILT:
        shape = pattern.search(local)
        if shape is None:
            continue
        torch = Version(shape["torch"])
        return BuiltFor(
            torch=torch if torch.major <= _NEWEST_TORCH_MAJOR else None,
            cuda=cuda_of_tag(shape["cuda"]),
            cxx11_abi=None if shape["abi"] is None else shape["abi"] == "true",
        )
    return None


def cuda_of_tag(digits: str) -> Version:
    """`12` and `12.8` as they are, `118` as 11.8, `130` as 13.0."""
    return Version(digits if "." in digits or len(digits) < 3 else f"{digits[:-1]}.{digits[-1]}")
