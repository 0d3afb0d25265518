"""Standard output and standard error: what cannot be written is told, what their encoding lacks is spelt out."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
import unicodedata
from collections.abc import Callable
from typing import TextIO

from kernelguard.errors import OutputError

_PLAIN = {"µ": "u", "μ": "u", "\xd7": "x", "…": "~", "·": "-", "\u2013": "-", "—": "-", "→": ">", "≥": ">", "≤": "<"}
"""One sign for one sign, so that columns stay where they are."""
_SPELT = "kernelguard.spelt"


def open_streams() -> None:
    """Put our own stdout and stderr on the process's descriptors; whatever a test or a caller put there is left."""
    codecs.register_error(_SPELT, _spell)
    if type(sys.stdout) is io.TextIOWrapper:
        sys.stdout = _opened(sys.stdout, _refuse)
    if type(sys.stderr) is io.TextIOWrapper:
        sys.stderr = _opened(sys.stderr, _pass_over)


def say(text: str, *, end: str = "\n") -> None:
    """Print a part of the answer, to stdout."""
    _put(sys.stdout, text + end)


def tell(text: str) -> None:
    """Print what is no part of the answer, to stderr."""
    _put(sys.stderr, text + "\n")


def flush() -> None:
    """Write what is still held back: not at exit, where nobody could be told that it failed."""
    if sys.stdout is not None:
        sys.stdout.flush()


def drop_stdout() -> None:
    """Let what could not be written go nowhere: Python would try once more at exit, and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _put(stream: TextIO | None, text: str) -> None:
    if stream is not None:  # closed by whoever started us
        stream.write(text)
        stream.flush()


class _Descriptor(io.FileIO):
    """A descriptor of the process; every way of printing ends in its `write`."""

    def __init__(self, number: int, failed: Callable[[OSError], None]) -> None:
        super().__init__(number, "wb", closefd=False)
        self.failed = failed

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            while (count := super().write(data)) is None:
                # Whoever made it non-blocking (a terminal shared with another program) has not read it all yet.
                select.select([], [self], [])
        except BrokenPipeError:
            raise
        except OSError as error:
            self.failed(error)
            return len(data)
        return count


def _opened(stream: io.TextIOWrapper, failed: Callable[[OSError], None]) -> io.TextIOWrapper:
    try:
        raw = _Descriptor(stream.fileno(), failed)
    except (OSError, ValueError):  # no descriptor of the process
        return stream
    stream.flush()
    errors = stream.errors if stream.errors in {"replace", "ignore", "xmlcharrefreplace", "namereplace"} else _SPELT
    buffer = io.BufferedWriter(raw)  # type: ignore[type-var]  # for its `write`, which is told above
    return io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=stream.line_buffering)


def _refuse(error: OSError) -> None:
    raise OutputError(f"cannot write to stdout: {error.strerror}") from error


def _pass_over(_: OSError) -> None:
    """The answer is not on stderr, and there is no other place to complain at."""


def _spell(error: UnicodeError) -> tuple[str | bytes, int]:
    """What is printed for signs that the encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    sign = error.object[error.start]
    if "\udc80" <= sign <= "\udcff":
        # A byte of a file name that is no text: as it is on the disk.
        return bytes([ord(sign) - 0xDC00]), error.start + 1
    for spelt in (_PLAIN.get(sign, ""), unicodedata.normalize("NFKD", sign).encode("ascii", "ignore").decode()):
        if spelt:
            return spelt, error.start + 1
    return "?", error.start + 1
