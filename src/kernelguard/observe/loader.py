"""What would this machine's loader find beside torch's own libraries? Files are read; nothing is loaded."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from kernelguard.observe.elf import ElfFacts
from kernelguard.observe.values import Environment

_CACHE = Path("/etc/ld.so.cache")
_DEFAULTS = ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu")
_GLIBCXX = re.compile(rb"GLIBCXX_(\d+\.\d+(?:\.\d+)?)\0")


def libraries_found(environment: Environment, name: str, wanted_by: ElfFacts | None = None) -> tuple[Path, ...]:
    """Every file that the loader could take for the library `name`, in its order; torch's own are left out.

    Args:
        environment: a live one.
        name: its soname, `libcudart.so.12`.
        wanted_by: the extension that asks, which may say itself where to look.
    """
    candidates = (Path(folder, name) for folder in _folders(environment, wanted_by))
    return tuple(dict.fromkeys(path for path in (*candidates, *_cached(name)) if path.is_file()))


def newest_libstdcxx(environment: Environment) -> Version | None:
    """The newest GLIBCXX version that any libstdc++ here defines; None: there is none, or none could be read."""
    found: list[Version] = []
    for library in libraries_found(environment, "libstdc++.so.6"):
        try:
            found += (Version(number.decode()) for number in _GLIBCXX.findall(library.read_bytes()))
        except OSError:
            # Another one may be readable; with none the answer is None, which is "not known".
            continue
    return max(found, default=None)


def _folders(environment: Environment, wanted_by: ElfFacts | None) -> Iterator[str]:
    if wanted_by is not None:
        for folder in wanted_by.search_path:
            yield re.sub(r"\$ORIGIN|\$\{ORIGIN\}", lambda _: os.fspath(Path(wanted_by.path).parent), folder)
    yield from filter(None, environment.variables.get("LD_LIBRARY_PATH", "").split(":"))
    if environment.executable is not None:
        # A conda interpreter brings its own, and finds it by its run path.
        yield os.fspath(Path(environment.executable).resolve().parent.parent / "lib")
    yield from _DEFAULTS


def _cached(name: str) -> Iterator[Path]:
    """What `ldconfig` listed; the cache holds its paths as plain strings."""
    try:
        content = _CACHE.read_bytes()
    except OSError:
        return
    for found in re.findall(rb"(/[^\0]*/" + re.escape(name.encode()) + rb")\0", content):
        yield Path(os.fsdecode(found))
