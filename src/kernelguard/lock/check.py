"""Is this environment exactly what the lock says? Every difference by name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.errors import InputError, UndeterminedError
from kernelguard.judge.values import Finding, Status
from kernelguard.lock.record import record_digest
from kernelguard.lock.values import HubPin, Lock, Pin, Role
from kernelguard.observe.process import run_worker
from kernelguard.sources.hub import Hub

HUB_FOLDER = Path("share", "kernelguard", "hub")
"""Below the environment's prefix."""
_NOT_COUNTED = frozenset({"pip"})
_ALWAYS_HASHED = frozenset({"torch", "triton"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """What an interpreter has installed."""

    prefix: Path
    python: Version
    distributions: Mapping[str, Mapping[str, Any]]
    """By normalized name, as the worker reports them; of several of one name the one that is imported."""
    shared: tuple[tuple[str, tuple[str, ...]], ...]
    """Files that several distributions own."""


def check_lock(
    lock: Lock, python: Path, *, hub: Hub | None = None, deep: bool = False, timeout: float = 600.0
) -> tuple[Finding, ...]:
    """Hold an environment against a lock; one finding for each difference, or one that says that there is none.

    Files of kernel packages, torch and triton are hashed, of the others the size is compared; `deep` hashes all.
    `hub`: also look whether the branches that hub kernels were pinned from have moved; None: work offline.

    Raises:
        InputError: `python` cannot be run.
        UndeterminedError: it could not be looked at.
    """
    inventory = take_inventory(python, lock, deep=deep, timeout=timeout)
    findings = [
        *_python(lock, inventory),
        *(f for pin in lock.pins for f in _pin(pin, inventory)),
        *_built(lock, inventory),
        *_shared(inventory),
        *_extra(lock, inventory),
        *check_hub_files(lock, inventory.prefix),
        *_branches(lock, hub),
    ]
    if not any(f.status in {Status.FAIL, Status.UNKNOWN} for f in findings):
        text = f"{len(lock.pins)} distributions are exactly those of the lock"
        findings.insert(0, Finding(code="lock-holds", status=Status.PASS, reason=text))
    return tuple(findings)


def take_inventory(
    python: Path,
    lock: Lock | None,
    *,
    deep: bool = False,
    hashed: Iterable[str] = (),
    records: bool = False,
    timeout: float = 600.0,
) -> Inventory:
    """Ask an interpreter what it has; raises as `check_lock`. Without a lock only `hashed` is hashed.

    `records`: give every distribution's RECORD, also of those that are not hashed.
    """
    if lock is not None:
        hashed = {p.name for p in lock.pins if p.role is Role.KERNEL} | _ALWAYS_HASHED
    request = {"hash": sorted(hashed), "hash_all": deep, "records": records}
    try:
        result = run_worker(str(python), "inventory", request, timeout=timeout)
    except OSError as error:
        raise InputError(f"{python} cannot be run: {error}", hint="name the interpreter with --python") from error
    if not result.finished:
        raise UndeterminedError(f"what {python} has installed could not be read: the worker {result.ending()}")
    facts = next(result.of_kind("interpreter"))
    return Inventory(
        prefix=Path(facts["prefix"]),
        python=Version(facts["python"]),
        distributions={r["name"]: r for r in result.of_kind("distribution") if not r["shadow"]},
        shared=tuple((r["path"], tuple(r["owners"])) for r in result.of_kind("shared")),
    )


def _python(lock: Lock, inventory: Inventory) -> Iterator[Finding]:
    found = f"{inventory.python.major}.{inventory.python.minor}"
    if found != lock.target.python:
        yield _no("lock-python", f"the interpreter is Python {found}, the lock is for {lock.target.python}")


def _pin(pin: Pin, inventory: Inventory) -> Iterator[Finding]:
    found = inventory.distributions.get(pin.name)
    if found is None:
        yield _no("lock-missing", f"{pin.name} {pin.version} is in the lock and not installed")
        return
    if not _same_version(found["version"], pin.version):
        code = "torch-moved" if pin.role is Role.TORCH else "lock-version"
        later = "; a later install moved it" if pin.role is Role.TORCH else ""
        yield _no(code, f"{pin.name} {found['version']} is installed, the lock has {pin.version}{later}")
        return
    for path, problem in found["changed"]:
        yield _no("file-changed", f"{pin.name}: {path} {problem}", evidence=(path,))
    if not found["has_record"]:
        yield _no("lock-record", f"{pin.name} {pin.version} has no RECORD, so nothing says what its files should be")
    elif pin.files_sha256 and found["record"]:
        digest = record_digest((path, sha) for path, sha in found["record"])
        if digest != pin.files_sha256:
            yield _no(
                "lock-other-build",
                f"{pin.name} {pin.version} is installed from another build: its RECORD has digest {digest[:16]}, "
                f"that of {pin.filename} {pin.files_sha256[:16]}",
            )


def _same_version(installed: str, pinned: str) -> bool:
    try:
        return Version(installed) == Version(pinned)
    except InvalidVersion:
        return installed == pinned


def _built(lock: Lock, inventory: Inventory) -> Iterator[Finding]:
    for pin in lock.sources:
        found = inventory.distributions.get(pin.name)
        if found is None:
            yield _no(
                "lock-not-built",
                f"{pin.name} {pin.version} has to be built from source and is not installed",
                fix="pip install --no-build-isolation --no-deps -r requirements-source.txt",
            )
        elif not pin.commit and not _same_version(found["version"], pin.version):
            yield _no("lock-version", f"{pin.name} {found['version']} is installed, the lock has {pin.version}")


def _shared(inventory: Inventory) -> Iterator[Finding]:
    for path, owners in inventory.shared:
        told = " and ".join(owners)
        yield _no("file-two-owners", f"{path} belongs to {told}: which of them wrote it last is not known", (path,))


def _extra(lock: Lock, inventory: Inventory) -> Iterator[Finding]:
    known = {pin.name for pin in lock.pins} | {pin.name for pin in lock.sources} | _NOT_COUNTED
    extra = sorted(set(inventory.distributions) - known)
    if extra:
        text = f"installed but not in the lock: {', '.join(extra)}"
        yield Finding(code="lock-extra", status=Status.WARN, reason=text, fix="kernelguard sync removes them")


def hub_place(prefix: Path, pin: HubPin) -> Path:
    """The folder of one hub repository below an environment's prefix."""
    return prefix / HUB_FOLDER / pin.repository


def local_kernels(lock: Lock, prefix: Path) -> str:
    """The value of LOCAL_KERNELS with which `kernels` loads exactly the pinned files, without a network.

    It names the variant's own folder: `kernels` loads what lies there and chooses nothing.
    """
    return ":".join(f"{pin.repository}={hub_place(prefix, pin) / 'build' / pin.variant}" for pin in lock.hub)


def check_hub_files(lock: Lock, prefix: Path) -> Iterator[Finding]:
    """Hash the files of hub kernels again, as has to be done before each import."""
    for pin in lock.hub:
        build = hub_place(prefix, pin) / "build"
        folder = build / pin.variant
        wanted = {file.path: file.sha256 for file in pin.files}
        for path, sha256 in wanted.items():
            place = folder / path
            if not place.is_file():
                yield _no("hub-file-missing", f"{pin.repository}: {place} is missing", (str(place),))
                continue
            digest = hashlib.sha256(place.read_bytes()).hexdigest()
            if digest != sha256:
                yield _no(
                    "hub-file-changed",
                    f"{pin.repository}: {place} has sha256 {digest}, {sha256} is pinned",
                    (str(place),),
                )
        for place in sorted(build.rglob("*")) if build.is_dir() else ():
            if place.is_file() and "__pycache__" not in place.parts and _below(place, folder) not in wanted:
                yield _no("hub-file-extra", f"{pin.repository}: {place} is not in the lock", (str(place),))


def _below(place: Path, folder: Path) -> str:
    return place.relative_to(folder).as_posix() if place.is_relative_to(folder) else f"../{place.name}"


def _branches(lock: Lock, hub: Hub | None) -> Iterator[Finding]:
    for pin in lock.hub if hub is not None else ():
        try:
            commits = hub.commits(pin.repository) if hub is not None else {}
        except UndeterminedError as error:
            text = f"whether v{pin.version} of {pin.repository} has moved cannot be told: {error.message}"
            yield Finding(code="hub-unreachable", status=Status.UNKNOWN, reason=text)
            continue
        now = commits.get(pin.version, "no commit")
        if now != pin.commit:
            yield _no(
                "hub-branch-moved",
                f"v{pin.version} of {pin.repository} is now at {now}, the lock has {pin.commit}",
                fix="lock again to take the new build, or keep the lock and work offline",
            )


SYNC = "kernelguard sync LOCK --python PATH"
"""The fix for most of what differs; who knows both paths puts them in."""


def _no(code: str, reason: str, evidence: tuple[str, ...] = (), fix: str = SYNC) -> Finding:
    return Finding(code=code, status=Status.FAIL, reason=reason, evidence=evidence, fix=fix)
