"""What does the package index say today that the matrices do not? Shown as a difference; nothing is overwritten."""

from __future__ import annotations

import re
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from kernelguard.errors import UndeterminedError
from kernelguard.sources.http import Http, shown
from kernelguard.sources.index import IndexFile, IndexSource, requirements
from kernelguard.sources.metadata import RemoteFile, read_members, read_metadata
from kernelguard.sources.names import FileName, read_file_name

_MACHINES = ("x86_64", "aarch64")
_OLDEST_TORCH = Version("2.4")
_AT_ONCE = 8
_ARCHS = re.compile(rb"(?:(?:sm|compute)_\d+[af]? ?){3,}")
_ARCHS_MEMBER = "torch/lib/libtorch_python.so"
_MOST_READ = 64 << 20
"""Bytes of that library that are searched at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between a matrix file and the index."""

    file: str
    row: str
    field: str
    """Empty: the whole row is new, or gone."""
    old: str
    new: str

    def __str__(self) -> str:
        where = f"{self.file}: {self.row}" + (f" {self.field}" if self.field else "")
        if not self.old:
            return f"+ {where}: {self.new}"
        if not self.new:
            return f"- {where}: {self.old}"
        return f"~ {where}: {self.old} -> {self.new}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Everything that differs, and what could not be looked at."""

    changes: tuple[Change, ...]
    unread: tuple[str, ...]
    """One sentence each; not empty means that there may be more changes."""
    requests: int


def refresh(folder: Path, index: IndexSource, http: Http, *, deep: bool = False) -> Difference:
    """Compare `matrices/` in `folder` with the index.

    `deep`: read the GPU archs of every torch wheel, not only of releases that are new (7 MB for each, once).

    Raises:
        UndeterminedError: the index does not answer at all.
    """
    unread: list[str] = []
    torch = tomllib.loads((folder / "torch.toml").read_text("utf-8"))
    changes = [*_torch(torch, index, http, unread, deep=deep)]
    for path in sorted((folder / "wheels").glob("*.toml")):
        document = tomllib.loads(path.read_text("utf-8"))
        changes += _package(f"wheels/{path.name}", document, index, http, unread)
    hub = tomllib.loads((folder / "hub.toml").read_text("utf-8"))
    changes += _kernels(hub, index)
    return Difference(changes=tuple(changes), unread=tuple(unread), requests=http.requests)


def _named(files: Iterable[IndexFile]) -> Iterator[tuple[IndexFile, FileName]]:
    for file in files:
        name = read_file_name(file.filename)
        if name is not None and not name.version.is_prerelease:
            yield file, name


def _torch(
    document: Mapping[str, Any], index: IndexSource, http: Http, unread: list[str], *, deep: bool
) -> Iterator[Change]:
    releases: dict[Version, list[tuple[IndexFile, FileName]]] = {}
    for file, name in _named(index.files("torch")):
        if not name.sdist and name.version >= _OLDEST_TORCH and name.machines is not None:
            releases.setdefault(name.version, []).append((file, name))
    known = {Version(row["version"]): row for row in document["release"]}
    versions = sorted(releases)

    def derive(version: Version) -> dict[str, Any] | UndeterminedError:
        try:
            return torch_row(version, releases[version], http, archs=deep or version not in known)
        except UndeterminedError as error:
            return error

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        derived = dict(zip(versions, pool.map(derive, versions), strict=True))
    for version, row in derived.items():
        if isinstance(row, UndeterminedError):
            unread.append(f"torch {version}: {row.message}")
        elif version not in known:
            told = "; ".join(f"{key} {value}" for key, value in _flat(row))
            yield Change(file="torch.toml", row=f"torch {version}", field="", old="", new=told)
        else:
            yield from _compare("torch.toml", f"torch {version}", known[version], row)
    for version in sorted(set(known) - set(releases)):
        yield Change(file="torch.toml", row=f"torch {version}", field="", old="listed here", new="")


def torch_row(
    version: Version, files: Sequence[tuple[IndexFile, FileName]], http: Http, *, archs: bool
) -> dict[str, Any]:
    """What one release's files say, in the words of `torch.toml`.

    Raises:
        UndeterminedError: a wheel cannot be read.
    """
    row: dict[str, Any] = {
        "version": str(version),
        "uploaded": min(file.uploaded for file, _ in files),
        "requires_python": next((f.requires_python for f, _ in files if f.requires_python), ""),
        "yanked": any(file.yanked for file, _ in files),
    }
    for machine in _MACHINES:
        mine = [(f, n) for f, n in files if n.machines == (machine,)]
        if mine:
            row[machine], triton = _torch_build(mine, http, archs=archs)
            if machine == "x86_64":
                row["triton"] = triton
    return row


