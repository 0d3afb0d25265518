"""One way to fetch things: limits of time and size for the whole answer, and words for everything that goes wrong."""

from __future__ import annotations

import hashlib
import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kernelguard.errors import UndeterminedError

_CHUNK = 1 << 16
_AGENT = "kernelguard-preflight"
TEXT_LIMIT = 64 << 20
"""Bytes. The largest index page of a kernel package is below 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """By lower-case name."""
    body: bytes
    url: str
    """After redirects."""

    @property
    def content_type(self) -> str:
        """Without parameters, lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class MissingError(UndeterminedError):
    """The server says that there is no such thing (404 or 410): an answer, not a failure."""


class Http:
    """A client with limits. `cache`: a folder for answers that never change (`keep=True`)."""

    def __init__(self, *, timeout: float = 20.0, cache: Path | None = None, attempts: int = 2) -> None:
        self._timeout = timeout
        self._cache = cache
        self._attempts = attempts
        self.requests = 0

    def get(
        self, url: str, *, headers: Mapping[str, str] | None = None, limit: int = TEXT_LIMIT, keep: bool = False
    ) -> Answer:
        """Fetch `url` (http, https or file) as a whole.

        Raises:
            MissingError: it does not exist.
            UndeterminedError: no answer in time, a broken one, or one that is larger than `limit` bytes.
        """
        stored = self._stored(url, headers) if keep else None
        if stored is not None and stored.is_file():
            kept, _, body = stored.read_bytes().partition(b"\n")
            return Answer(status=200, headers=json.loads(kept), body=body, url=url)
        answer = self._ask("GET", url, headers or {}, limit)
        if stored is not None and answer.status in {200, 206}:
            write_whole(stored, json.dumps(dict(answer.headers)).encode() + b"\n" + answer.body)
        return answer

    def head(self, url: str) -> Answer:
        """The headers of `url`; raises as `get` does."""
        return self._ask("HEAD", url, {}, 0)

    def _stored(self, url: str, headers: Mapping[str, str] | None) -> Path | None:
        if self._cache is None:
            return None
        key = json.dumps([url, sorted((headers or {}).items())])
        return self._cache / hashlib.sha256(key.encode()).hexdigest()

    def _ask(self, method: str, url: str, headers: Mapping[str, str], limit: int) -> Answer:
        scheme = urllib.parse.urlsplit(url).scheme
        if scheme not in {"http", "https", "file"}:
            raise UndeterminedError(f"{shown(url)} is no http, https or file URL")
        for attempt in range(1, self._attempts + 1):
            try:
                return self._once(method, url, headers, limit)
            except (MissingError, _FinalError):
                raise
            except UndeterminedError:
                if attempt == self._attempts:
                    raise
        raise AssertionError("unreachable")  # pragma: no cover

    def _once(self, method: str, url: str, headers: Mapping[str, str], limit: int) -> Answer:
        self.requests += 1
        deadline = time.monotonic() + self._timeout
        request = urllib.request.Request(  # noqa: S310 - the scheme is checked by the caller
            url, method=method, headers={"User-Agent": _AGENT, **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=self._timeout) as response:  # noqa: S310
                body = _read(response, url, deadline, limit) if method == "GET" else b""
                found = {name.lower(): value for name, value in response.headers.items()}
                expected = found.get("content-length")
                if method == "GET" and expected is not None and expected.isdigit() and len(body) != int(expected):
                    raise UndeterminedError(
                        f"{shown(url)} broke off: {len(body)} of {expected} bytes came", hint="try again"
                    )
                return Answer(status=response.status or 200, headers=found, body=body, url=response.url or url)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in {404, 410}:
                    raise MissingError(f"{shown(url)} does not exist (HTTP {error.code})") from error
                raised = UndeterminedError if error.code >= 500 or error.code == 429 else _FinalError
                raise raised(f"{shown(url)} answered HTTP {error.code} {error.reason}") from error
        except urllib.error.URLError as error:
            if isinstance(error.reason, FileNotFoundError | IsADirectoryError):
                raise MissingError(f"{shown(url)} does not exist") from error
            raise UndeterminedError(f"{shown(url)} cannot be reached: {error.reason}", hint=_hint(url)) from error
        except TimeoutError as error:
            raise _slow(url, self._timeout) from error
        except (http.client.HTTPException, ssl.SSLError, OSError) as error:
            raise UndeterminedError(f"{shown(url)} broke off: {type(error).__name__}: {error}") from error


class _FinalError(UndeterminedError):
    """An answer that asking again will not change."""


def _read(response: http.client.HTTPResponse, url: str, deadline: float, limit: int) -> bytes:
    # A server that sends one byte a second never runs into the socket's time limit, so the whole is watched too.
    parts: list[bytes] = []
    size = 0
    while chunk := response.read1(_CHUNK) if hasattr(response, "read1") else response.read(_CHUNK):
        parts.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _FinalError(f"{shown(url)} is larger than {limit} bytes")
        if time.monotonic() > deadline:
            raise _slow(url, None)
    return b"".join(parts)


def _slow(url: str, timeout: float | None) -> UndeterminedError:
    within = f" within {timeout:g} s" if timeout is not None else " in time"
    return UndeterminedError(f"{shown(url)} did not answer{within}", hint=_hint(url))


def _hint(url: str) -> str:
    host = urllib.parse.urlsplit(url).hostname or url
    return f"is {host} up, and does this machine reach it? --index URL and --find-links DIR name other places"


def shown(url: str) -> str:
    """The URL as it may be printed: without a user name and password."""
    parts = urllib.parse.urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{hashlib.sha256(content).hexdigest()[:8]}.part")
    try:
        beside.write_bytes(content)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
