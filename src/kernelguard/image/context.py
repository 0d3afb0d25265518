"""What is sent to a builder, file by file; and what must not be in it."""

from __future__ import annotations

import fnmatch
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kernelguard.errors import InputError
from kernelguard.image.values import ContextFile

_CHUNK = 1 << 20
LARGEST_FILE = 2 << 30
"""Bytes. A larger file in a folder that is copied into an image is a checkpoint or a data set that went astray."""


def tar_stream(files: Iterable[ContextFile], sent: Callable[[int], None] = lambda _: None) -> Iterator[bytes]:
    """The context as an uncompressed tar, piece by piece; `sent` is told the bytes so far.

    Raises:
        InputError: a file changed its size, or is gone, since the context was planned.
    """
    done = 0
    for file in files:
        size, content = _open(file)
        info = tarfile.TarInfo(file.path)
        info.size, info.mode, info.mtime = size, file.mode, file.mtime
        yield info.tobuf(tarfile.PAX_FORMAT)
        read = 0
        with content:
            while chunk := content.read(_CHUNK):
                read += len(chunk)
                done += len(chunk)
                yield chunk
                sent(done)
        if read != size:
            raise InputError(f"{file.source} changed while it was sent", hint="build again")
        yield b"\0" * (-size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _open(file: ContextFile) -> tuple[int, io.BufferedIOBase]:
    if file.content is not None:
        return len(file.content), io.BytesIO(file.content)
    if file.source is None:
        raise AssertionError(f"{file.path} has neither bytes nor a file")
    try:
        handle = file.source.open("rb")
    except OSError as error:
        raise InputError(f"{file.source} cannot be read: {error.strerror}", hint="build again") from error
    return os.fstat(handle.fileno()).st_size, handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfit:
    """Something in a folder that has no place in an image."""

    path: str
    """Below the folder."""
    why: str


def walk(folder: Path, *, largest: int = LARGEST_FILE) -> tuple[tuple[ContextFile, ...], tuple[Unfit, ...]]:
    """The files of a folder, and what in it cannot or should not be sent. `.dockerignore` is honoured.

    Raises:
        InputError: there is no such folder.
    """
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder", hint="name the folder that shall be copied into the image")
    ignored = _ignore(folder)
    files: list[ContextFile] = []
    unfit: list[Unfit] = []

    def failed(error: OSError) -> None:
        unfit.append(Unfit(path=str(error.filename), why=f"cannot be read: {error.strerror}"))

    for top, folders, names in os.walk(folder, onerror=failed):
        below = Path(top).relative_to(folder)
        folders[:] = sorted(name for name in folders if not ignored((below / name).as_posix()))
        for name in sorted(names):
            path = (below / name).as_posix()
            if ignored(path):
                continue
            place = Path(top, name)
            try:
                facts = place.stat()
            except OSError as error:
                unfit.append(Unfit(path=path, why=f"leads nowhere: {error.strerror}"))
                continue
            why = _unfit(facts, largest)
            if why:
                unfit.append(Unfit(path=path, why=why))
            elif not os.access(place, os.R_OK):
                unfit.append(Unfit(path=path, why="cannot be read: Permission denied"))
            else:
                files.append(
                    ContextFile(path=path, source=place, size=facts.st_size, mode=facts.st_mode & 0o755 | 0o644)
                )
    return tuple(files), tuple(unfit)


def _unfit(facts: os.stat_result, largest: int) -> str:
    mode = facts.st_mode
    if stat.S_ISSOCK(mode):
        return "is a socket, which no image can hold"
    if stat.S_ISFIFO(mode):
        return "is a pipe: reading it would wait for ever"
    if not stat.S_ISREG(mode):
        return "is a device, which no image can hold"
    if facts.st_size > largest:
        return f"has {facts.st_size / 2**30:.1f} GB: mount data and checkpoints when the image runs"
    return ""


def _ignore(folder: Path) -> Callable[[str], bool]:
    """`.dockerignore`'s patterns: the last one that fits wins, `!` takes back."""
    place = folder / ".dockerignore"
    rules: list[tuple[bool, str]] = []
    if place.is_file():
        for line in place.read_text("utf-8", "replace").splitlines():
            text = line.strip()
            if text and not text.startswith("#"):
                rules.append((not text.startswith("!"), text.removeprefix("!").strip("/").removeprefix("./")))

    def ignored(path: str) -> bool:
        answer = False
        for leave_out, pattern in rules:
            short = pattern.removeprefix("**/")
            parts = path.split("/")
            heads = ["/".join(parts[: n + 1]) for n in range(len(parts))]
            # A pattern that fits a folder leaves out all that is in it.
            fits = any(fnmatch.fnmatchcase(head, pattern) for head in heads)
            if short != pattern:
                fits = fits or any(fnmatch.fnmatchcase("/".join(parts[n:m]), short) for n, m in _spans(len(parts)))
            if fits:
                answer = leave_out
        return answer

    return ignored


def _spans(count: int) -> Iterator[tuple[int, int]]:
    return ((n, m) for n in range(count) for m in range(n + 1, count + 1))
