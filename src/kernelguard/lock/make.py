"""From a resolution to a lock: every file, each with its hash."""

from __future__ import annotations

import platform as this_machine
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

from kernelguard.declare.values import FastPath, Intent, ModelConfig
from kernelguard.errors import KernelguardError, ToolError, UndeterminedError
from kernelguard.lock.choose import choose_file, supported_tags
from kernelguard.lock.compile import Compiled, Engine, Platform, compile_requirements
from kernelguard.lock.files import file_name_of
from kernelguard.lock.parts import hub_pins, locked_intent, locked_model, locked_paths, locked_target, source_pins
from kernelguard.lock.record import digest_of_wheel, wheel_version
from kernelguard.lock.tools import Tools, find_python, make_tools
from kernelguard.lock.values import (
    Lock,
    LockedTorch,
    Pin,
    Role,
)
from kernelguard.observe.values import Environment
from kernelguard.resolve.request import complete_target
from kernelguard.resolve.values import Candidate, Kind, Known, Resolution, TorchBuild
from kernelguard.sources.folder import hash_file
from kernelguard.sources.http import Http
from kernelguard.sources.hub import Hub
from kernelguard.sources.index import IndexFile, IndexSource
from kernelguard.sources.names import read_file_name
from kernelguard.sources.pipconfig import PipConfig, local_folder

_ASSUMED_GLIBC = Version("2.28")
"""The oldest that every torch since 2.7 loads on."""
_AT_ONCE = 8
_TORCH_FAMILY = ("torch", "triton", "nvidia-", "cuda-", "torchvision", "torchaudio")


class NoSetError(KernelguardError):
    """There is nothing to lock: no set of builds serves every fast path on this target. A definite no."""

    exit_code = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where files may come from."""

    config: PipConfig
    extra_indexes: tuple[str, ...] = ()
    find_links: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is locked for."""

    model: ModelConfig
    intent: Intent
    fast_paths: tuple[FastPath, ...]
    """Those that the run needs."""
    transformers: Version | None
    environment: Environment
    """The target as it was given."""


def make_lock(
    resolution: Resolution,
    subject: Subject,
    places: Places,
    *,
    cache: Path,
    http: Http,
    hub: Hub | None = None,
    engine: Engine | None = None,
) -> Lock:
    """Pin every file of a complete resolution. `cache`: where the tools' environments are kept.

    Raises:
        NoSetError: the resolution is not complete.
        UndeterminedError: something that has to be hashed cannot be reached.
        ToolError: pip-tools or uv failed: the set's dependencies exclude each other.
    """
    build = resolution.torch
    if build is None or not resolution.complete:
        raise no_set(resolution, subject.environment)
    target, _ = complete_target(subject.environment)
    platform = _platform(target, build)
    pips = [pin for pin in resolution.pins if pin.kind is Kind.WHEEL]
    extra = sorted({*places.extra_indexes, *(p.index_url for p in pips if p.index_url), *_channel_index(build)})
    indexes = [
        IndexSource(places.config.index_url, http),
        *(IndexSource(url, http, extra=True) for url in [*extra, *places.config.extra_index_urls]),
    ]
    for pin in pips:
        if pin.index_url and pin.known is not Known.SEEN:
            # Only others say that this index has it. Asking it gives the clearer message when it is out of reach.
            IndexSource(pin.index_url, http, extra=True).files(pin.distribution)
    engine = engine or _engine(platform, target, indexes[0], build)
    compiled = compile_requirements(
        list(_wanted(resolution, subject, build, pips)),
        engine=engine,
        tools=_tools(engine, platform, cache),
        config=places.config,
        platform=platform,
        extra_indexes=extra,
        find_links=[str(folder) for folder in places.find_links],
    )
    finder = _Finder(
        platform=platform,
        places=places,
        indexes=indexes,
        http=http,
        chosen={p.distribution: p for p in pips},
        verify={a.candidate.distribution: a.verify for choice in resolution.choices for a in choice.accepted},
    )
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        pins = tuple(pool.map(finder.pin, compiled))
    _hold_to_choice(pins, pips)
    return Lock(
        model=locked_model(subject.model),
        intent=tuple(sorted(locked_intent(subject.intent))),
        transformers=str(subject.transformers or ""),
        target=locked_target(resolution, subject.environment, platform, pins, build),
        torch=LockedTorch(
            version=str(build.version),
            cuda=str(build.cuda or ""),
            channel=build.channel,
            cxx11_abi=build.cxx11_abi,
            triton=str(resolution.triton or ""),
        ),
        fast_paths=tuple(locked_paths(resolution, subject.fast_paths)),
        pins=pins,
        admits_launch=resolution.admits_launch,
        hub=tuple(hub_pins(resolution, hub)),
        sources=tuple(source_pins(resolution, indexes[0])),
        notes=(*resolution.notes, *map(str, resolution.cautions)),
    )


