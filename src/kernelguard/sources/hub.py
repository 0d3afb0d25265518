"""Which build variants does a kernel hub repository have at a version, and which bytes are in them?"""

from __future__ import annotations

import hashlib
import json
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from kernelguard.errors import UndeterminedError
from kernelguard.sources.http import Http, MissingError
from kernelguard.sources.values import BuiltFor, Candidate, Kind, Known

_FILE_LIMIT = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a variant."""

    path: str
    """Below the variant's folder."""
    sha256: str
    size: int


class Hub:
    """A kernel hub, as far as kernelguard asks it."""

    def __init__(self, endpoint: str, http: Http) -> None:
        self._endpoint = endpoint.rstrip("/")
        self._http = http

    @property
    def name(self) -> str:
        """`kernel hub`."""
        return "kernel hub"

    def commits(self, repository: str) -> Mapping[int, str]:
        """Version -> the commit that its branch `v<n>` is at now; empty: there is no such repository.

        Raises:
            UndeterminedError: the hub does not answer, or not in a way that can be used.
        """
        try:
            document = self._json(f"/api/kernels/{repository}/refs")
        except MissingError:
            return {}
        found = {}
        for branch in document.get("branches", []):
            shape = re.fullmatch(r"v(\d+)", str(branch.get("name", "")))
            if shape is not None:
                found[int(shape[1])] = str(branch["targetCommit"])
        return found

    def variants(self, repository: str, commit: str) -> tuple[str, ...]:
        """Names of the folders below `build/` at a commit."""
        rows = self._json(f"/api/kernels/{repository}/tree/{commit}/build?recursive=false&expand=false")
        return tuple(sorted(row["path"].rpartition("/")[2] for row in rows if row.get("type") == "directory"))

    def archs(self, repository: str, commit: str, variant: str) -> tuple[str, ...] | None:
        """GPU archs that a variant's metadata.json declares; None: it declares none."""
        try:
            body = self._http.get(self._file(repository, commit, f"build/{variant}/metadata.json"), keep=True).body
        except MissingError:
            return None
        backend = _parsed(body, f"{repository} {variant} metadata.json").get("backend", {})
        archs = backend.get("archs") if isinstance(backend, dict) else None
        return tuple(map(str, archs)) if archs else None

    def files(self, repository: str, commit: str, variant: str) -> tuple[HubFile, ...]:
        """Every file of a variant with its digest. Large ones have it listed, the others are fetched and hashed."""
        prefix = f"build/{variant}/"
        return tuple(
            HubFile(
                path=row["path"].removeprefix(prefix), sha256=self._digest(repository, commit, row), size=row["size"]
            )
            for row in self._tree(repository, commit)
            if row.get("type") == "file" and row["path"].startswith(prefix)
        )

    def fetch(self, repository: str, commit: str, variant: str, file: HubFile) -> bytes:
        """The bytes of one file, which have the digest that was pinned.

        Raises:
            UndeterminedError: they do not.
        """
        body = self._http.get(
            self._file(repository, commit, f"build/{variant}/{file.path}"), limit=max(file.size, 1), keep=False
        ).body
        digest = hashlib.sha256(body).hexdigest()
        if digest != file.sha256:
            raise UndeterminedError(
                f"{repository} {commit[:12]} {variant}/{file.path}: sha256 {digest} came, {file.sha256} is pinned"
            )
        return body

    def _digest(self, repository: str, commit: str, row: Mapping[str, Any]) -> str:
        lfs = row.get("lfs")
        if isinstance(lfs, dict) and re.fullmatch(r"[0-9a-f]{64}", str(lfs.get("oid", ""))):
            return str(lfs["oid"])
        body = self._http.get(self._file(repository, commit, row["path"]), limit=_FILE_LIMIT).body
        return hashlib.sha256(body).hexdigest()

    def _tree(self, repository: str, commit: str) -> Iterator[Mapping[str, Any]]:
        rows = self._json(f"/api/kernels/{repository}/tree/{commit}?recursive=true&expand=false")
        return iter(sorted(rows, key=lambda row: str(row["path"])))

    def _file(self, repository: str, commit: str, path: str) -> str:
        return f"{self._endpoint}/kernels/{repository}/resolve/{commit}/{urllib.parse.quote(path)}"

    def _json(self, path: str) -> Any:
        answer = self._http.get(f"{self._endpoint}{path}")
        return _parsed(answer.body, path)


def _parsed(body: bytes, what: str) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise UndeterminedError(f"the kernel hub's answer about {what} is no JSON: {error}") from error


class HubSource:
    """Build variants of hub repositories as candidates; a repository's id takes the place of a distribution name."""

    def __init__(self, hub: Hub, *, versions: Mapping[str, int | None], wanted: Callable[[str], bool]) -> None:
        """`versions`: which version of a repository to look at (None: the newest); `wanted`: whose metadata to read."""
        self._hub = hub
        self._versions = versions
        self._wanted = wanted

    @property
    def name(self) -> str:
        """`kernel hub`."""
        return self._hub.name

    def find(self, distribution: str) -> tuple[Candidate, ...]:
        """See `Source`. All variants of one version: the resolver decides as `kernels` would."""
        if distribution not in self._versions:
            return ()
        commits = self._hub.commits(distribution)
        version = self._versions[distribution]
        version = max(commits, default=None) if version is None else version
        if version is None or version not in commits:
            return ()
        commit = commits[version]
        return tuple(
            Candidate(
                distribution=distribution,
                version=Version(str(version)),
                kind=Kind.HUB,
                source=self.name,
                known=Known.SEEN,
                filename=variant,
                commit=commit,
                built_for=BuiltFor(
                    archs=self._hub.archs(distribution, commit, variant) if self._wanted(variant) else None
                ),
                evidence=f"branch v{version} of {distribution} is at {commit}",
            )
            for variant in self._hub.variants(distribution, commit)
        )
