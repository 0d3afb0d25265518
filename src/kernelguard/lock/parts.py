"""The parts of a lock that need no compiling: model, intent, target, fast paths, hub variants and source builds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import fields

from kernelguard.declare.values import FastPath, Intent, ModelConfig
from kernelguard.errors import UndeterminedError
from kernelguard.lock.compile import Platform
from kernelguard.lock.values import HubFilePin, HubPin, LockedModel, LockedPath, LockedTarget, Pin, SourcePin
from kernelguard.observe.values import Environment
from kernelguard.resolve.archs import text as capability_text
from kernelguard.resolve.matrix import matrix
from kernelguard.resolve.values import Candidate, Kind, Resolution, TorchBuild
from kernelguard.sources.hub import Hub
from kernelguard.sources.index import IndexFile, IndexSource
from kernelguard.sources.names import read_file_name


def locked_model(model: ModelConfig) -> LockedModel:
    """The model, with a digest of its configuration."""
    text = json.dumps(model.raw, sort_keys=True, separators=(",", ":"), default=str)
    return LockedModel(
        source=model.source, model_type=model.model_type, sha256=hashlib.sha256(text.encode()).hexdigest()
    )


def locked_intent(intent: Intent) -> Iterator[tuple[str, str]]:
    """What the run will do, field by field; what was only assumed says so."""
    for field in fields(intent):
        if field.name in {"assumed", "source"}:
            continue
        value = getattr(intent, field.name)
        text = ",".join(value) if isinstance(value, tuple) else "" if value is None else str(value)
        yield field.name, f"{text} (assumed)" if field.name in intent.assumed else text


def locked_paths(resolution: Resolution, fast_paths: Sequence[FastPath]) -> Iterator[LockedPath]:
    """Each fast path with what serves it."""
    served = {choice.need.package: choice.accepted[0].candidate for choice in resolution.choices}
    for path in fast_paths:
        pin = served.get(path.package)
        text = "" if pin is None else f"{pin.distribution} {pin.filename if pin.kind is Kind.HUB else pin.version}"
        yield LockedPath(symbol=path.symbol, package=path.package, served_by=text, layers=path.layers)


def locked_target(
    resolution: Resolution, given: Environment, platform: Platform, pins: Sequence[Pin], build: TorchBuild
) -> LockedTarget:
    """The machines, with the floors of everything that was chosen."""
    floors = [build.glibc]
    for candidate in resolution.pins:
        floors += [candidate.glibc] if candidate.glibc is not None else []
    for pin in pins:
        read = read_file_name(pin.filename)
        floors += [read.glibc] if read is not None and read.glibc is not None else []
    gpus = tuple(dict.fromkeys(gpu.name for gpu in given.gpus))
    capabilities = sorted({capability_text(g.capability) for g in given.gpus if g.capability is not None})
    needs_driver = build.cuda is not None and resolution.admits_launch
    return LockedTarget(
        spec=given.origin.removeprefix("target "),
        python=f"{platform.python.major}.{platform.python.minor}",
        machine=platform.machine,
        glibc=str(max(floors)),
        driver=matrix().drivers.floor_text(build.cuda) if needs_driver and build.cuda is not None else "",
        gpus=gpus,
        capabilities=tuple(capabilities),
    )


def hub_pins(resolution: Resolution, hub: Hub | None) -> Iterator[HubPin]:
    """Commit, variant and the digest of each file of what comes from the kernel hub."""
    for pin in resolution.pins:
        if pin.kind is not Kind.HUB:
            continue
        if hub is None:
            raise UndeterminedError(
                f"{pin.distribution} comes from the kernel hub, and no hub was given to read it from"
            )
        files = hub.files(pin.distribution, pin.commit, pin.filename)
        yield HubPin(
            repository=pin.distribution,
            version=int(str(pin.version)),
            commit=pin.commit,
            variant=pin.filename,
            files=tuple(HubFilePin(path=f.path, sha256=f.sha256, size=f.size) for f in files),
        )


def source_pins(resolution: Resolution, index: IndexSource) -> Iterator[SourcePin]:
    """What has to be built, with the digest or commit to start from."""
    how = {build.distribution: build for build in resolution.builds}
    for pin in resolution.pins:
        if pin.kind not in {Kind.SDIST, Kind.GIT}:
            continue
        build = how[pin.distribution]
        url, sha256 = pin.url, pin.sha256
        if pin.kind is Kind.SDIST and not (url and sha256):
            file = _sdist(index, pin)
            url, sha256 = file.url, file.sha256
        yield SourcePin(
            name=pin.distribution,
            version=str(pin.version),
            url=url,
            sha256=sha256,
            commit=pin.commit,
            requires=build.requires,
            archs=build.archs,
            arch_variable=build.arch_variable,
            archs_note=build.archs_note,
            nvcc=str(build.nvcc or ""),
            cxx=build.cxx,
        )


def _sdist(index: IndexSource, pin: Candidate) -> IndexFile:
    for file in index.files(pin.distribution):
        read = read_file_name(file.filename)
        if read is not None and read.sdist and read.version == pin.version and file.sha256:
            return file
    raise UndeterminedError(f"{index.name} lists no sdist of {pin.distribution} {pin.version} with a hash")
