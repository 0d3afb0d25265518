"""Which files does a folder (`--find-links DIR`) have? They are at hand, so they are hashed and opened."""

from __future__ import annotations

import dataclasses
import hashlib
import zipfile
import zlib
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.sources.index import requirements
from kernelguard.sources.names import built_for, read_file_name
from kernelguard.sources.values import BuiltFor, Candidate, Kind, Known

_CHECKED_WHOLE = 64 << 20
"""Bytes."""
_FETCH_AGAIN = "fetch it again, or take it out of the folder"


class FolderSource:
    """A folder of wheels."""

    def __init__(self, folder: Path, *, compiled: frozenset[str] = frozenset(), configured: bool = False) -> None:
        """`compiled`: names of distributions that are built against torch; `configured`: pip itself looks here too.

        Raises:
            InputError: there is no such folder.
        """
        if not folder.is_dir():
            raise InputError(f"--find-links {folder}: no such folder", hint="name a folder that holds wheels")
        self._folder = folder
        self._compiled = compiled
        self._configured = configured

    @property
    def name(self) -> str:
        """`folder wheels`."""
        return f"folder {self._folder}"

    def find(self, distribution: str) -> tuple[Candidate, ...]:
        """See `Source`.

        Raises:
            InputError: a wheel of that distribution is damaged.
        """
        found = []
        for path in sorted(self._folder.iterdir()):
            name = read_file_name(path.name)
            if name is None or name.sdist or name.distribution != distribution:
                continue
            metadata = read_wheel_metadata(path)
            requires = requirements(tuple(metadata.get_all("Requires-Dist") or ()))
            made = built_for(name.version)
            if made is None and distribution in self._compiled and not name.pure:
                made = BuiltFor()
            if made is not None and made.torch is None:
                made = dataclasses.replace(made, torch=_pinned_torch(requires))
            found.append(
                Candidate(
                    distribution=distribution,
                    version=name.version,
                    kind=Kind.WHEEL,
                    source=self.name,
                    known=Known.SEEN,
                    filename=path.name,
                    url=path.resolve().as_uri(),
                    sha256=hash_file(path),
                    size=path.stat().st_size,
                    pythons=name.pythons,
                    machines=name.machines,
                    glibc=name.glibc,
                    built_for=made,
                    requires_python=name.python_floor,
                    requires=requires,
                    # pip takes a file by its version only where name and metadata agree on it.
                    direct=not (self._configured and metadata["Version"] == str(name.version)),
                    evidence=f"lies in {self.name}",
                )
            )
        return tuple(found)


def read_wheel_metadata(path: Path) -> Message:
    """The METADATA of a wheel on disk.

    Raises:
        InputError: it is no readable wheel.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # Of a large one only the directory is read: its hash is pinned, and pip checks every member.
            damaged = archive.testzip() if path.stat().st_size < _CHECKED_WHOLE else None
            members = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            if damaged is not None or not members:
                raise InputError(f"{path} is no sound wheel: {damaged or 'it holds no METADATA'}", hint=_FETCH_AGAIN)
            return HeaderParser().parsestr(archive.read(min(members, key=len)).decode("utf-8", "replace"))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise InputError(f"{path} is no readable wheel (cut off?): {error}", hint=_FETCH_AGAIN) from error


def hash_file(path: Path) -> str:
    """The sha256 of a file, as hex digits."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _pinned_torch(requires: tuple[Requirement, ...]) -> Version | None:
    """The torch minor that a wheel's own metadata pins (`torch==2.12.*`), as those of some GPU indexes do."""
    for requirement in requires:
        if requirement.name == "torch":
            for spec in requirement.specifier:
                if spec.operator in {"==", "~="}:
                    release = Version(spec.version.removesuffix(".*")).release
                    return Version(".".join(map(str, release[:2])))
    return None
