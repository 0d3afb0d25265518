"""What does a wheel's own RECORD say about each of its files? One digest of it pins the installed files too."""

from __future__ import annotations

import base64
import binascii
import csv
import hashlib
import io
import re
import urllib.parse
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from kernelguard.errors import UndeterminedError
from kernelguard.sources.folder import read_wheel_metadata
from kernelguard.sources.http import Http
from kernelguard.sources.metadata import read_members, read_metadata

# What installing adds or rewrites, so that it cannot be compared with the wheel.
_WRITTEN_BY_INSTALLERS = re.compile(
    r"(^|/)[^/]+\.dist-info/(RECORD|INSTALLER|REQUESTED|direct_url\.json|uv_cache\.json|uv_build\.json)$"
    r"|\.pyc$|(^|/)__pycache__/|\.data/scripts/|^\.\./|^/"
)


def record_digest(rows: Iterable[tuple[str, str]]) -> str:
    """One sha256 over (path, sha256 as hex) of every file that installing leaves as it is."""
    lines = sorted(f"{path} {digest}\n" for path, digest in rows if digest and not _WRITTEN_BY_INSTALLERS.search(path))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def parse_record(text: str) -> Iterator[tuple[str, str]]:
    """(path, sha256 as hex) of each line of a RECORD; an empty digest where it has none."""
    for row in csv.reader(io.StringIO(text)):
        if len(row) < 2:
            continue
        algorithm, _, encoded = row[1].partition("=")
        digest = ""
        if algorithm == "sha256":
            try:
                digest = base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()
            except (binascii.Error, ValueError):
                # Kept as it is: it will equal no file.
                digest = encoded
        yield row[0], digest


def digest_of_wheel(url: str, http: Http) -> str:
    """`record_digest` of a wheel at a file or web URL; empty: it has no RECORD.

    Raises:
        UndeterminedError: it cannot be read.
    """
    path = _local(url)
    if path is None:
        text = read_members(url, http, (".dist-info/RECORD",))[".dist-info/RECORD"]
    else:
        text = _member(path, ".dist-info/RECORD")
    return record_digest(parse_record(text)) if text else ""


def wheel_version(url: str, http: Http) -> str:
    """The version that a wheel's own metadata gives, which its file name may disagree with."""
    path = _local(url)
    if path is not None:
        return str(read_wheel_metadata(path)["Version"])
    return read_metadata(url, http, promised=False).version


def _local(url: str) -> Path | None:
    parts = urllib.parse.urlsplit(url)
    return Path(urllib.parse.unquote(parts.path)) if parts.scheme == "file" else None


def _member(path: Path, ending: str) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            mine = [n for n in archive.namelist() if n.endswith(ending)]
            return archive.read(min(mine, key=len)).decode("utf-8", "replace") if mine else None
    except (zipfile.BadZipFile, zlib.error, OSError) as error:
        raise UndeterminedError(f"{path} cannot be read: {error}") from error
