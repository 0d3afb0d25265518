"""Which files of a distribution does a package index have? PEP 691 (JSON), else PEP 503 (HTML)."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from kernelguard.errors import UndeterminedError
from kernelguard.sources.http import Answer, Http, MissingError, shown
from kernelguard.sources.metadata import read_metadata
from kernelguard.sources.names import built_for, read_file_name
from kernelguard.sources.values import BuiltFor, Candidate, Kind, Known

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_NEWEST_RELEASES = 3
"""Of how many releases the metadata is read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFile:
    """One file that an index lists."""

    filename: str
    url: str
    sha256: str = ""
    requires_python: str = ""
    yanked: str = ""
    """The reason; empty: not yanked."""
    size: int | None = None
    has_metadata: bool = False
    uploaded: str = ""


class IndexSource:
    """A package index. `extra`: one that the user named by URL, whose pins have to name it again."""

    def __init__(
        self,
        url: str,
        http: Http,
        *,
        label: str = "package index",
        extra: bool = False,
        compiled: Collection[str] = (),
        needs_metadata: Callable[[str, str], bool] = lambda _distribution, _version: True,
    ) -> None:
        """`compiled`: distributions built against torch; `needs_metadata`: whether it is unknown what this requires."""
        self._url = url.rstrip("/")
        self._http = http
        self._label = label
        self._extra = extra
        self._compiled = frozenset(compiled)
        self._needs_metadata = needs_metadata

    @property
    def name(self) -> str:
        """`package index`, or the URL of an extra one."""
        return self._label if not self._extra else f"index {shown(self._url)}"

    @property
    def url(self) -> str:
        """Where it is, without a slash at the end."""
        return self._url

    def files(self, distribution: str) -> tuple[IndexFile, ...]:
        """Every file that the index lists; empty: it does not have that distribution.

        Raises:
            UndeterminedError: it does not answer, or with something that is no index page.
        """
        url = f"{self._url}/{canonicalize_name(distribution)}/"
        try:
            answer = self._fetch(url)
        except MissingError:
            return ()
        if answer.content_type in {_JSON, "application/json"}:
            return tuple(_from_json(answer, url))
        return tuple(_from_html(answer, url))

    def _fetch(self, url: str) -> Answer:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme != "file":
            return self._http.get(url, headers={"Accept": _ACCEPT})
        folder = Path(urllib.parse.unquote(parts.path))
        if not folder.is_dir():
            raise MissingError(f"{url} does not exist")
        page = folder / "index.html"
        text = page.read_bytes() if page.is_file() else _listing(folder)
        return Answer(status=200, headers={"content-type": "text/html"}, body=text, url=url)

    def find(self, distribution: str) -> tuple[Candidate, ...]:
        """See `Source`."""
        found = [c for f in self.files(distribution) if (c := self._candidate(distribution, f)) is not None]
        newest = sorted({c.version for c, _ in found if c.kind is Kind.WHEEL}, reverse=True)[:_NEWEST_RELEASES]
        read: dict[str, tuple[Requirement, ...]] = {}
        result = []
        for candidate, file in sorted(found, key=lambda pair: pair[0].filename):
            version = str(candidate.version)
            wanted = candidate.kind is Kind.WHEEL and candidate.version in newest and candidate.built_for is None
            if wanted and self._needs_metadata(distribution, version):
                if version not in read:
                    read[version] = self._requires(file)
                result.append(dataclasses.replace(candidate, requires=read[version]))
            else:
                result.append(candidate)
        return tuple(result)

    def _requires(self, file: IndexFile) -> tuple[Requirement, ...]:
        metadata = read_metadata(file.url, self._http, promised=file.has_metadata)
        return requirements(metadata.requires)

    def _candidate(self, distribution: str, file: IndexFile) -> tuple[Candidate, IndexFile] | None:
        name = read_file_name(file.filename)
        if name is None or name.distribution != canonicalize_name(distribution):
            return None
        try:
            requires_python = SpecifierSet(file.requires_python) & name.python_floor
        except InvalidSpecifier:
            requires_python = name.python_floor
        made = built_for(name.version)
        if made is None and not name.sdist and not name.pure and name.distribution in self._compiled:
            made = BuiltFor()
        candidate = Candidate(
            distribution=name.distribution,
            version=name.version,
            kind=Kind.SDIST if name.sdist else Kind.WHEEL,
            source=self.name,
            known=Known.SEEN,
            filename=file.filename,
            url=file.url,
            index_url=f"{self._url}/" if self._extra else "",
            sha256=file.sha256,
            size=file.size,
            pythons=name.pythons,
            machines=name.machines,
            glibc=name.glibc,
            built_for=made,
            requires_python=requires_python,
            yanked=file.yanked,
            needs_nvcc=name.sdist and name.distribution in self._compiled,
            evidence=f"listed by {self.name}",
        )
        return candidate, file


