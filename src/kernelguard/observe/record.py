"""Is an installed distribution still what its installer put there, and does it fit its siblings?"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from kernelguard.observe.values import Distribution

# What decides which code runs; documentation and caches may change as they like.
_CODE = (".py", ".so", ".pyd", ".cubin", ".ptx")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    """A file that is not what RECORD says was installed."""

    distribution: str
    path: str
    """Relative to the installation folder, as RECORD has it."""
    missing: bool
    """It is gone; otherwise its content is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFile:
    """A file that several distributions say is theirs: the one installed last has won."""

    path: str
    distributions: tuple[str, ...]
    same_content: bool
    """All of them brought the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnmetPin:
    """A distribution that wants exactly one version of another, which is there in a different one."""

    distribution: str
    version: str
    wants: str
    """`fla-core==0.6.0`."""
    installed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordState:
    """What the records of some distributions, compared with the disk and with each other, tell."""

    changed: tuple[ChangedFile, ...] = ()
    shared: tuple[SharedFile, ...] = ()
    unmet: tuple[UnmetPin, ...] = ()
    problems: tuple[str, ...] = ()
    """What could not be read, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    path: str
    sha256: str
    size: int | None


def inspect_records(distributions: Mapping[str, Distribution], names: Iterable[str]) -> RecordState:
    """Compare the records of the distributions `names` with the disk, with all others, and with their pins.

    Args:
        distributions: all of an environment's, by normalized name; their locations are folders of this machine.
        names: the normalized names to look at; those that are not installed are left out.
    """
    problems: list[str] = []
    changed: list[ChangedFile] = []
    unmet: list[UnmetPin] = []
    claims: dict[tuple[str, str], dict[str, str]] = {}
    wanted = [name for name in dict.fromkeys(names) if name in distributions]
    for name, distribution in sorted(distributions.items()):
        folder = _metadata_folder(distribution)
        rows = [] if folder is None else list(_rows(folder, problems))
        for row in rows:
            claims.setdefault((distribution.location, row.path), {})[name] = row.sha256
        if name not in wanted:
            continue
        if folder is None or not rows:
            problems.append(f"{name} in {distribution.location} has no RECORD: what was installed is not known")
        changed += _changed(distribution, rows)
        if folder is not None:
            unmet += _unmet(distribution, folder, distributions, problems)
    return RecordState(
        changed=tuple(changed),
        shared=tuple(
            SharedFile(path=path, distributions=tuple(sorted(owners)), same_content=len(set(owners.values())) == 1)
            for (_, path), owners in sorted(claims.items())
            if len(owners) > 1 and owners.keys() & set(wanted)
        ),
        unmet=tuple(unmet),
        problems=tuple(problems),
    )


def _metadata_folder(distribution: Distribution) -> Path | None:
    """The `.dist-info` folder; of several with the name, the one of this version."""
    found = None
    for folder in sorted(Path(distribution.location).glob("*.dist-info")):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if canonicalize_name(name) == distribution.name and (found is None or version == distribution.version):
            found = folder
    return found


def _rows(folder: Path, problems: list[str]) -> Iterator[_Row]:
    """The rows of RECORD that stand for code."""
    try:
        rows = list(csv.reader((folder / "RECORD").read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        problems.append(f"{folder / 'RECORD'} could not be read: {error}")
        return
    for row in rows:
        if row and row[0].endswith(_CODE):
            path, digest, size = [*row, "", ""][:3]
            sha256 = digest.removeprefix("sha256=") if digest.startswith("sha256=") else ""
            yield _Row(path=path, sha256=sha256, size=int(size) if size.isdecimal() else None)


def _changed(distribution: Distribution, rows: Iterable[_Row]) -> Iterator[ChangedFile]:
    for row in rows:
        file = Path(distribution.location, row.path)
        if not file.is_file():
            yield ChangedFile(distribution=distribution.name, path=row.path, missing=True)
        elif (row.size is not None and file.stat().st_size != row.size) or (row.sha256 and _digest(file) != row.sha256):
            yield ChangedFile(distribution=distribution.name, path=row.path, missing=False)


def _digest(file: Path) -> str:
    with file.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _unmet(
    distribution: Distribution, folder: Path, installed: Mapping[str, Distribution], problems: list[str]
) -> Iterator[UnmetPin]:
    """The exact pins (`==`) on other installed distributions that do not hold."""
    try:
        head = (folder / "METADATA").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError as error:
        problems.append(f"{folder / 'METADATA'} could not be read: {error}")
        return
    for line in re.findall(r"^Requires-Dist:\s*(.+)$", head, re.MULTILINE):
        try:
            wants = Requirement(line.strip())
        except InvalidRequirement:
            problems.append(f"{distribution.name} {distribution.version} has a requirement that is none: {line!r}")
            continue
        other = installed.get(canonicalize_name(wants.name))
        pinned = any(part.operator in {"==", "==="} for part in wants.specifier)
        # With a marker (an extra, another Python) the pin may not apply.
        if other is None or not pinned or wants.marker is not None:
            continue
        try:
            holds = wants.specifier.contains(other.version, prereleases=True)
        except InvalidVersion:
            holds = False
        if not holds:
            yield UnmetPin(
                distribution=distribution.name,
                version=distribution.version,
                wants=f"{canonicalize_name(wants.name)}{wants.specifier}",
                installed=other.version,
            )
