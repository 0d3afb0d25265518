"""A kernel hub on 127.0.0.1: what kernelguard and the real `kernels` package ask for, and nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler

from sources.servers import Site

Files = Mapping[str, str | bytes]


class FakeHub:
    """Repositories with version branches, served by a `Site`."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._branches: dict[str, dict[str, str]] = {}
        self.url = site.url

    def publish(self, repository: str, variants: Mapping[str, Files], *, version: int = 1) -> str:
        """Put a commit with these variants on the branch of a version, moving it if it was elsewhere."""
        files = {
            f"build/{variant}/{path}": data.encode() if isinstance(data, str) else data
            for variant, content in variants.items()
            for path, data in content.items()
        }
        listing = sorted((path, hashlib.sha1(data).hexdigest()) for path, data in files.items())  # noqa: S324 - git's own
        commit = hashlib.sha1(json.dumps([repository, listing]).encode()).hexdigest()  # noqa: S324
        branches = self._branches.setdefault(repository, {})
        branches |= {f"v{version}": commit, "main": commit}
        api = f"/api/kernels/{repository}"
        refs = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": c} for n, c in branches.items()]
        self._json(f"{api}/refs", {"branches": refs, "converts": [], "tags": []})
        tree = [
            {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}  # noqa: S324
            for path, data in sorted(files.items())
        ]
        self._json(f"{api}/tree/{commit}", tree)
        folders = [{"type": "directory", "path": f"build/{v}", "size": 0, "oid": "0" * 40} for v in sorted(variants)]
        self._json(f"{api}/tree/{commit}/build", folders)
        for path, data in files.items():
            self._put(f"/kernels/{repository}/resolve/{commit}/{path}", data, commit)
        owner = repository.partition("/")[0]
        overview = {"name": owner, "fullname": owner, "trustedKernelPublisher": True}
        self._json(f"/api/organizations/{owner}/overview", overview)
        return commit

    def _json(self, path: str, value: object) -> None:
        self._site.put(path, json.dumps(value), "application/json")

    def _put(self, path: str, body: bytes, commit: str) -> None:
        """Files carry the headers that huggingface_hub insists on."""

        def respond(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.send_header("Content-Type", "application/octet-stream")
            handler.send_header("Content-Length", str(len(body)))
            handler.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')  # noqa: S324
            handler.send_header("X-Repo-Commit", commit)
            handler.end_headers()
            if handler.command == "GET":
                handler.wfile.write(body)

        self._site.special[path] = respond


def variant(
    name: str, variant_name: str, *, backend: str = "cuda", archs: tuple[str, ...] = (), version: int = 1
) -> Files:
    """The files of a small, real variant."""
    ident = hashlib.sha1(variant_name.encode()).hexdigest()[:7]  # noqa: S324
    metadata = {
        "id": f"_{name.replace('-', '_')}_{ident}",
        "name": name,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": list(archs)} if archs else {}),
    }
    return {"metadata.json": json.dumps(metadata), "__init__.py": f"WHICH = {variant_name!r}\n"}
