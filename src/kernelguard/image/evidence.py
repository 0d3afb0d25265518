"""What was found out about an image by running it, and does it hold the claim of a level? Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.judge.values import Finding, Level, Status, worst
from kernelguard.lock.values import Lock, Role
from kernelguard.verify.files import from_document
from kernelguard.verify.findings import findings as findings_of
from kernelguard.verify.values import Outcome, Verdict

_ONLY_WITHOUT_GPU = frozenset({"needs-gpu-to-bind", "could-not-verify-no-driver", "verified-nothing", "loads"})
"""Unknowns that say nothing but "there is no GPU here"; they do not stand against a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A verdict, the image that it is about, and what was found besides."""

    verdict: Verdict
    content: str
    """Content identity of the image."""
    lock: str
    """Digest of the lock that the image was built from."""
    findings: tuple[Finding, ...]
    """Everything: the lock's bytes, what the model is bound to, and the verdict's own."""
    document: Mapping[str, Any]
    """The file: a verdict with `image`, `check` and `findings` added."""

    @property
    def sha256(self) -> str:
        """Of the file's bytes."""
        return f"sha256:{hashlib.sha256(dumps(self.document)).hexdigest()}"


def make_evidence(answer: Mapping[str, Any], *, content: str, name: str, lock: str) -> Evidence:
    """From what the container answered."""
    image = {"name": name, "content_sha256": content, "lock": lock}
    document = {**answer["verdict"], "image": image, "check": answer["check"], "findings": answer["findings"]}
    return from_file(document, source="the container's answer")


def load_evidence(path: Path) -> Evidence:
    """Read what `kernelguard verify --image` wrote.

    Raises:
        InputError: it is no verdict, or one that does not say which image it is about.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}", hint=_HINT) from error
    return from_file(document, source=str(path))


_HINT = "kernelguard verify MODEL --image IMAGE -o verdict.json"


def from_file(document: Any, *, source: str) -> Evidence:
    """The evidence that a document holds; raises as `load_evidence`."""
    verdict = from_document(document, source=source)
    image = document.get("image")
    if not isinstance(image, dict) or not str(image.get("content_sha256", "")).startswith("sha256:"):
        raise InputError(f"{source} does not say which image it is about", hint=_HINT)
    rows = document.get("findings")
    if not isinstance(rows, list):
        raise InputError(f"{source} has no findings of the check in the image", hint=_HINT)
    try:
        found = tuple(_finding(row) for row in rows)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{source}: a finding cannot be read: {error}", hint=_HINT) from error
    # The verdict's own findings are made anew: a file that leaves one out shall not be the better for it.
    fresh = [f for f in findings_of(verdict) if (f.code, f.fast_path) not in {(g.code, g.fast_path) for g in found}]
    return Evidence(
        verdict=verdict,
        content=str(image["content_sha256"]),
        lock=str(image.get("lock", "")),
        findings=(*found, *fresh),
        document=document,
    )


def dumps(document: Mapping[str, Any]) -> bytes:
    """The bytes of a verdict file."""
    return (json.dumps(document, indent=1) + "\n").encode()


def _finding(row: Mapping[str, Any]) -> Finding:
    known = {name: row[name] for name in Finding.__dataclass_fields__ if name in row}
    known["status"] = Status(row["status"])
    known["evidence"] = tuple(row.get("evidence") or ())
    return Finding(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Whether a claim holds, and everything that stands against it."""

    status: Status
    against: tuple[Finding, ...]


def holds(evidence: Evidence, lock: Lock, level: Level) -> Answer:
    """Whether `level` may be claimed for an image of this lock.

    At import: the image has the lock's bytes, every kernel loads, nothing is a no; what can only be told on a GPU stays
    open. At gpu: beside that every fast path of the lock was measured forward and backward, right, on a GPU that the
    lock is for.
    """
    against = [f for f in evidence.findings if f.status is Status.FAIL and not _left_out(f, lock)]
    if level >= Level.GPU:
        against += [f for f in evidence.findings if f.status is Status.UNKNOWN]
        against += _unproven(evidence.verdict, lock)
    else:
        allowed = _ONLY_WITHOUT_GPU if evidence.verdict.level < Level.GPU else frozenset()
        against += [f for f in evidence.findings if f.status is Status.UNKNOWN and f.code not in allowed]
        against += _unloaded(evidence, lock)
    against += _other_bytes(evidence.verdict, lock)
    status = worst([f.status for f in against]) if against else Status.PASS
    return Answer(status=status, against=tuple(dict.fromkeys(against)))


