"""What does a wheel on a server say about itself, read without fetching the wheel?

First the file beside it that PEP 658 promises, else the wheel's own archive through range requests.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from kernelguard.errors import UndeterminedError
from kernelguard.sources.http import Http, MissingError, shown

_TAIL = 1 << 16
_BLOCK = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """The core metadata of a wheel, and how it was had."""

    headers: Message
    how: str
    """`pep658` or `ranges`."""

    @property
    def requires(self) -> tuple[str, ...]:
        """Its Requires-Dist lines."""
        return tuple(self.headers.get_all("Requires-Dist") or ())

    @property
    def version(self) -> str:
        """The version that it gives itself."""
        return str(self.headers["Version"])


def read_metadata(url: str, http: Http, *, promised: bool) -> Metadata:
    """The metadata of the wheel at `url`; `promised`: its index says that the file beside it exists.

    Raises:
        UndeterminedError: it cannot be read.
    """
    if promised:
        try:
            body = http.get(f"{url}.metadata", keep=True).body
        except MissingError:
            # Some indexes promise what they do not have; the wheel itself has it too.
            body = b""
        if body:
            return Metadata(headers=HeaderParser().parsestr(body.decode("utf-8", "replace")), how="pep658")
    texts = read_members(url, http, (".dist-info/METADATA",))
    text = texts[".dist-info/METADATA"]
    if text is None:
        raise UndeterminedError(f"{shown(url)} holds no METADATA, so it is no wheel")
    return Metadata(headers=HeaderParser().parsestr(text), how="ranges")


def read_members(url: str, http: Http, endings: Sequence[str]) -> Mapping[str, str | None]:
    """The text of the shortest-named member with each ending in a remote archive; None: there is none.

    Raises:
        UndeterminedError: the server takes no range requests, or the archive is damaged.
    """
    try:
        with zipfile.ZipFile(RemoteFile(url, http)) as archive:
            names = archive.namelist()
            found: dict[str, str | None] = {}
            for ending in endings:
                mine = sorted((n for n in names if n.endswith(ending)), key=lambda n: (len(n), n))
                found[ending] = archive.read(mine[0]).decode("utf-8", "replace") if mine else None
            return found
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UndeterminedError(f"{shown(url)} is no readable wheel (cut off?): {error}") from error


class RemoteFile(io.RawIOBase):
    """A file on a server, read in pieces."""

    def __init__(self, url: str, http: Http) -> None:
        super().__init__()
        self._url, self._http = url, http
        self._position = 0
        self._blocks: dict[int, bytes] = {}
        # A server that ignores the header answers with the whole file, which the limit refuses.
        tail = http.get(url, headers={"Range": f"bytes=-{_TAIL}"}, limit=_TAIL, keep=True)
        size = tail.headers.get("content-range", "").rpartition("/")[2]
        if not size.isdigit():
            raise UndeterminedError(f"{shown(url)}: the server takes no range requests")
        self._size = int(size)
        self._tail, self._tail_at = tail.body, self._size - len(tail.body)

    def seekable(self) -> bool:
        """Always."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the position."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes from the position on."""
        end = self._size if size < 0 else min(self._position + size, self._size)
        start = self._position
        if start >= end:
            return b""
        self._position = end
        if start >= self._tail_at:
            return self._tail[start - self._tail_at : end - self._tail_at]
        if end - start > _BLOCK:
            return self._fetch(start, end)
        parts = []
        while start < end:
            number = start // _BLOCK
            if number not in self._blocks:
                self._blocks[number] = self._fetch(number * _BLOCK, min((number + 1) * _BLOCK, self._size))
            offset = start - number * _BLOCK
            piece = self._blocks[number][offset : offset + end - start]
            if not piece:
                raise EOFError(f"no bytes at {start} of {self._size}")
            parts.append(piece)
            start += len(piece)
        return b"".join(parts)

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """As `io.RawIOBase` wants it."""
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)

    def _fetch(self, start: int, end: int) -> bytes:
        header = {"Range": f"bytes={start}-{end - 1}"}
        return self._http.get(self._url, headers=header, limit=end - start, keep=True).body
