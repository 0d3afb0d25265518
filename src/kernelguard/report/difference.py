"""What changed between the fast machine and the slow one? Compares two captured documents, most suspicious first."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.matrix import KernelPackage

_LARGEST_BYTES = 64 * 2**20
_KINDS = ("environment", "check")
_NEWEST = {"environment": 1, "check": 1}


class Suspicion(IntEnum):
    """How likely a difference is to be the reason that one run is slow or wrong; larger is likelier."""

    OTHER = 0
    SYSTEM = 1
    """Driver, C library, environment variables that choose kernels."""
    STACK = 2
    """torch, CUDA, transformers, the GPU itself."""
    KERNEL = 3
    """A kernel package, triton or its assembler."""
    BINDING = 4
    """What a fast path is bound to, or what was said about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not the same in both; None: not there at all."""

    subject: str
    a: str | None
    b: str | None
    suspicion: Suspicion


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A file that `kernelguard` wrote."""

    source: str
    kind: str
    content: Mapping[str, Any]


def load_document(path: Path) -> Document:
    """Read a file written by `observe -o` or `check --json`.

    Raises:
        InputError: it cannot be read, is neither, or was written by a newer kernelguard.
    """
    hint = "files written by `kernelguard observe -o FILE` or `kernelguard check --json > FILE` can be compared"
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{path} is larger than any such document", hint=hint)
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", hint=hint) from error
    kind = content.get("kind") if isinstance(content, dict) else None
    if kind not in _KINDS:
        raise InputError(f"{path} is not a document of kernelguard (its `kind` is {kind!r})", hint=hint)
    schema = content.get("schema")
    if not isinstance(schema, int) or schema > _NEWEST[kind]:
        raise InputError(
            f"{path} has schema {schema!r}; this kernelguard reads up to {_NEWEST[kind]}",
            hint="pip install --upgrade kernelguard-preflight",
        )
    return Document(source=str(path), kind=kind, content=content)


def compare(a: Document, b: Document, kernels: Iterable[KernelPackage]) -> tuple[Difference, ...]:
    """All differences, most suspicious first, then by name.

    Raises:
        InputError: the documents are of two kinds.
    """
    if a.kind != b.kind:
        raise InputError(
            f"{a.source} is of kind {a.kind} and {b.source} of kind {b.kind}", hint="compare two of one kind"
        )
    names = {name for package in kernels for name in package.distributions}
    facts_a, facts_b = dict(_facts(a)), dict(_facts(b))
    found = [
        Difference(
            subject=subject,
            a=facts_a.get(subject),
            b=facts_b.get(subject),
            suspicion=_suspicion(subject, names),
        )
        for subject in facts_a.keys() | facts_b.keys()
        if facts_a.get(subject) != facts_b.get(subject)
    ]
    return tuple(sorted(found, key=lambda d: (-d.suspicion, d.subject)))


_STACK = ("torch", "torch_cuda", "torch_is_cpu", "cxx11_abi", "gpu_state", "gpus", "transformers")
_KERNEL_TOOLS = ("triton", "ptxas", "pytorch-triton", "kernels", "tilelang", "apache-tvm-ffi")
# Where it was captured differs by nature; a problem's text holds paths.
_LEFT_OUT = {"schema", "kind", "captured_from", "origin", "executable", "transformers_root", "problems", "live"}


def _suspicion(subject: str, kernel_distributions: set[str]) -> Suspicion:
    area, _, name = subject.rpartition(" ")
    if area in {"fast path", "finding"} or subject in {"status", "reached"}:
        return Suspicion.BINDING
    if name in kernel_distributions or name in _KERNEL_TOOLS:
        return Suspicion.KERNEL
    if subject.startswith(_STACK) or name in {"torch", "transformers"}:
        return Suspicion.STACK
    if area == "variable" or subject in {"driver", "glibc", "machine", "system", "cuda_toolkit"}:
        return Suspicion.SYSTEM
    return Suspicion.OTHER


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    """The document as flat facts that can be compared one by one."""
    yield from (
        _environment_facts(document.content) if document.kind == "environment" else _check_facts(document.content)
    )


def _environment_facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if name in _LEFT_OUT or value is None:
            continue
        if name == "distributions":
            entries = value if isinstance(value, list) else value.values()
            yield from ((f"distribution {entry['name']}", str(entry["version"])) for entry in entries)
        elif name == "variables":
            yield from ((f"variable {key}", str(text)) for key, text in value.items())
        elif name == "gpus":
            yield "gpus", ", ".join(f"{gpu['name']} {_capability(gpu)}" for gpu in value)
        else:
            yield name, str(value)


def _check_facts(content: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "status", str(content["status"])
    yield "reached", str(content["reached"])
    yield "model_type", str(content["model"]["model_type"])
    yield "transformers", str(content["transformers"]["version"])
    for path in content["fast_paths"]:
        bound = path["bound_to"] or "not observed"
        told = "" if bound in path["reason"] else f", {bound}"
        yield f"fast path {path['symbol']}", f"{path['status']}{told}: {path['reason']}"
    for finding in content["findings"]:
        if finding["fast_path"] is None:
            yield f"finding {finding['code']}", finding["status"]
    yield from ((f"intent {name}", str(value)) for name, value in content["intent"].items() if name != "source")
    yield from _environment_facts(content["environment"])


def _capability(gpu: Mapping[str, Any]) -> str:
    capability = gpu.get("capability")
    return f"(sm_{capability[0]}{capability[1]})" if capability else ""
