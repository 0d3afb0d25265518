"""Real HTTP servers on 127.0.0.1 that tests make behave, or misbehave."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Responder = Callable[[BaseHTTPRequestHandler], None]


@dataclass(slots=True)
class Site:
    """What a server has: bytes by path, and paths with a behaviour of their own."""

    url: str = ""
    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    """Path -> content type, body."""
    special: dict[str, Responder] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    ranges: bool = True

    def put(self, path: str, body: bytes | str, content_type: str = "application/octet-stream") -> str:
        self.files[path] = (content_type, body.encode() if isinstance(body, str) else body)
        return f"{self.url}{path}"

    def put_index(self, distribution: str, files: Mapping[str, bytes], **extra: Mapping[str, object]) -> None:
        """A PEP 691 page that lists these files, and the files. `extra`: more keys for a file, by file name."""
        rows = []
        for name, body in files.items():
            url = self.put(f"/files/{name}", body)
            row: dict[str, object] = {"filename": name, "url": url, "hashes": {"sha256": sha256(body)}}
            rows.append(row | dict(extra.get(name, {})))
        page = {"meta": {"api-version": "1.1"}, "name": distribution, "files": rows}
        self.put(f"/simple/{distribution}/", json.dumps(page), "application/vnd.pypi.simple.v1+json")


@contextmanager
def site() -> Iterator[Site]:
    """A server that runs for the length of the block."""
    served = Site()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            served.requests.append((self.command, self.path))
            if path in served.special:
                served.special[path](self)
                return
            if path not in served.files:
                self.answer(404, "text/plain", b"no such thing")
                return
            content_type, body = served.files[path]
            wanted = self.headers.get("Range", "")
            if wanted and served.ranges:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start = len(body) - int(last) if not first else int(first)
                start = max(start, 0)
                end = len(body) - 1 if not first or not last else min(int(last), len(body) - 1)
                self.answer(206, content_type, body[start : end + 1], f"bytes {start}-{end}/{len(body)}")
            else:
                self.answer(200, content_type, body)

        do_HEAD = do_GET  # noqa: N815

        def answer(self, status: int, content_type: str, body: bytes, content_range: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            if content_range:
                self.send_header("Content-Range", content_range)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            """Quietly."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_arguments: object) -> None:
            """A client that hung up is part of some tests, and nothing to print."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def wheel(
    distribution: str,
    version: str,
    *,
    files: Mapping[str, str] | None = None,
    requires: tuple[str, ...] = (),
    metadata_version: str = "",
    tag: str = "py3-none-any",
) -> bytes:
    """A real, installable wheel. `metadata_version`: what its METADATA says, when that is not `version`."""
    name = distribution.replace("-", "_")
    said = metadata_version or version
    info = f"{name}-{said}.dist-info"
    head = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {said}"]
    head += [f"Requires-Dist: {r}" for r in requires]
    members = {
        **(files if files is not None else {f"{name}/__init__.py": f"__version__ = {said!r}\n"}),
        f"{info}/METADATA": "\n".join([*head, ""]),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    record = [f"{path},{_record_hash(text.encode())},{len(text.encode())}" for path, text in members.items()]
    members[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in members.items():
            # A fixed date: the same wheel has the same bytes in every run.
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), text)
    return buffer.getvalue()


def _record_hash(body: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
    return f"sha256={digest}"


# -- ways to misbehave ------------------------------------------------------------------------------------------------


def html(handler: BaseHTTPRequestHandler) -> None:
    handler.answer(200, "text/html", b"<html><body><h1>Please sign in</h1></body></html>")  # type: ignore[attr-defined]


def broken(handler: BaseHTTPRequestHandler) -> None:
    handler.answer(503, "text/plain", b"down for maintenance")  # type: ignore[attr-defined]


def forbidden(handler: BaseHTTPRequestHandler) -> None:
    handler.answer(403, "text/plain", b"no")  # type: ignore[attr-defined]


def silent(handler: BaseHTTPRequestHandler) -> None:
    """Takes the request and says nothing."""
    time.sleep(5)
    handler.close_connection = True


def dripping(handler: BaseHTTPRequestHandler) -> None:
    """Sends one byte at a time, each soon enough for a socket's own time limit."""
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    try:
        for _ in range(200):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.05)
    except OSError:
        # The client hung up, which is what it should do.
        return


def cut_off(body: bytes) -> Responder:
    """Promises all of `body` and closes the connection in the middle."""

    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/octet-stream")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: len(body) // 2])
        handler.close_connection = True

    return respond
