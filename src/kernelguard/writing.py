"""Where does a file that was named on the command line go? One way for all of them: whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import sys
from pathlib import Path

from kernelguard.errors import InputError, OutputError

_DESCRIPTOR = re.compile(r"/dev/(?:(stdin|stdout|stderr)|fd/(\d+))|/proc/(?:self|thread-self)/fd/(\d+)")
_NAMED = {"stdin": 0, "stdout": 1, "stderr": 2}
_HINTS = {
    errno.ENOENT: "name a file in a folder that exists",
    errno.ENOTDIR: "name a file in a folder that exists",
    errno.ENOSPC: "free some space, or name a file on another disk",
    errno.EDQUOT: "free some space, or name a file on another disk",
}


def is_stdout(path: Path) -> bool:
    """Whether this name means standard output: `-`, /dev/stdout, or whatever else the same file is called."""
    return str(path) == "-" or _descriptor(path) == 1


def is_file(path: Path) -> bool:
    """Whether this names a regular file, or would make one: other files can lie beside it."""
    mode = _mode(path)
    return str(path) != "-" and _descriptor(path) is None and (mode is None or stat.S_ISREG(mode))


def write_file(path: Path, content: bytes) -> None:
    """Write a file: a regular one beside its old self, then renamed, so that a full disk leaves the old one whole.

    A link stays, and what it points to is written. Into a device, a pipe and a descriptor is written as they are.

    Raises:
        InputError: it cannot be written.
    """
    number = _descriptor(path)
    if str(path) == "-" or number == 1:
        _to_stdout(content)
        return
    try:
        mode = _mode(path)
        if number is not None:
            _write_into(os.dup(number), content)
        elif mode is None or stat.S_ISREG(mode):
            _replace(Path(os.path.realpath(path)), content, mode)
        elif stat.S_ISDIR(mode):
            # Of an empty name (`-o "$UNSET"`) nothing but this is left.
            empty = " (an empty name is the folder where you are)" if str(path) == "." else ""
            raise InputError(f"cannot write to {path}, which is a folder{empty}", hint="name a file in it")
        else:
            _write_into(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY), content)
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "name a file that you may write")
        raise OutputError(f"cannot write {path}: {error.strerror}", hint=hint) from error


def _mode(path: Path) -> int | None:
    """What it is, through links; None: nothing yet."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None


def _descriptor(path: Path) -> int | None:
    """The open descriptor that this names; opening it by name would begin at its start and cut off what is there."""
    name = path.absolute()
    for _ in range(40):  # as many links as Linux follows
        found = _DESCRIPTOR.fullmatch(str(name))
        if found is not None:
            return _NAMED[found[1]] if found[1] else int(found[2] or found[3])
        try:
            name = name.parent / name.readlink()
        except OSError:
            break
    for number in (1, 2):
        try:
            same = os.path.samestat(path.stat(), os.fstat(number)) and stat.S_ISREG(path.stat().st_mode)
        except OSError:
            continue
        if same:
            return number
    return None


def _to_stdout(content: bytes) -> None:
    if sys.stdout is None:  # closed by whoever started us
        return
    sys.stdout.flush()
    sys.stdout.buffer.write(content)
    sys.stdout.flush()


def _write_into(number: int, content: bytes) -> None:
    with os.fdopen(number, "wb") as file:
        file.write(content)


def _replace(path: Path, content: bytes, mode: int | None) -> None:
    beside = path.with_name(f".kernelguard-{os.getpid()}.tmp")
    try:
        beside.write_bytes(content)
        if mode is not None:
            with contextlib.suppress(OSError):  # not every file system keeps one
                beside.chmod(stat.S_IMODE(mode))
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