def no_set(resolution: Resolution, environment: Environment) -> NoSetError:
    """What stands in the way, and what would help, of an incomplete resolution."""
    build = resolution.torch
    target, _ = complete_target(environment)
    python = f"cp{target.python.major}{target.python.minor}" if target.python is not None else "any Python"
    if build is None:
        told = f"no torch fits {environment.origin}"
    else:
        place = f"{build.label}, {'new' if build.cxx11_abi else 'old'} C++ ABI, {python}, linux {build.machine}"
        told = "; ".join(f"no build of {need.package} for {place}" for need in resolution.missing)
    return NoSetError(told, hint="; ".join(resolution.fixes) or None)


def _platform(target: Environment, build: TorchBuild) -> Platform:
    python, machine = target.python, target.machine
    if python is None or machine is None:
        raise AssertionError("complete_target fills in both")
    return Platform(python=python, machine=machine, glibc=target.glibc or max(_ASSUMED_GLIBC, build.glibc))


def _engine(platform: Platform, target: Environment, index: IndexSource, build: TorchBuild) -> Engine:
    native = (
        this_machine.system() == "Linux"
        and this_machine.machine() == platform.machine
        and target.glibc is None
        and find_python(platform.python) is not None
    )
    if not native:
        return Engine.UV
    if build.channel != "index":
        return Engine.PIP_TOOLS
    # Without metadata beside the wheels pip would fetch gigabytes of CUDA only to read what they require.
    release = [f for f in index.files("torch") if (n := read_file_name(f.filename)) and n.version == build.version]
    return Engine.PIP_TOOLS if any(f.has_metadata for f in release) else Engine.UV


def _tools(engine: Engine, platform: Platform, cache: Path) -> Tools:
    here = find_python(platform.python) if engine is Engine.PIP_TOOLS else None
    if here is None:
        version = this_machine.python_version_tuple()
        here = find_python(Version(f"{version[0]}.{version[1]}"))
    if here is None:
        raise ToolError("no Python interpreter was found to run pip-tools and uv in")
    return make_tools(cache, here)


def _channel_index(build: TorchBuild) -> Iterator[str]:
    if build.channel not in {"index", "folder"}:
        yield build.url


