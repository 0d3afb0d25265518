"""How is a trace of any size read? One event at a time, in bounded memory, from Chrome's JSON, plain or gzip.

The whole document is never in memory: text is read in blocks, and json's own scanner is put on each event where it
stands. What kineto writes and strict JSON forbids is read all the same: NaN and Infinity, and control characters in
names. An event that is no JSON (kineto does not escape everything) is left out and counted.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from kernelguard.errors import InputError

HINT = "write one with torch.profiler's export_chrome_trace, or with: kernelguard verify MODEL --trace"
BLOCK_BYTES = 1 << 20
LARGEST_EVENT = 16 << 20
"""Characters; an event with its Python stack and all shapes has some thousand."""
LARGEST_BYTES = 64 << 30
"""Of JSON, unpacked: a small file of compressed zeros must end."""
BAD_EVENTS = 1000
"""More than these are no accident of escaping, but another kind of file."""
_BLANK = " \t\n\r"
_BETWEEN = re.compile(r"[\s,]*")
# Where the next event begins, as kineto and as compact writers put it.
_NEXT_EVENT = re.compile(r'[}\]]\s*,\s*(?=\{\s*"(?:ph|name|cat|pid|ts|args)")')


class TraceStream:
    """The events of one trace file, in file order; `header` has the document's other values once they are read."""

    def __init__(self, path: Path, tell: Callable[[int], None] | None = None, *, block: int = BLOCK_BYTES) -> None:
        self.path, self.block = path, block
        self.header: dict[str, Any] = {}
        self.events = 0
        self.skipped = 0
        """Events that were no JSON."""
        self.read_bytes = 0
        """Of JSON, unpacked."""
        self._tell = tell or (lambda _: None)
        self._decode = json.JSONDecoder(strict=False).raw_decode
        self._raw: IO[bytes] = io.BytesIO()
        self._source: IO[bytes] | gzip.GzipFile = self._raw
        self._text, self._at, self._ended = "", 0, False
        self._whole = codecs.getincrementaldecoder("utf-8")("strict").decode

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Each event that is an object.

        Raises:
            InputError: the file is missing, damaged, cut off, or no trace.
        """
        try:
            with self.path.open("rb") as raw:
                self._raw = raw
                packed = raw.read(2) == b"\x1f\x8b"
                raw.seek(0)
                if packed:
                    with gzip.GzipFile(fileobj=raw) as self._source:
                        yield from self._document()
                else:
                    self._source = raw
                    yield from self._document()
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise InputError(
                f"{self.path} is a damaged gzip file, or it was cut off (after {self.events} events): {error}",
                hint=HINT,
            ) from error
        except UnicodeDecodeError as error:
            raise self._no_json(f"it is not UTF-8 text ({error.reason})") from error
        except OSError as error:
            raise InputError(f"{self.path} cannot be read: {error.strerror or error}", hint=HINT) from error

    def _document(self) -> Iterator[dict[str, Any]]:
        if not self._more() or (first := self._peek()) == "":
            raise self._no_json("it is empty")
        if first == "[":
            yield from self._list()
            return
        if first != "{":
            raise self._no_json(f"it begins with {self._text[self._at : self._at + 20]!r}")
        found = False
        self._at += 1
        while (sign := self._peek()) != "}":
            if sign == ",":
                self._at += 1
                continue
            key = self._value()
            if not isinstance(key, str) or self._peek() != ":":
                raise self._no_json("a name of the document is followed by no value")
            self._at += 1
            if key == "traceEvents" and self._peek() == "[":
                found = True
                yield from self._list()
            else:
                self.header[key] = self._value()
        if not found:
            kind = self.header.get("kind")
            if "schema" in self.header and (isinstance(kind, str) or "probes" in self.header):
                what = kind if isinstance(kind, str) else "verdict"
                raise InputError(
                    f"{self.path} is a {what} of kernelguard, and not a trace",
                    hint=f"kernelguard report {shlex.quote(str(self.path))}",
                )
            raise InputError(f"{self.path} has no list of trace events", hint=HINT)

    def _list(self) -> Iterator[dict[str, Any]]:
        """The list whose bracket is next."""
        self._at += 1
        decode, between = self._decode, _BETWEEN.match
        while True:
            # The usual case in few steps, since there are millions of it: a whole event lies in the block.
            blank = between(self._text, self._at)
            at = blank.end() if blank else self._at
            if at < len(self._text) - 1 and self._text[at] == "{":
                try:
                    event, self._at = decode(self._text, at)
                except (ValueError, RecursionError):
                    pass
                else:
                    self.events += 1
                    yield event
                    continue
            sign = self._peek()
            if sign == ",":
                self._at += 1
                continue
            if sign == "]":
                break
            event = self._value(skippable=True)
            if isinstance(event, dict):
                self.events += 1
                yield event
        self._at += 1

    def _peek(self) -> str:
        """The next sign that is not blank; empty at the very end of a document that has not begun."""
        while True:
            text, at, length = self._text, self._at, len(self._text)
            while at < length and text[at] in _BLANK:
                at += 1
            self._at = at
            if at < length:
                return text[at]
            if not self._more():
                if not self.read_bytes or (not self.events and not self.header and not text.strip()):
                    return ""
                raise self._cut()

    def _value(self, *, skippable: bool = False) -> Any:
        """The JSON value that is next."""
        self._peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except (ValueError, RecursionError) as error:
                # Not whole yet, or no JSON: only what follows can tell.
                if skippable and self._skip(error):
                    return None
                if not self._more():
                    raise self._cut() from error
                if len(self._text) - self._at > LARGEST_EVENT:
                    raise self._no_json(f"{error} in event {self.events + 1}") from error
                continue
            # A number at the block's edge may go on in the next block.
            if end == len(self._text) and not isinstance(value, dict | list | str) and self._more():
                continue
            self._at = end
            return value

    def _skip(self, error: Exception) -> bool:
        """Pass over an event that is no JSON, if the next one is already in sight and the fault lies before it."""
        following = _NEXT_EVENT.search(self._text, self._at)
        position = getattr(error, "pos", len(self._text))
        if following is None or position >= following.end() or position >= len(self._text) - 1:
            return False
        self._at = following.end()
        self.skipped += 1
        if self.skipped > BAD_EVENTS:
            raise self._no_json(f"{self.skipped} events cannot be read, the last one because: {error}")
        return True

    def _more(self) -> bool:
        """Read another block; False at the end."""
        if self._ended:
            return False
        block = self._source.read(self.block)
        self.read_bytes += len(block)
        if self.read_bytes > LARGEST_BYTES:
            raise InputError(
                f"{self.path} holds more than {LARGEST_BYTES >> 30} GiB of JSON", hint="record fewer steps"
            )
        self._ended = not block
        self._text = self._text[self._at :] + self._whole(block, self._ended)
        self._at = 0
        self._tell(self._raw.tell())
        return bool(block) or bool(self._text and not self._ended)

    def _cut(self) -> InputError:
        return self._no_json(f"it was cut off: it ends after {self.events} events, in the middle of the document")

    def _no_json(self, why: str) -> InputError:
        return InputError(f"{self.path} is not JSON of a trace: {why}", hint=HINT)
