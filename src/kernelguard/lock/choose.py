"""Which one file of this version goes to this platform? Of all that are listed, the very one that pip would take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from kernelguard.lock.compile import Platform
from kernelguard.sources.index import IndexFile

_OLDEST_GLIBC_MINOR = 5
_LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def platform_tags(platform: Platform) -> tuple[str, ...]:
    """Wheel platform tags that load there, the most specific first, as pip orders them."""
    tags = []
    for minor in range(platform.glibc.minor, _OLDEST_GLIBC_MINOR - 1, -1):
        tags.append(f"manylinux_2_{minor}_{platform.machine}")
        if minor in _LEGACY:
            tags.append(f"{_LEGACY[minor]}_{platform.machine}")
    return (*tags, f"linux_{platform.machine}")


def supported_tags(platform: Platform) -> tuple[Tag, ...]:
    """All tags that an interpreter there accepts, best first."""
    python = (platform.python.major, platform.python.minor)
    platforms = platform_tags(platform)
    return (
        *cpython_tags(python, platforms=platforms),
        *compatible_tags(python, interpreter=f"cp{python[0]}{python[1]}", platforms=platforms),
    )


def choose_file(
    files: Iterable[IndexFile], *, name: str, version: str, hashes: frozenset[str], tags: Sequence[Tag]
) -> IndexFile | None:
    """The best wheel of exactly this version whose hash is one of `hashes` (if there are any); None: there is none."""
    order = {tag: position for position, tag in enumerate(tags)}
    ranked = []
    for file, wheel_version, wheel_tags in _wheels(files, name):
        if wheel_version != Version(version) or (hashes and file.sha256 not in hashes):
            continue
        places = [order[tag] for tag in wheel_tags if tag in order]
        if places:
            ranked.append((min(places), file.filename, file.url, file))
    return min(ranked)[3] if ranked else None


def _wheels(files: Iterable[IndexFile], name: str) -> Iterator[tuple[IndexFile, Version, frozenset[Tag]]]:
    for file in files:
        try:
            distribution, version, _, tags = parse_wheel_filename(file.filename)
        except (InvalidWheelFilename, InvalidVersion):
            continue
        if canonicalize_name(distribution) == canonicalize_name(name):
            yield file, version, tags
