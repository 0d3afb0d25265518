"""A web server on this machine that breaks connections: files with byte ranges, and the hub's pages of one data set."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

COMMIT = "c" * 40


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves `root`; the first `cut` answers with a body end in its middle, the first `busy` are a 503."""

    protocol_version = "HTTP/1.1"
    root: Path
    cut = 0
    busy = 0
    asked: list[str]

    def log_message(self, *_: object) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET(head=True)

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        listed = [entry for entry in self._tree() if entry["path"] in wanted.get("paths", [])]
        self._answer(json.dumps(listed).encode(), "application/json")

    def do_GET(self, *, head: bool = False) -> None:
        kind = type(self)
        kind.asked.append(f"{self.command} {self.path}")
        if kind.busy > 0:
            kind.busy -= 1
            return self._answer(b"busy", "text/plain", status=503)
        name = self.path.partition("?")[0].lstrip("/")
        if name.startswith("api/datasets/"):
            return self._api(name)
        if match := re.match(r"datasets/org/chats/resolve/[^/]+/(.*)", name):
            name = match[1]
        path = kind.root / name
        if not path.is_file():
            return self._answer(b"", "text/plain", status=404, headers={"X-Error-Code": "EntryNotFound"})
        return self._file(path.read_bytes(), head=head)

    def _file(self, content: bytes, *, head: bool) -> None:
        total, status = len(content), 200
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{total:040d}"', "X-Repo-Commit": COMMIT}
        if match := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, end = int(match[1]), min(int(match[2] or total - 1), total - 1)
            content, status = content[start : end + 1], 206
            headers["Content-Range"] = f"bytes {start}-{end}/{total}"
        self._answer(content, "application/octet-stream", status=status, headers=headers, head=head)

    def _answer(
        self, body: bytes, kind: str, *, status: int = 200, headers: dict[str, str] | None = None, head: bool = False
    ) -> None:
        self.send_response(status)
        all_ = {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}
        for name, value in all_.items():
            self.send_header(name, value)
        self.end_headers()
        if head:
            return
        if type(self).cut > 0 and kind == "application/octet-stream":
            type(self).cut -= 1
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
            return
        with suppress(ConnectionError):
            self.wfile.write(body)

    def _tree(self) -> list[dict[str, Any]]:
        files = sorted(path for path in type(self).root.iterdir() if path.is_file())
        return [{"type": "file", "path": path.name, "size": path.stat().st_size, "oid": "0" * 40} for path in files]

    def _api(self, name: str) -> None:
        if "/tree/" in name:
            return self._answer(json.dumps(self._tree()).encode(), "application/json")
        if name.removeprefix("api/datasets/").startswith("org/chats"):
            about = {
                "id": "org/chats", "_id": "0", "sha": COMMIT, "private": False, "tags": [], "downloads": 0,
                "siblings": [{"rfilename": entry["path"]} for entry in self._tree()],
            }  # fmt: skip
            return self._answer(json.dumps(about).encode(), "application/json")
        return self._answer(b"{}", "application/json", status=404, headers={"X-Error-Code": "RepoNotFound"})


@contextmanager
def serving(root: Path) -> Iterator[tuple[str, type[Handler]]]:
    """The address of a server of `root` without a slash at its end, and the handler whose counters can be set."""
    handler = type("Flaky", (Handler,), {"root": root, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign] # clients hang up too
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", handler
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
