"""How is a verdict written to a file, and what does such a file say?"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.judge.values import Level
from kernelguard.trace.values import FastPathTrace, KernelRun
from kernelguard.verify.findings import numbers
from kernelguard.verify.values import (
    SCHEMA,
    CaseResult,
    Configuration,
    Fingerprint,
    Outcome,
    ProbeResult,
    SignalCheck,
    StepTrace,
    Subject,
    TensorError,
    UsedPath,
    Verdict,
)

_HINT = "make one with: kernelguard verify MODEL --json > verdict.json"
_LARGEST_BYTES = 256 * 2**20


def to_document(verdict: Verdict) -> dict[str, Any]:
    """The JSON document of a verdict (`schemas/verdict.schema.json`). Numbers that are not finite become null."""
    document: dict[str, Any] = _plain(dataclasses.asdict(verdict))
    document["level"] = verdict.level.name.lower()
    for row, probe in zip(document["probes"], verdict.probes, strict=True):
        row["numbers"] = str(numbers(probe, verdict.level))
        row["deterministic"] = probe.deterministic
    return {"schema": SCHEMA, **document}


def load_verdict(path: Path) -> Verdict:
    """Read a verdict from a file.

    Raises:
        InputError: the file is no verdict, or of a newer schema; every problem is named.
    """
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(f"{path} is larger than any verdict", hint=_HINT)
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {error}", hint=_HINT) from error
    return from_document(document, source=str(path))


def from_document(document: Any, *, source: str) -> Verdict:
    """The verdict that a JSON document describes; `source` names it in messages.

    Raises:
        InputError: as `load_verdict`.
    """
    newer = isinstance(document, dict) and isinstance(document.get("schema"), int) and document["schema"] > SCHEMA
    if newer:
        raise InputError(
            f"{source} has schema {document['schema']}; this kernelguard reads up to schema {SCHEMA}",
            hint="pip install --upgrade kernelguard-preflight",
        )
    problems = violations(document)
    if problems:
        raise InputError(f"{source} is no verdict: {'; '.join(problems)}", hint=_HINT)
    return Verdict(
        level=Level[document["level"].upper()],
        fingerprint=_fingerprint(document["fingerprint"]),
        probes=tuple(_probe(row) for row in document["probes"]),
        isolation=tuple(
            SignalCheck(**_tuples(_known(SignalCheck, row), "signals", "leaking_layers"))
            for row in document["isolation"]
        ),
        signals=None if document.get("signals") is None else tuple(document["signals"]),
        subject=None if document.get("subject") is None else _subject(document["subject"]),
        fast_paths=tuple(UsedPath(**_known(UsedPath, row)) for row in document.get("fast_paths", ())),
        trace=None if document.get("trace") is None else _trace(document["trace"]),
        seconds=document.get("seconds", 0.0),
        created=document.get("created", ""),
        problems=tuple(document.get("problems", ())),
        cache_problems=tuple(document.get("cache_problems", ())),
        phases=document.get("phases", {}),
    )


def violations(document: Any) -> list[str]:
    """Everything in which a document breaks the schema, one sentence each."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415  # only when a file is given

    schema = json.loads(data.schema("verdict").read_text("utf-8"))
    found = sorted(Draft202012Validator(schema).iter_errors(document), key=lambda error: list(map(str, error.path)))
    return [f"{'.'.join(map(str, error.path)) or 'the document'}: {error.message[:200]}" for error in found]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Outcome) else value


def _known(kind: Any, row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that this version knows; a newer writer may have added some."""
    names = {f.name for f in dataclasses.fields(kind)}
    return {key: value for key, value in row.items() if key in names}


def _tuples(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return row | {name: tuple(row[name]) for name in names if row.get(name) is not None}


def _subject(row: Mapping[str, Any]) -> Subject:
    return Subject(**_tuples(_known(Subject, row), "layers"))


def _fingerprint(row: Mapping[str, Any]) -> Fingerprint:
    return Fingerprint(**_tuples(_known(Fingerprint, row), "capability"))


def _tensor(row: Mapping[str, Any]) -> TensorError:
    return TensorError(**_known(TensorError, row))


def _probe(row: Mapping[str, Any]) -> ProbeResult:
    known = _tuples(_known(ProbeResult, row), "forward_kernels", "backward_kernels")
    known["outcome"] = Outcome(known["outcome"])
    known["cases"] = tuple(_case(case) for case in row.get("cases", ()))
    known["configurations"] = tuple(_configuration(c) for c in row.get("configurations", ()))
    return ProbeResult(**known)


def _case(row: Mapping[str, Any]) -> CaseResult:
    known = _tuples(_known(CaseResult, row), "lengths")
    known["outcome"] = Outcome(known["outcome"])
    for name in ("tensors", "unstable"):
        known[name] = tuple(_tensor(t) for t in row.get(name, ()))
    return CaseResult(**known)


def _configuration(row: Mapping[str, Any]) -> Configuration:
    known = _known(Configuration, row)
    known["tensors"] = tuple(_tensor(t) for t in row.get("tensors", ()))
    return Configuration(**known)


def _trace(row: Mapping[str, Any]) -> StepTrace:
    known = _known(StepTrace, row)
    known["fast_paths"] = tuple(_traced(path) for path in row.get("fast_paths", ()))
    return StepTrace(**known)


def _traced(row: Mapping[str, Any]) -> FastPathTrace:
    known = _tuples(_known(FastPathTrace, row), "fallbacks")
    known["kernels"] = tuple(KernelRun(**_known(KernelRun, run)) for run in row.get("kernels", ()))
    return FastPathTrace(**known)
