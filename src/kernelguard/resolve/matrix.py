"""Which builds of torch and of kernel packages are known, and which drivers they need (`matrices/`)."""

from __future__ import annotations

import datetime as dt
import functools
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.sources.values import BuiltFor, Candidate, Kind, Known, TorchBuild

_NEWEST_SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Drivers:
    """The oldest NVIDIA driver on Linux for each CUDA."""

    compatible: Mapping[int, str]
    """CUDA major -> driver that runs any minor of it, as NVIDIA writes it (`525.60.13`)."""
    toolkit: Mapping[Version, str]
    """CUDA release -> driver it came with."""

    def floor(self, cuda: Version) -> Version | None:
        """The oldest driver that runs programs built with this CUDA; None: not known."""
        text = self.floor_text(cuda)
        return Version(text) if text else None

    def floor_text(self, cuda: Version) -> str:
        """The same as NVIDIA writes it; empty: not known."""
        return self.compatible.get(cuda.major, "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Which releases of `kernels` a transformers accepts."""

    transformers: SpecifierSet
    kernels: SpecifierSet
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """What some releases of transformers need."""

    transformers: SpecifierSet
    torch: SpecifierSet
    python: SpecifierSet


@dataclass(frozen=True, slots=True, kw_only=True)
class Repository:
    """A kernel hub repository."""

    id: str
    package: str
    symbols: tuple[str, ...]
    versions: tuple[tuple[SpecifierSet, int], ...]
    """transformers -> the version (a branch `v<n>`) that it asks for."""
    backward: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """What is known about kernels from the hub."""

    windows: tuple[Window, ...]
    published: tuple[Version, ...]
    """Releases of the package `kernels`."""
    repositories: tuple[Repository, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What building a package from source takes."""

    std: str
    """The C++ standard that its setup.py passes; empty: none."""
    hard_coded_archs: bool
    arch_variable: str
    requires: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Serves:
    """Symbols of another import package that a distribution has a function for, behind a shim."""

    package: str
    symbols: tuple[str, ...]
    shim: str
    """Name of what has to bind the model to it."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackageFacts:
    """One file of `matrices/wheels/`."""

    distribution: str
    package: str
    kind: str
    """`extension`, `pure` or `tool`."""
    companions: tuple[str, ...]
    helps: tuple[str, ...]
    """Import packages that a tool makes right where they would be wrong alone."""
    needs_nvcc: bool
    look_alikes: SpecifierSet | None
    """Releases on the package index that are not what their name says."""
    build: BuildFacts | None
    candidates: tuple[Candidate, ...]
    serves: tuple[Serves, ...] = ()
    repository: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """Everything that `resolve` knows without asking anyone."""

    torch: tuple[TorchBuild, ...]
    drivers: Drivers
    hub: Hub
    packages: Mapping[str, PackageFacts] = field(default_factory=dict)
    """By distribution."""
    floors: tuple[Floor, ...] = ()
    retrieved: dt.date | None = None
    """Of the torch table."""


@cache
def matrix() -> Matrix:
    """The matrix that ships with kernelguard."""
    return load_matrix(data.matrices())


def load_matrix(folder: Path) -> Matrix:
    """Read and check the files of a `matrices/` folder.

    Raises:
        InputError: a file is missing, unreadable, of a newer schema, or wrong; all problems are listed.
    """
    problems: list[str] = []
    documents = {
        name: _read(folder / f"{name}.toml", f"{name}-matrix", problems) for name in ("torch", "drivers", "hub")
    }
    wheels = {path: _read(path, "wheels-matrix", problems) for path in sorted((folder / "wheels").glob("*.toml"))}
    if problems:
        raise _unusable(folder, problems)
    packages = {}
    for path, document in wheels.items():
        problems += [f"{path.name}: {text}" for text in _wheel_problems(path, document)]
        if not problems:
            packages[document["distribution"]] = _package(document)
    problems += [f"torch.toml: {text}" for text in _torch_problems(documents["torch"])]
    if problems:
        raise _unusable(folder, problems)
    return Matrix(
        torch=tuple(_torch_builds(documents["torch"])),
        drivers=Drivers(
            compatible={int(r["cuda"]): r["compatible"] for r in documents["drivers"]["major"]},
            toolkit={Version(r["cuda"]): r["driver"] for r in documents["drivers"]["toolkit"]},
        ),
        hub=_hub(documents["hub"]),
        packages=packages,
        floors=tuple(
            Floor(
                transformers=SpecifierSet(row["releases"]),
                torch=SpecifierSet(row["torch"]),
                python=SpecifierSet(row["python"]),
            )
            for row in documents["torch"].get("transformers", ())
        ),
        retrieved=documents["torch"]["retrieved"],
    )


def check_matrix(folder: Path) -> tuple[str, ...]:
    """Every problem of the resolver's files in a `matrices/` folder, one sentence each; empty: none."""
    try:
        load_matrix(folder)
    except InputError as error:
        return tuple(error.message.split("\n")[1:]) or (error.message,)
    return ()


def _unusable(folder: Path, problems: Sequence[str]) -> InputError:
    return InputError(
        "\n".join([f"the matrices in {folder} are unusable:", *problems]), hint="kernelguard matrix check"
    )


def _read(path: Path, schema: str, problems: list[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name}: missing")
        return {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path.name}: no TOML: {error}")
        return {}
    version = document.get("schema")
    if isinstance(version, int) and version > _NEWEST_SCHEMA:
        problems.append(f"{path.name}: schema {version} is newer than this kernelguard reads ({_NEWEST_SCHEMA})")
        return {}
    errors = sorted(_validator(schema).iter_errors(_plain(document)), key=lambda e: list(map(str, e.absolute_path)))
    problems.extend(f"{path.name}: {_where(e.absolute_path)}{e.message}" for e in errors)
    return {} if errors else document


@cache
def _validator(schema: str) -> Any:
    return jsonschema.Draft202012Validator(json.loads(data.schema(schema).read_text("utf-8")))


def _plain(value: Any) -> Any:
    """TOML dates as text, so that a JSON Schema can speak about them."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, dt.date) else value


def _where(path: Any) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return f"{text.lstrip('.')}: " if text else ""


def _torch_problems(document: Mapping[str, Any]) -> Iterator[str]:
    seen: set[str] = set()
    for row in document["release"]:
        version = row["version"]
        if version in seen:
            yield f"torch {version} is listed twice"
        seen.add(version)
        if "x86_64" not in row and "aarch64" not in row:
            yield f"torch {version} has no build"
        yield from _specifier_problems(f"torch {version} requires_python", row["requires_python"])
    versions = [Version(row["version"]) for row in document["release"]]
    if versions != sorted(versions):
        yield "releases are not in ascending order"
    for row in document.get("transformers", []):
        for key in ("releases", "torch", "python"):
            yield from _specifier_problems(f"transformers {row['releases']} {key}", row[key])
    for row in document.get("abi_exception", []):
        if row["version"] not in seen:
            yield f"abi_exception is about torch {row['version']}, which is not listed"


def _wheel_problems(path: Path, document: Mapping[str, Any]) -> Iterator[str]:
    if path.stem != document["distribution"]:
        yield f"the file is about {document['distribution']!r}; its name has to be {document['distribution']}.toml"
    for row in document.get("release", []):
        name = f"release {row['version']}"
        yield from _specifier_problems(f"{name} requires_python", row.get("requires_python", ""))
        for requirement in row.get("requires", []):
            try:
                Requirement(requirement)
            except InvalidRequirement as error:
                yield f"{name}: {requirement!r} is no requirement: {error}"
        if row.get("wheels") and "release_url" not in document:
            yield f"{name} has wheels, but the file has no release_url"
        for wheel in row.get("wheels", []):
            for cuda in wheel["cuda"].split():
                if cuda not in row["archs"]:
                    yield f"{name} has wheels for CUDA {cuda}, but no archs for it"
    for specifier in document.get("look_alikes", []):
        yield from _specifier_problems("look_alikes", specifier)


def _specifier_problems(where: str, text: str) -> Iterator[str]:
    try:
        SpecifierSet(text)
    except InvalidSpecifier as error:
        yield f"{where}: {error}"


def _torch_builds(document: Mapping[str, Any]) -> Iterator[TorchBuild]:
    exceptions = {
        (row["version"], channel): row["cxx11_abi"]
        for row in document.get("abi_exception", [])
        for channel in row["channels"]
    }
    for row in document["release"]:
        for machine in ("x86_64", "aarch64"):
            if machine not in row:
                continue
            build = row[machine]
            make = functools.partial(
                TorchBuild,
                version=Version(row["version"]),
                machine=machine,
                glibc=Version(build["glibc"]),
                pythons=tuple(build["pythons"].split()),
                min_cxx=row["min_cxx"],
                requires_python=SpecifierSet(row["requires_python"]),
            )
            cuda = Version(build["cuda"]) if build["cuda"] else None
            yield make(
                cuda=cuda,
                channel="index",
                cxx11_abi=build["cxx11_abi"],
                triton=SpecifierSet(row["triton"]) if cuda is not None else None,
                archs=tuple(build["archs"].split()) if "archs" in build else None,
                known=Known.OBSERVED,
                evidence=f"{row.get('source', document['source'])} ({row.get('retrieved', document['retrieved'])})",
            )
            if cuda is None:
                # Where the index has a CPU build only, what the channels have for this machine was not read.
                continue
            yield make(
                cuda=None,
                channel="cpu",
                cxx11_abi=build["cxx11_abi"],
                triton=None,
                archs=None,
                known=Known.REPORTED,
                evidence=f"{document['cpu_channel_source']} ({document['retrieved']})",
                url=document["channel_url"].format(channel="cpu"),
            )
            for channel in row.get("channels", []):
                yield make(
                    cuda=Version(f"{channel[2:4]}.{channel[4:]}"),
                    channel=channel,
                    cxx11_abi=exceptions.get((row["version"], channel), build["cxx11_abi"]),
                    triton=SpecifierSet(row["triton"]),
                    archs=None,
                    known=Known.REPORTED,
                    evidence=f"{row['channels_source']} ({document['retrieved']})",
                    url=document["channel_url"].format(channel=channel),
                )


def _hub(document: Mapping[str, Any]) -> Hub:
    return Hub(
        windows=tuple(
            Window(
                transformers=SpecifierSet(row["transformers"]),
                kernels=SpecifierSet(row["kernels"]),
                source=row["source"],
            )
            for row in document["window"]
        ),
        published=tuple(sorted(Version(text) for text in document["published"]["kernels"].split())),
        repositories=tuple(
            Repository(
                id=row["id"],
                package=row["package"],
                symbols=tuple(row["symbols"]),
                versions=tuple((SpecifierSet(v["transformers"]), v["version"]) for v in row["versions"]),
                backward=row["backward"],
                source=row["source"],
            )
            for row in document["repository"]
        ),
    )


def _package(document: Mapping[str, Any]) -> PackageFacts:
    build = document.get("build")
    return PackageFacts(
        distribution=document["distribution"],
        package=document["package"],
        kind=document["kind"],
        companions=tuple(document.get("companions", ())),
        helps=tuple(document.get("helps", ())),
        needs_nvcc=document.get("needs_nvcc", False),
        look_alikes=SpecifierSet(",".join(document["look_alikes"])) if "look_alikes" in document else None,
        build=None
        if build is None
        else BuildFacts(
            std=build["std"],
            hard_coded_archs=build["hard_coded_archs"],
            arch_variable=build.get("arch_variable", ""),
            requires=tuple(build["requires"]),
            source=build["source"],
        ),
        candidates=tuple(itertools.chain(_released(document), _indexed(document), _source_release(document))),
        serves=tuple(
            Serves(package=row["package"], symbols=tuple(row["symbols"]), shim=row["shim"], why=row["why"])
            for row in document.get("serves", ())
        ),
        repository=document.get("repository", ""),
    )


def _released(document: Mapping[str, Any]) -> Iterator[Candidate]:
    for row in document.get("release", []):
        make = functools.partial(
            Candidate,
            distribution=document["distribution"],
            kind=Kind.WHEEL,
            requires_python=SpecifierSet(row.get("requires_python", "")),
            requires=tuple(Requirement(text) for text in row.get("requires", ())),
            glibc=Version(row["glibc"]) if "glibc" in row else None,
            needs_nvcc=document.get("needs_nvcc", False),
            evidence=f"{row['source']} ({row['retrieved']})",
        )
        if "wheels" not in row:
            yield make(
                version=Version(row["version"]),
                source="package index",
                known=Known.OBSERVED,
                sha256=row.get("sha256", ""),
            )
            continue
        for wheel in row["wheels"]:
            for torch, cuda, abi, machine, python in itertools.product(
                wheel["torch"].split(),
                wheel["cuda"].split(),
                wheel["cxx11_abi"],
                wheel["machine"].split(),
                wheel["pythons"].split(),
            ):
                url = document["release_url"].format(
                    tag=row["tag"],
                    asset_version=row["asset_version"],
                    cuda=cuda,
                    torch=torch,
                    abi=str(abi).upper(),
                    python=python,
                    platform=f"linux_{machine}",
                )
                yield make(
                    version=Version(f"{row['asset_version']}+cu{cuda}torch{torch}cxx11abi{str(abi).lower()}"),
                    source=f"release page {row['tag']}",
                    known=Known(wheel["state"]),
                    filename=url.rpartition("/")[2],
                    url=url.replace("+", "%2B"),
                    sha256=wheel.get("sha256", ""),
                    pythons=(python,),
                    machines=(machine,),
                    built_for=BuiltFor(
                        torch=Version(torch),
                        cuda=Version(cuda),
                        cxx11_abi=abi,
                        archs=tuple(row["archs"][cuda].split()),
                    ),
                    direct=True,
                )


def _source_release(document: Mapping[str, Any]) -> Iterator[Candidate]:
    """The newest sdist: what a source build would start from."""
    build = document.get("build")
    if build is not None:
        yield Candidate(
            distribution=document["distribution"],
            version=Version(build["version"]),
            kind=Kind.SDIST,
            source="package index",
            known=Known.OBSERVED,
            glibc=None,
            needs_nvcc=True,
            evidence=f"{build['source']} ({build['retrieved']})",
        )


def _indexed(document: Mapping[str, Any]) -> Iterator[Candidate]:
    for index in document.get("index", []):
        for wheel in index["wheels"]:
            for torch, cuda, machine in itertools.product(
                wheel["torch"].split(), wheel["cuda"].split(), wheel["machine"].split()
            ):
                yield Candidate(
                    distribution=document["distribution"],
                    version=Version(f"{index['version']}+{index['local'].format(cuda=cuda, torch=torch)}"),
                    kind=Kind.WHEEL,
                    source=f"{index['name']} index cu{cuda.replace('.', '')}",
                    known=Known(wheel["state"]),
                    index_url=index["url"].format(cuda=cuda.replace(".", "")),
                    pythons=tuple(wheel["pythons"].split()),
                    machines=(machine,),
                    glibc=Version(index["glibc"]),
                    built_for=BuiltFor(
                        torch=Version(torch),
                        cuda=Version(cuda),
                        archs=tuple(index["archs"].split()) if "archs" in index else None,
                    ),
                    requires=tuple(Requirement(text) for text in index.get("requires", ())),
                    evidence=f"{index['source']} ({index['retrieved']})",
                )
