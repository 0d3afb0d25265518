"""The lock's files on this machine, each with the hash that the lock has for it. Kept by digest, fetched once."""

from __future__ import annotations

import errno
import hashlib
import shutil
import ssl
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.sources.http import shown

_CHUNK = 1 << 20
_AT_ONCE = 4
_TIMEOUT_S = 60.0
"""Without a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One file."""

    url: str
    filename: str
    sha256: str
    size: int | None = None


def place_of(wanted: Wanted, cache: Path) -> Path:
    """Where a file is kept: by its digest, under its own name, because pip reads names."""
    return cache / "files" / wanted.sha256 / wanted.filename


def fetch(
    files: Sequence[Wanted], cache: Path, *, progress: Callable[[int, int], None] = lambda _done, _total: None
) -> Mapping[str, Path]:
    """Path by sha256 of every file, fetched where it is not there yet. `progress` is told bytes done and in all.

    Raises:
        ToolError: a file is not what the lock says, or the disk is full; nothing half-fetched is left.
        UndeterminedError: a server does not answer, or no longer has it.
    """
    counter = _Counter(total=sum(file.size or 0 for file in files), tell=progress)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        jobs = [pool.submit(_one, file, place_of(file, cache), counter) for file in files]
        try:
            return {file.sha256: job.result() for file, job in zip(files, jobs, strict=True)}
        except BaseException:
            counter.stop = True
            for job in jobs:
                job.cancel()
            raise


class _Counter:
    """Bytes of all downloads together."""

    def __init__(self, *, total: int, tell: Callable[[int, int], None]) -> None:
        self._total, self._done, self._tell = total, 0, tell
        self._lock = threading.Lock()
        self.stop = False

    def add(self, count: int) -> None:
        if self.stop:
            raise UndeterminedError("stopped: another download failed")
        with self._lock:
            self._done += count
            self._tell(self._done, max(self._total, self._done))


def _one(file: Wanted, place: Path, counter: _Counter) -> Path:
    if place.is_file():
        # Hashed again: a cache that was changed must not get into an image.
        if _hash(place, counter) == file.sha256:
            return place
        place.unlink()
    beside = place.with_name(f".{file.filename}.{threading.get_ident()}.part")
    try:
        beside.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        request = urllib.request.Request(file.url, headers={"User-Agent": "kernelguard-preflight"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer, beside.open("wb") as handle:  # noqa: S310
            while chunk := answer.read(_CHUNK):
                handle.write(chunk)
                digest.update(chunk)
                counter.add(len(chunk))
        if digest.hexdigest() != file.sha256:
            raise ToolError(
                f"{file.filename} is not what was locked: expected sha256 {file.sha256}, "
                f"{shown(file.url)} has {digest.hexdigest()}",
                hint="find out who changed it before installing either; a new lock takes what is there now",
            )
        beside.replace(place)
    except urllib.error.HTTPError as error:
        with error:
            raise UndeterminedError(
                f"{file.filename}: {shown(file.url)} answered HTTP {error.code} {error.reason}",
                hint="lock again if it was withdrawn; the lock keeps its hash",
            ) from error
    except urllib.error.URLError as error:
        host = urllib.parse.urlsplit(file.url).hostname or file.url
        raise UndeterminedError(
            f"{file.filename}: {shown(file.url)} cannot be reached: {error.reason}",
            hint=f"does this machine reach {host}?",
        ) from error
    except (TimeoutError, ssl.SSLError, ConnectionError) as error:
        raise UndeterminedError(f"{file.filename}: {shown(file.url)} broke off: {error}", hint="try again") from error
    except OSError as error:
        raise disk_error(error, place.parent) from error
    finally:
        beside.unlink(missing_ok=True)
    return place


def _hash(place: Path, counter: _Counter) -> str:
    digest = hashlib.sha256()
    with place.open("rb") as handle:
        while chunk := handle.read(_CHUNK):
            digest.update(chunk)
            counter.add(len(chunk))
    return digest.hexdigest()


def disk_error(error: OSError, place: Path) -> ToolError:
    """What to say when this machine's disk does not take a file."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        folder = next((p for p in (place, *place.parents) if p.exists()), Path("/"))
        free = shutil.disk_usage(folder).free
        return ToolError(
            f"the disk that holds {place} is full ({free / 2**30:.1f} GB free)",
            hint="free some space, or set XDG_CACHE_HOME to a folder on a larger disk",
        )
    return ToolError(f"{place} cannot be written: {error.strerror or error}", hint="set XDG_CACHE_HOME")