def _wanted(resolution: Resolution, subject: Subject, build: TorchBuild, pips: Sequence[Candidate]) -> Iterator[str]:
    if build.channel == "index":
        yield f"torch=={build.version}"
    elif build.channel == "folder" and build.url:
        name = read_file_name(file_name_of(build.url))
        yield f"torch=={name.version if name is not None else build.version}"
    else:
        yield f"torch=={build.version}+{build.tag}"
    if resolution.triton is not None:
        yield f"triton=={resolution.triton}"
    if subject.transformers is not None:
        yield f"transformers=={subject.transformers}"
    for pin in pips:
        yield f"{pin.distribution} @ {pin.url}" if pin.direct else f"{pin.distribution}=={pin.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finder:
    """Finds the one file for each compiled line."""

    platform: Platform
    places: Places
    indexes: Sequence[IndexSource]
    http: Http
    chosen: dict[str, Candidate]
    verify: dict[str, tuple[str, ...]]
    """What has to be measured before each may be trusted."""

    def pin(self, line: Compiled) -> Pin:
        candidate = self.chosen.get(line.name)
        role = _role(line.name, candidate)
        file, index = self._file(line, candidate)
        digest = file.sha256 or next(iter(sorted(line.hashes)), "")
        if not digest:
            raise UndeterminedError(
                f"no hash of {file.filename} can be had: {file.url} is not listed with one and was not fetched",
                hint="is the place that has it reachable? --find-links DIR with the file in it does too",
            )
        version = line.version
        if line.url:
            version = wheel_version(file.url, self.http)
        opened = role is Role.KERNEL or line.name == "torch"
        return Pin(
            name=line.name,
            version=version,
            filename=file.filename,
            url=file.url,
            sha256=digest,
            role=role,
            size=file.size,
            direct=bool(line.url),
            index=index,
            source=candidate.source if candidate is not None else "package index" if not index else f"index {index}",
            verify=self.verify.get(line.name, ()),
            files_sha256=digest_of_wheel(file.url, self.http) if opened else "",
        )

    def _file(self, line: Compiled, candidate: Candidate | None) -> tuple[IndexFile, str]:
        if line.url:
            known = candidate.sha256 if candidate is not None else ""
            size = candidate.size if candidate is not None else None
            only = next(iter(line.hashes), "") if len(line.hashes) == 1 else known
            return IndexFile(filename=file_name_of(line.url), url=line.url, sha256=only, size=size), ""
        tags = supported_tags(self.platform)
        for folder in [*self.places.find_links, *filter(None, map(local_folder, self.places.config.find_links))]:
            local = _in_folder(folder, line.name)
            file = choose_file(local, name=line.name, version=line.version, hashes=line.hashes, tags=tags)
            if file is not None:
                return file, ""
        configured = {self.places.config.index_url, *self.places.config.extra_index_urls}
        for index in self.indexes:
            files = index.files(line.name)
            file = choose_file(files, name=line.name, version=line.version, hashes=line.hashes, tags=tags)
            if file is not None:
                return file, "" if index.url.rstrip("/") in configured else f"{index.url}/"
        raise ToolError(
            f"no wheel of {line.name} {line.version} fits Python {self.platform.python}, glibc {self.platform.glibc}, "
            f"{self.platform.machine}",
            hint="another python= or glibc= in the target",
        )


def _in_folder(folder: Path, name: str) -> Iterator[IndexFile]:
    for path in sorted(folder.glob("*.whl")):
        read = read_file_name(path.name)
        if read is not None and read.distribution == name:
            size = path.stat().st_size
            yield IndexFile(filename=path.name, url=path.resolve().as_uri(), sha256=hash_file(path), size=size)


def _hold_to_choice(pins: Sequence[Pin], chosen: Sequence[Candidate]) -> None:
    """The compiled files are those that were resolved: the same hash wherever one was known before."""
    by_name = {pin.name: pin for pin in pins}
    for candidate in chosen:
        pin = by_name.get(candidate.distribution)
        if pin is None:
            raise ToolError(f"{candidate.label} was chosen, but pip-tools or uv left it out")
        same_file = candidate.filename in {"", pin.filename}
        if candidate.sha256 and same_file and candidate.sha256 != pin.sha256:
            raise UndeterminedError(
                f"{pin.filename}: {pin.url} has sha256 {pin.sha256}, {candidate.sha256} is known for it",
                hint="one of the two is not what it says: do not install either before that is understood",
            )


def _role(name: str, candidate: Candidate | None) -> Role:
    if candidate is not None:
        return Role.KERNEL
    return Role.TORCH if name.startswith(_TORCH_FAMILY) else Role.DEPENDENCY