def _torch_build(files: Sequence[tuple[IndexFile, FileName]], http: Http, *, archs: bool) -> tuple[dict[str, Any], str]:
    pythons = sorted({p for _, n in files for p in n.pythons or ()}, key=lambda p: (int(re.sub(r"\D", "", p)), p))
    chosen = next((f for f, n in files if n.pythons == ("cp312",)), files[-1][0])
    glibc = min(n.glibc for _, n in files if n.glibc is not None)
    members = read_members(chosen.url, http, ("torch/version.py",))
    shape = re.search(r"^cuda(?:\s*:[^=]+)?\s*=\s*['\"]([\d.]+)['\"]", members["torch/version.py"] or "", re.MULTILINE)
    metadata = read_metadata(chosen.url, http, promised=chosen.has_metadata)
    pins = [r for r in requirements(metadata.requires) if r.name in {"triton", "pytorch-triton"}]
    build: dict[str, Any] = {"cuda": shape[1] if shape else "", "glibc": str(glibc), "pythons": " ".join(pythons)}
    if archs and build["cuda"]:
        build["archs"] = " ".join(read_archs(chosen.url, http))
    return build, _pin_text(pins)


def _pin_text(pins: Sequence[Requirement]) -> str:
    return str(pins[0].specifier) if pins else ""


def read_archs(url: str, http: Http) -> tuple[str, ...]:
    """The GPU archs that a torch wheel was compiled for, read out of its library; empty: they are not in it.

    Raises:
        UndeterminedError: the wheel cannot be read.
    """
    try:
        with zipfile.ZipFile(RemoteFile(url, http)) as archive, archive.open(_ARCHS_MEMBER) as library:
            kept = b""
            for _ in range(_MOST_READ >> 18):
                block = library.read(1 << 18)
                if not block:
                    return ()
                kept = kept[-512:] + block
                found = _ARCHS.search(kept)
                # One that ends with the block may go on in the next.
                if found is not None and found.end() < len(kept) - 8:
                    names = re.findall(r"sm_(\d+)(\d[af]?)", found.group().decode())
                    return tuple(f"{major}.{minor}" for major, minor in names)
    except KeyError:
        return ()
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UndeterminedError(f"{shown(url)} cannot be read: {error}") from error
    return ()


def _compare(file: str, row: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Change]:
    before, after = dict(_flat(old)), dict(_flat(new))
    for field, value in after.items():
        was = before.get(field, "False" if field == "yanked" else "")
        if was != value:
            yield Change(file=file, row=row, field=field, old=was, new=value)


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif not isinstance(value, list):
            yield f"{prefix}{key}", str(value)


def _package(
    file: str, document: Mapping[str, Any], index: IndexSource, http: Http, unread: list[str]
) -> Iterator[Change]:
    name = document["distribution"]
    listed = list(_named(index.files(name)))
    if document["kind"] == "extension":
        yield from _newest_sdist(file, document, [n.version for _, n in listed if n.sdist])
        return
    known = {Version(row["version"]): row for row in document.get("release", [])}
    newest_known = max(known, default=Version("0"))
    wheels: dict[Version, list[IndexFile]] = {}
    for entry, read in listed:
        if not read.sdist:
            wheels.setdefault(read.version, []).append(entry)
    for version, entries in sorted(wheels.items()):
        row = known.get(version)
        if row is None and version > newest_known:
            try:
                metadata = read_metadata(entries[0].url, http, promised=entries[0].has_metadata)
            except UndeterminedError as error:
                unread.append(f"{name} {version}: {error.message}")
                continue
            told = f"requires_python {entries[0].requires_python}; requires {', '.join(metadata.requires)}"
            yield Change(file=file, row=f"{name} {version}", field="", old="", new=told)
        elif row is not None and row.get("sha256") and row["sha256"] not in {e.sha256 for e in entries}:
            new = " ".join(sorted(e.sha256 for e in entries))
            yield Change(file=file, row=f"{name} {version}", field="sha256", old=row["sha256"], new=new)
        if row is not None and any(e.yanked for e in entries):
            yield Change(file=file, row=f"{name} {version}", field="yanked", old="no", new=entries[0].yanked)
    for version in sorted(set(known) - set(wheels)):
        yield Change(file=file, row=f"{name} {version}", field="", old="listed here", new="")


def _newest_sdist(file: str, document: Mapping[str, Any], versions: Sequence[Version]) -> Iterator[Change]:
    known = document.get("build", {}).get("version")
    newest = max(versions, default=None)
    if known is not None and newest is not None and newest != Version(known):
        yield Change(file=file, row=document["distribution"], field="build.version", old=str(known), new=str(newest))


def _kernels(document: Mapping[str, Any], index: IndexSource) -> Iterator[Change]:
    known = {Version(text) for text in document["published"]["kernels"].split()}
    there = {n.version for _, n in _named(index.files("kernels")) if n.version >= min(known)}
    for version in sorted(there - known):
        yield Change(file="hub.toml", row=f"kernels {version}", field="", old="", new="published")
    for version in sorted(known - there):
        yield Change(file="hub.toml", row=f"kernels {version}", field="", old="listed here", new="")