def _left_out(finding: Finding, lock: Lock) -> bool:
    """Whether the lock itself says that nothing serves this: a CPU lock has no CUDA extensions, and says so."""
    unserved = {path.symbol for path in lock.fast_paths if not path.served_by}
    return not lock.admits_launch and finding.code == "not-installed" and finding.fast_path in unserved


def _unproven(verdict: Verdict, lock: Lock) -> Iterator[Finding]:
    """What a gpu claim lacks."""
    if verdict.level is not Level.GPU:
        yield _open("level", f"the verdict is of level {verdict.level.name.lower()}; a launch needs one of level gpu")
        return
    if not lock.admits_launch:
        yield _open("cpu-lock", f"the lock is for {lock.target.spec}, which never admits a launch")
    measured = verdict.fingerprint.capability
    text = f"{measured[0]}.{measured[1]}" if measured else "none"
    if text not in lock.target.capabilities:
        wanted = ", ".join(lock.target.capabilities) or "none"
        yield _open("other-gpu", f"measured on compute capability {text}, the lock is for {wanted}")
    right = {p.symbol for p in verdict.probes if p.outcome in {Outcome.RIGHT, Outcome.NO_BACKWARD}}
    trains = {p.symbol for p in verdict.probes if p.outcome is Outcome.RIGHT}
    decoding = {p.symbol for p in verdict.probes if not p.trains}
    for path in lock.fast_paths:
        if not path.served_by:
            continue
        if path.symbol not in right:
            yield _open("not-measured", f"{path.symbol} was not measured: the model is not bound to it", path.symbol)
        elif path.symbol not in trains and path.symbol not in decoding:
            yield _open("no-backward", f"{path.symbol} has no backward, and the run trains", path.symbol)


def _unloaded(evidence: Evidence, lock: Lock) -> Iterator[Finding]:
    """Kernels of the lock that nothing says to load."""
    loaded = {p.symbol for p in evidence.verdict.probes if p.outcome in {Outcome.LOADED, Outcome.RIGHT}}
    told = {f.fast_path for f in evidence.findings if f.code == "needs-gpu-to-bind"}
    for path in lock.fast_paths:
        if path.served_by and path.symbol not in loaded | told:
            yield _open("not-loaded", f"nothing says that {path.symbol} loads", path.symbol)


def _other_bytes(verdict: Verdict, lock: Lock) -> Iterator[Finding]:
    """Versions and bytes that the verdict was measured with and the lock does not have."""
    fingerprint = verdict.fingerprint
    for pin in lock.pins:
        seen = fingerprint.distributions.get(pin.name)
        if seen is not None and seen != pin.version:
            reason = f"measured with {pin.name} {seen}, the lock has {pin.version}"
            yield Finding(code="other-version", status=Status.FAIL, reason=reason, fix="verify the image of this lock")
        record = fingerprint.records.get(pin.name, "")
        if pin.role is Role.KERNEL and record and pin.files_sha256 and record != pin.files_sha256:
            reason = f"measured with another build of {pin.name} {pin.version} than the lock's"
            yield Finding(code="other-build", status=Status.FAIL, reason=reason, fix="verify the image of this lock")


def _open(code: str, reason: str, symbol: str = "") -> Finding:
    return Finding(code=code, status=Status.UNKNOWN, fast_path=symbol or None, reason=reason)


def told(findings: Sequence[Finding]) -> str:
    """Every finding on a line of its own."""
    return "\n".join(f"  {f.status}: {f.reason}" + (f"\n    fix: {f.fix}" if f.fix else "") for f in findings)