def requirements(lines: tuple[str, ...]) -> tuple[Requirement, ...]:
    """Requires-Dist lines that hold without an extra; what is no requirement is left to pip."""
    found = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or "extra" not in str(requirement.marker):
            found.append(requirement)
    return tuple(found)


def _from_json(answer: Answer, url: str) -> Iterator[IndexFile]:
    try:
        document = json.loads(answer.body)
        version = document.get("meta", {}).get("api-version", "1.0")
        files = [_json_file(row, answer.url) for row in document["files"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UndeterminedError(f"{shown(url)} is no PEP 691 document: {type(error).__name__}: {error}") from error
    if not str(version).startswith("1."):
        raise UndeterminedError(f"{shown(url)} speaks version {version} of the simple API; 1.x is understood")
    yield from files


def _json_file(row: Mapping[str, Any], base: str) -> IndexFile:
    yanked = row.get("yanked", False)
    return IndexFile(
        filename=row["filename"],
        url=urllib.parse.urljoin(base, row["url"]),
        sha256=row.get("hashes", {}).get("sha256", ""),
        requires_python=row.get("requires-python") or "",
        yanked="" if yanked is False else str(yanked) if isinstance(yanked, str) and yanked else "no reason given",
        size=row.get("size"),
        has_metadata=bool(row.get("core-metadata") or row.get("data-dist-info-metadata")),
        uploaded=(row.get("upload-time") or "")[:10],
    )


def _from_html(answer: Answer, url: str) -> Iterator[IndexFile]:
    page = _Anchors()
    page.feed(answer.body.decode("utf-8", "replace"))
    files = [f for attributes in page.anchors if (f := _html_file(attributes, answer.url)) is not None]
    if not files and not page.index_version:
        raise UndeterminedError(
            f"{shown(url)} is no page of a package index: {answer.content_type or 'something'} that lists no files",
            hint="the URL of an index ends where the names of its packages begin, often in /simple",
        )
    yield from files


class _Anchors(HTMLParser):
    """The links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: list[dict[str, str]] = []
        self.index_version = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect one link."""
        attributes = {name: value or "" for name, value in attrs}
        if tag == "a" and "href" in attributes:
            self.anchors.append(attributes)
        elif tag == "meta" and attributes.get("name") == "pypi:repository-version":
            self.index_version = attributes.get("content", "")


def _html_file(attributes: Mapping[str, str], base: str) -> IndexFile | None:
    url = urllib.parse.urljoin(base, attributes["href"])
    plain, _, fragment = url.partition("#")
    filename = urllib.parse.unquote(urllib.parse.urlsplit(plain).path.rpartition("/")[2])
    if read_file_name(filename) is None:
        return None
    digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
    return IndexFile(
        filename=filename,
        url=plain,
        sha256=digest,
        requires_python=attributes.get("data-requires-python", ""),
        yanked=(attributes.get("data-yanked") or "no reason given") if "data-yanked" in attributes else "",
        has_metadata=bool(attributes.get("data-core-metadata") or attributes.get("data-dist-info-metadata")),
    )


def _listing(folder: Path) -> bytes:
    links = "".join(f'<a href="{urllib.parse.quote(p.name)}">{p.name}</a>\n' for p in sorted(folder.iterdir()))
    return f'<meta name="pypi:repository-version" content="1.0">{links}'.encode()
