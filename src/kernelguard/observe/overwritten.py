"""Which of NVIDIA's libraries did a second distribution overwrite, and is torch's own the one that is left?

The wheels for two CUDA majors (`nvidia-nccl-cu12`, `nvidia-nccl-cu13`) put different files at the same path, and no
installer minds: the last one wins, and the metadata of both stays.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kernelguard.observe.values import Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Overwritten:
    """A library that several distributions brought with different content."""

    path: str
    owners: tuple[str, ...]
    on_disk: tuple[str, ...]
    """Those whose content it has; empty: neither's."""
    wanted: tuple[str, ...]
    """Those that the installed torch requires."""


def overwritten_libraries(distributions: Mapping[str, Distribution]) -> tuple[Overwritten, ...]:
    """All of them; only files that two distributions claim are hashed."""
    claims: dict[tuple[str, str], dict[str, str]] = {}
    for name, distribution in sorted(distributions.items()):
        if name.startswith("nvidia-"):
            for path, digest in _libraries(distribution):
                claims.setdefault((distribution.location, path), {})[name] = digest
    contested = {key: owners for key, owners in claims.items() if len(set(owners.values())) > 1}
    if not contested:
        return ()
    required = set(_requirements(distributions.get("torch")))
    return tuple(
        Overwritten(
            path=path,
            owners=tuple(owners),
            on_disk=tuple(name for name, digest in owners.items() if digest == _digest(Path(location, path))),
            wanted=tuple(name for name in owners if name in required),
        )
        for (location, path), owners in sorted(contested.items())
    )


def _metadata_folder(distribution: Distribution) -> Path | None:
    for folder in Path(distribution.location).glob("*.dist-info"):
        name, _, version = folder.name.removesuffix(".dist-info").rpartition("-")
        if canonicalize_name(name) == distribution.name and version == distribution.version:
            return folder
    return None


def _libraries(distribution: Distribution) -> Iterator[tuple[str, str]]:
    folder = _metadata_folder(distribution)
    if folder is None or not (folder / "RECORD").is_file():
        return
    text = (folder / "RECORD").read_text(encoding="utf-8", errors="replace")
    for row in csv.reader(text.splitlines()):
        if len(row) > 1 and re.search(r"\.so(\.\d+)*$", row[0]) and row[1].startswith("sha256="):
            yield row[0], row[1].removeprefix("sha256=")


def _requirements(torch: Distribution | None) -> Iterator[str]:
    folder = None if torch is None else _metadata_folder(torch)
    if folder is None or not (folder / "METADATA").is_file():
        return
    head = (folder / "METADATA").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    for line in re.findall(r"^Requires-Dist:\s*(.+)$", head, re.MULTILINE):
        try:
            yield canonicalize_name(Requirement(line.strip()).name)
        except InvalidRequirement:
            continue


def _digest(file: Path) -> str:
    try:
        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").digest()
    except OSError:
        return ""  # no one's: gone, or not to be read
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
