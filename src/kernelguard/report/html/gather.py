"""What of kernelguard's is in a file or a folder? Checks, verdicts (of builds too), profiles, attestations, runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.judge.values import Finding, Status, worst
from kernelguard.report import profile as profiles
from kernelguard.report.document import SCHEMA as CHECK_SCHEMA
from kernelguard.report.html.answers import (
    Answer,
    check_answer,
    launch_answer,
    profile_answer,
    verdict_answer,
    verdict_findings,
)
from kernelguard.trace.runs import RunFacts, is_run, read_run
from kernelguard.trace.sources import traces_in
from kernelguard.verify.files import from_document
from kernelguard.verify.values import SCHEMA as VERDICT_SCHEMA
from kernelguard.verify.values import Verdict

_LARGEST_BYTES = 256 * 2**20
_HINT = (
    "give a file of `kernelguard check --json`, `verify --json`, `profile --json` or an image's verdict, "
    "or a training run's folder"
)
_UPGRADE = "pip install --upgrade kernelguard-preflight"
_MOST_FILES = 200
_INNER = " (the check in it)"
_TRACE = "a trace, which another command reads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Everything that one source holds; what it does not hold is None."""

    source: str
    check: Mapping[str, Any] | None = None
    verdict: Mapping[str, Any] | None = None
    """With `image` when it is the record of a build."""
    measured: Verdict | None = None
    """The same, read."""
    profile: Mapping[str, Any] | None = None
    attestation: Mapping[str, Any] | None = None
    run: RunFacts | None = None
    left_out: tuple[str, ...] = ()
    """Files of a folder that are not shown, each with the reason."""

    @property
    def empty(self) -> bool:
        """Nothing to draw."""
        return not self.kinds

    @property
    def kinds(self) -> tuple[str, ...]:
        """What of kernelguard's is here, in words."""
        parts = (
            ("a check", self.check),
            ("a verdict", self.verdict),
            ("a profile", self.profile),
            ("an attestation", self.attestation),
            ("a training run", self.run),
        )
        return tuple(name for name, part in parts if part is not None)

    def findings(self) -> tuple[Finding, ...]:
        """What the verdict says, with the fixes that the check beside it knows."""
        if self.verdict is None or self.measured is None:
            return ()
        return verdict_findings(self.verdict, self.measured, self.check)

    def answers(self) -> tuple[Answer, ...]:
        """What each part comes to, what was measured first; numbers of a run are no answer."""
        found = (
            verdict_answer(self.verdict, self.findings()) if self.verdict is not None else None,
            profile_answer(self.profile) if self.profile is not None else None,
            check_answer(self.check) if self.check is not None else None,
            launch_answer(self.attestation) if self.attestation is not None else None,
        )
        return tuple(answer for answer in found if answer is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One document, the file it is from, and what it comes to."""

    file: str
    document: Mapping[str, Any]
    status: Status
    measured: Verdict | None = None


@dataclass(slots=True)
class _Found:
    """Documents by kind."""

    parts: dict[str, list[_Part]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def add(self, kind: str, file: str, document: Mapping[str, Any]) -> None:
        measured = from_document(document, source=file) if kind == "verdict" else None
        answer = (
            verdict_answer(document, verdict_findings(document, measured))
            if measured is not None
            else _ANSWER[kind](document)
        )
        status = answer.status if answer is not None else Status.PASS
        self.parts.setdefault(kind, []).append(_Part(file=file, document=document, status=status, measured=measured))

    def worst(self, kind: str) -> _Part | None:
        """Of several documents of one kind the one with the worst answer: a better one beside it takes nothing back."""
        parts = self.parts.get(kind, [])
        if not parts:
            return None
        decides = worst(part.status for part in parts)
        shown = next(part for part in reversed(parts) if part.status is decides)
        for part in parts:
            if part is not shown:
                more = f". What differs: kernelguard report {part.file} {shown.file}"
                self.left_out.append(
                    f"{part.file} is another {kind}, with the answer {part.status}; shown is {shown.file}, with the "
                    f"answer {decides}{'' if _INNER in part.file + shown.file else more}"
                )
        return shown

    def gathered(self, source: Path, run: RunFacts | None) -> Gathered:
        shown = {kind: part for kind in (*_ANSWER, "verdict") if (part := self.worst(kind)) is not None}
        documents = {kind: part.document for kind, part in shown.items()}
        measured = shown["verdict"].measured if "verdict" in shown else None
        return Gathered(source=str(source), run=run, measured=measured, left_out=tuple(self.left_out), **documents)


_ANSWER: Mapping[str, Callable[[Mapping[str, Any]], Answer | None]] = {
    "check": check_answer,
    "profile": profile_answer,
    "attestation": launch_answer,
}


def gather(source: Path) -> Gathered:
    """Read one file, or everything in a folder that a page can show.

    Raises:
        InputError: nothing there is kernelguard's, or it cannot be read, or it is of a newer schema.
    """
    found = _Found()
    if not source.is_dir():
        _add(found, source)
        return found.gathered(source, None)
    run = read_run(source) if is_run(source) else None
    files = sorted(path for path in source.glob("*.json") if path.is_file())
    for file in files[:_MOST_FILES]:
        if run is not None and file.name in {"summary.json", "built.json"}:
            continue
        try:
            _add(found, file)
        except InputError as error:
            found.left_out.append(error.message)
    if len(files) > _MOST_FILES:
        found.left_out.append(f"{len(files) - _MOST_FILES} more files: only the first {_MOST_FILES} are read")
    found.left_out += _traces(source)
    gathered = found.gathered(source, run)
    if gathered.empty:
        why = f" ({gathered.left_out[0]})" if gathered.left_out else ""
        raise InputError(f"{source} holds nothing that a report can show{why}", hint=_HINT)
    return gathered


def _traces(folder: Path) -> list[str]:
    """Traces are read by another command."""
    traces = [path for path in traces_in(folder) if path.suffix == ".gz" or path.parent != folder]
    traces += [path for path in sorted(folder.glob("*.json.gz")) if path.is_file() and path not in traces]
    more = f" and {len(traces) - 1} more" if len(traces) > 1 else ""
    of = folder if traces_in(folder) else traces[0] if traces else ""
    return [f"{traces[0]}{more}: {_TRACE}: kernelguard profile {of} -o profile.html"] if traces else []


def _add(found: _Found, file: Path) -> None:
    """One file's content, put where it belongs."""
    document = _read(file)
    kind = document.get("kind")
    if kind == "check":
        found.add("check", str(file), _valid(document, file, "report", CHECK_SCHEMA))
    elif kind == "profile":
        found.add("profile", str(file), _valid(document, file, "profile", profiles.SCHEMA))
    elif "probes" in document and "fingerprint" in document:
        verdict = _valid(document, file, "verdict", VERDICT_SCHEMA)
        inner = document.get("check")
        if isinstance(inner, dict) and inner.get("kind") == "check":
            # The record of a build holds the check that was made inside the image.
            found.add("check", f"{file}{_INNER}", _valid(inner, file, "report", CHECK_SCHEMA))
        found.add("verdict", str(file), verdict)
    elif file.name.endswith("attestation.json") and "schema" in document:
        found.add("attestation", str(file), document)
    elif "traceEvents" in document:
        raise InputError(f"{file}: {_TRACE}: kernelguard profile {file} -o profile.html", hint=_HINT)
    elif is_run(file.parent) and file.name == "profile.json":
        raise InputError(
            f"{file}: the trainer's own figures of one step; its trace says more: kernelguard profile {file.parent} "
            "-o profile.html",
            hint=_HINT,
        )
    else:
        raise InputError(
            f"{file} is no check, verdict, profile or attestation of kernelguard (kind {kind!r})", hint=_HINT
        )


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
