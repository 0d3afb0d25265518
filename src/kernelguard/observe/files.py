"""How is an environment written to a file, and what does such a file say?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.observe.values import Distribution, Environment, Gpu, GpuState

SCHEMA = 1
_VERSIONS = (
    "python",
    "glibc",
    "torch",
    "torch_cuda",
    "triton",
    "ptxas",
    "driver",
    "transformers_version",
    "cuda_toolkit",
)
_PLAIN = ("executable", "system", "machine", "torch_is_cpu", "cxx11_abi", "transformers_root")
_LARGEST_BYTES = 64 * 2**20
_HINT = "capture one with: kernelguard observe -o environment.json"


def save_environment(environment: Environment, path: Path) -> None:
    """Write an environment to a file.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        path.write_text(environment_to_json(environment) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def load_environment(path: Path) -> Environment:
    """Read an environment from a file; it is not live, whatever it was when it was captured.

    Raises:
        InputError: the file is no environment, or of a newer schema; every problem is named.
    """
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(
                f"{path} is larger than any environment ({path.stat().st_size / 2**20:.0f} MB)", hint=_HINT
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no text file", hint=_HINT) from error
    return environment_from_json(text, source=str(path))


def environment_to_json(environment: Environment) -> str:
    """The JSON form of an environment, indented for people."""
    document: dict[str, Any] = {"schema": SCHEMA, "kind": "environment", "captured_from": environment.origin}
    document |= {name: getattr(environment, name) for name in _PLAIN}
    for name in _VERSIONS:
        version: Version | None = getattr(environment, name)
        document[name] = None if version is None else str(version)
    document["gpus"] = [
        {
            "name": gpu.name,
            "capability": None if gpu.capability is None else list(gpu.capability),
            "memory_bytes": gpu.memory_bytes,
        }
        for gpu in environment.gpus
    ]
    document["gpu_state"] = environment.gpu_state.value
    document["gpu_detail"] = environment.gpu_detail
    document["distributions"] = (
        None
        if environment.distributions is None
        else [
            {
                "name": entry.name,
                "version": entry.version,
                "location": entry.location,
                "top_level": list(entry.top_level),
            }
            for _, entry in sorted(environment.distributions.items())
        ]
    )
    document["variables"] = dict(sorted(environment.variables.items()))
    document["problems"] = list(environment.problems)
    return json.dumps(document, indent=1)


def environment_from_json(text: str, *, source: str) -> Environment:
    """The environment that a JSON text describes; `source` names it in messages.

    Raises:
        InputError: as `load_environment`.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} is not JSON: {error}", hint=_HINT) from error
    _check_schema_version(document, source)
    problems = _violations(document)
    if problems:
        raise InputError(f"{source} is no environment: " + "; ".join(problems), hint=_HINT)
    return _environment(document, source)


def _check_schema_version(document: object, source: str) -> None:
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(
            f"{source} has schema {schema}; this kernelguard reads up to schema {SCHEMA}",
            hint="pip install --upgrade kernelguard-preflight",
        )


def _violations(document: object) -> list[str]:
    """Everything that is wrong with a document, one sentence each."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415  # only when a file is given

    schema = json.loads(data.schema("environment").read_text(encoding="utf-8"))
    found = sorted(Draft202012Validator(schema).iter_errors(document), key=lambda error: list(map(str, error.path)))
    problems = [f"{_where(error.path)}{_shortened(error.message)}" for error in found]
    if problems or not isinstance(document, dict):
        return problems
    for name in _VERSIONS:
        value = document.get(name)
        if value is not None and _version(value) is None:
            problems.append(f"{name}: {value!r} is no version")
    names = [entry["name"] for entry in document.get("distributions") or ()]
    problems += [f"distributions: {name} is listed twice" for name in sorted(set(names)) if names.count(name) > 1]
    return problems


def _where(path: Any) -> str:
    return ".".join(map(str, path)) + ": " if path else ""


def _shortened(message: str) -> str:
    return message if len(message) <= 200 else f"{message[:120]} ... {message[-60:]}"


def _version(text: str | None) -> Version | None:
    if text is None:
        return None
    try:
        return Version(text)
    except InvalidVersion:
        return None


def _environment(document: Mapping[str, Any], source: str) -> Environment:
    plain: dict[str, Any] = {name: document.get(name) for name in _PLAIN}
    plain |= {name: _version(document.get(name)) for name in _VERSIONS}
    listed = document.get("distributions")
    return Environment(
        origin=f"file {source}",
        live=False,
        gpus=tuple(
            Gpu(
                name=gpu["name"],
                capability=None if gpu.get("capability") is None else (gpu["capability"][0], gpu["capability"][1]),
                memory_bytes=gpu.get("memory_bytes"),
            )
            for gpu in document.get("gpus", ())
        ),
        gpu_state=GpuState(document.get("gpu_state", "unknown")),
        gpu_detail=document.get("gpu_detail", ""),
        distributions=None
        if listed is None
        else {
            entry["name"]: Distribution(
                name=entry["name"],
                version=entry["version"],
                location=entry.get("location", ""),
                top_level=tuple(entry.get("top_level", ())),
            )
            for entry in listed
        },
        variables=dict(document.get("variables", {})),
        problems=tuple(document.get("problems", ())),
        **plain,
    )
