"""From the compact rows of `matrices/` to values: one candidate for each file that a row stands for."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from kernelguard.resolve.facts import BuildFacts, Hub, HubBuilds, PackageFacts, Repository, Serves, Window
from kernelguard.sources.values import BuiltFor, Candidate, Kind, Known, TorchBuild


def torch_builds(document: Mapping[str, Any]) -> Iterator[TorchBuild]:
    """Every build that `torch.toml` lists: the index's own, the CPU build, and the channels."""
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


def hub_facts(document: Mapping[str, Any]) -> Hub:
    """`hub.toml`."""
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
                builds=tuple(
                    HubBuilds(
                        version=build["version"],
                        torch=SpecifierSet(build["torch"]),
                        archs=tuple(build.get("archs", ())),
                    )
                    for build in row.get("builds", ())
                ),
            )
            for row in document["repository"]
        ),
    )


def package_facts(document: Mapping[str, Any]) -> PackageFacts:
    """One file of `wheels/`, every row spelled out as candidates."""
    build = document.get("build")
    candidates = tuple(itertools.chain(_released(document), _indexed(document), _source_release(document)))
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
        candidates=candidates,
        archs=_archs(candidates),
        serves=tuple(
            Serves(package=row["package"], symbols=tuple(row["symbols"]), shim=row["shim"], why=row["why"])
            for row in document.get("serves", ())
        ),
        repository=document.get("repository", ""),
    )


def _archs(candidates: Sequence[Candidate]) -> dict[tuple[str, int], tuple[str, ...]]:
    archs: dict[tuple[str, int], tuple[str, ...]] = {}
    for candidate in candidates:
        made = candidate.built_for
        if made is not None and made.archs is not None and made.cuda is not None:
            archs.setdefault((candidate.version.public, made.cuda.major), made.archs)
    return archs


@functools.cache
def _version(text: str) -> Version:
    """Parsed once: hundreds of wheels are for a few releases of torch and CUDA."""
    return Version(text)


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
                        torch=_version(torch),
                        cuda=_version(cuda),
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
    # An index builds the same source, so it requires what the release requires.
    required = {row["version"]: row.get("requires", ()) for row in document.get("release", [])}
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
                        torch=_version(torch),
                        cuda=_version(cuda),
                        archs=tuple(index["archs"].split()) if "archs" in index else None,
                    ),
                    requires=tuple(
                        Requirement(text) for text in index.get("requires") or required.get(index["version"], ())
                    ),
                    evidence=f"{index['source']} ({index['retrieved']})",
                )
