"""What of kernelguard's is in a file or a folder? Checks, verdicts (of builds too), profiles, attestations, runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.report import profile as profiles
from kernelguard.report.document import SCHEMA as CHECK_SCHEMA
from kernelguard.trace.runs import RunFacts, is_run, read_run
from kernelguard.verify.values import SCHEMA as VERDICT_SCHEMA

_LARGEST_BYTES = 256 * 2**20
_HINT = (
    "give a file of `kernelguard check --json`, `verify --json`, `profile --json` or an image's verdict, "
    "or a training run's folder"
)
_UPGRADE = "pip install --upgrade kernelguard-preflight"
_MOST_FILES = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Everything that one source holds; what it does not hold is None."""

    source: str
    check: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] | None = None
    """With `image` when it is the record of a build."""
    profile: Mapping[str, Any] | None = None
    attestation: Mapping[str, Any] | None = None
    run: RunFacts | None = None
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not shown, each with the reason."""

    @property
    def empty(self) -> bool:
        """Nothing to draw."""
        return all(part is None for part in (self.check, self.verdict, self.profile, self.attestation, self.run))


def gather(source: Path) -> Gathered:
    """Read one file, or everything in a folder that a page can show.

    Raises:
        InputError: nothing there is kernelguard's, or it cannot be read, or it is of a newer schema.
    """
    if not source.is_dir():
        found = _add(Gathered(source=str(source)), source)
        return found if found.verdict is None else _with_inner_check(found)
    gathered = Gathered(source=str(source))
    if is_run(source):
        gathered = replace(gathered, run=read_run(source))
    files = sorted(path for path in source.glob("*.json") if path.is_file())
    for file in files[:_MOST_FILES]:
        if file.name == "summary.json":
            continue
        try:
            gathered = _add(gathered, file)
        except InputError as error:
            gathered = replace(gathered, left_out=(*gathered.left_out, error.message))
    if gathered.empty:
        why = f" ({gathered.left_out[0]})" if gathered.left_out else ""
        raise InputError(f"{source} holds nothing that a report can show{why}", hint=_HINT)
    return _with_inner_check(gathered)


def _with_inner_check(gathered: Gathered) -> Gathered:
    """The record of a build holds the check that was made inside the image."""
    inner = gathered.verdict.get("check") if gathered.verdict else None
    if gathered.check is None and isinstance(inner, dict) and inner.get("kind") == "check":
        return replace(gathered, check=inner)
    return gathered


def _add(gathered: Gathered, file: Path) -> Gathered:
    """One file's content, put where it belongs."""
    document = _read(file)
    kind = document.get("kind")
    if kind == "check":
        return replace(gathered, check=_valid(document, file, "report", CHECK_SCHEMA))
    if kind == "profile":
        return replace(gathered, profile=_valid(document, file, "profile", profiles.SCHEMA))
    if "probes" in document and "fingerprint" in document:
        return replace(gathered, verdict=_valid(document, file, "verdict", VERDICT_SCHEMA))
    if file.name.endswith("attestation.json") and "schema" in document:
        return replace(gathered, attestation=document)
    raise InputError(f"{file} is no check, verdict, profile or attestation of kernelguard (kind {kind!r})", hint=_HINT)


def _read(file: Path) -> dict[str, Any]:
    try:
        if file.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{file} is larger than any report", hint=_HINT)
        document = json.loads(file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(document, dict):
        raise InputError(f"{file} is no document of kernelguard: it holds a {type(document).__name__}", hint=_HINT)
    return document


def _valid(document: dict[str, Any], file: Path, schema: str, newest: int) -> dict[str, Any]:
    """The document, if it has the form that its schema says; every problem is named."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - only a report validates

    number = document.get("schema")
    if not isinstance(number, int) or isinstance(number, bool) or number > newest:
        raise InputError(f"{file} has schema {number!r}; this kernelguard reads up to schema {newest}", hint=_UPGRADE)
    validator = Draft202012Validator(json.loads(data.schema(schema).read_text("utf-8")))
    problems = [
        f"{'/'.join(str(p) for p in error.absolute_path) or 'document'}: {error.message[:120]}"
        for error in validator.iter_errors(document)
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"{file} is damaged: {'; '.join(problems[:5])}{more}", hint=_HINT)
    return document
