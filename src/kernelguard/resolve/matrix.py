"""Which builds of torch and of kernel packages are known, and which drivers they need? Reads and checks `matrices/`."""

from __future__ import annotations

import datetime as dt
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.resolve.facts import Drivers, Floor, Hub, Matrix, PackageFacts, Repository
from kernelguard.resolve.rows import hub_facts, package_facts, torch_builds

__all__ = ["Hub", "Matrix", "PackageFacts", "Repository", "check_matrix", "load_matrix", "matrix"]

_NEWEST_SCHEMA = 1


@cache
def matrix() -> Matrix:
    """The matrix that ships with kernelguard.

    It is checked by the tests and by `kernelguard matrix check`; here only when it cannot be read as it is, because
    validating costs a check of a target more than the search does.
    """
    try:
        return load_matrix(data.matrices(), checked=False)
    except (LookupError, TypeError, ValueError, InvalidRequirement):
        return load_matrix(data.matrices())


def load_matrix(folder: Path, *, checked: bool = True) -> Matrix:
    """Read the files of a `matrices/` folder, and hold them against their schemas when `checked`.

    Raises:
        InputError: a file is missing, unreadable, of a newer schema, or wrong; all problems are listed.
    """
    problems: list[str] = []
    documents = {
        name: _read(folder / f"{name}.toml", f"{name}-matrix" if checked else "", problems)
        for name in ("torch", "drivers", "hub")
    }
    schema = "wheels-matrix" if checked else ""
    wheels = {path: _read(path, schema, problems) for path in sorted((folder / "wheels").glob("*.toml"))}
    if problems:
        raise _unusable(folder, problems)
    packages = {}
    for path, document in wheels.items():
        if checked:
            problems += [f"{path.name}: {text}" for text in _wheel_problems(path, document)]
        if not problems:
            packages[document["distribution"]] = package_facts(document)
    if checked:
        problems += [f"torch.toml: {text}" for text in _torch_problems(documents["torch"])]
    if problems:
        raise _unusable(folder, problems)
    return Matrix(
        torch=tuple(torch_builds(documents["torch"])),
        drivers=Drivers(
            compatible={int(r["cuda"]): r["compatible"] for r in documents["drivers"]["major"]},
            toolkit={Version(r["cuda"]): r["driver"] for r in documents["drivers"]["toolkit"]},
        ),
        hub=hub_facts(documents["hub"]),
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
    if not schema:
        return document
    errors = sorted(_validator(schema).iter_errors(_plain(document)), key=lambda e: list(map(str, e.absolute_path)))
    problems.extend(f"{path.name}: {_where(e.absolute_path)}{e.message}" for e in errors)
    return {} if errors else document


@cache
def _validator(schema: str) -> Any:
    import jsonschema  # noqa: PLC0415 - costs 0.1 s, only where files are checked

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
