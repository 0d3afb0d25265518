"""The files beside a lock: requirements.txt with hashes, pylock.toml (PEP 751), and what is built from source."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError
from kernelguard.lock.document import dumps, to_toml
from kernelguard.lock.values import Lock, Pin
from kernelguard.writing import write_file

REQUIREMENTS = "requirements.txt"
PYLOCK = "pylock.toml"
FROM_SOURCE = "requirements-source.txt"


def write_lock(lock: Lock, path: Path) -> tuple[Path, ...]:
    """Write the lock and the files beside it; each appears whole or not at all, the lock last.

    Raises:
        InputError: they cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror}", hint="-o FILE elsewhere") from error
    texts = {path.with_name(REQUIREMENTS): requirements(lock), path.with_name(PYLOCK): pylock(lock)}
    source = path.with_name(FROM_SOURCE)
    if lock.sources:
        texts[source] = from_source(lock)
    else:
        source.unlink(missing_ok=True)
    texts[path] = dumps(lock)
    for file, text in texts.items():
        write_file(file, text.encode())
    return tuple(texts)


def requirements(lock: Lock) -> str:
    """For `pip install --require-hashes -r`: one hash each, that of the very file that was chosen."""
    lines = ["# Written by `kernelguard lock`. To install: pip install --require-hashes --no-deps -r requirements.txt"]
    lines += [f"--extra-index-url {url}" for url in sorted({pin.index for pin in lock.pins if pin.index})]
    for pin in lock.pins:
        what = f"{pin.name} @ {pin.url}" if pin.direct else f"{pin.name}=={pin.version}"
        lines.append(f"{what} \\\n    --hash=sha256:{pin.sha256}")
    return "\n".join(lines) + "\n"


def from_source(lock: Lock) -> str:
    """What the image's build stage builds, after everything else is installed."""
    lines = [
        "# Build these after requirements.txt: pip install --no-build-isolation --no-deps -r requirements-source.txt"
    ]
    for pin in lock.sources:
        lines.append(f"# {pin.name}: nvcc {pin.nvcc}, C++{pin.cxx}, GPU archs {' '.join(pin.archs)}; {pin.archs_note}")
        if pin.requires:
            lines.append(f"# needs: {', '.join(pin.requires)}")
        if pin.commit:
            lines.append(f"{pin.name} @ {pin.url}")
        else:
            lines.append(f"{pin.name}=={pin.version} \\\n    --hash=sha256:{pin.sha256}")
    return "\n".join(lines) + "\n"


def pylock(lock: Lock) -> str:
    """The same as a PEP 751 file."""
    document = {
        "lock-version": "1.0",
        "requires-python": f"=={lock.target.python}.*",
        "created-by": "kernelguard",
        "packages": [_package(pin) for pin in lock.pins],
    }
    return "".join(to_toml(document))


def _package(pin: Pin) -> dict[str, Any]:
    file = {"url": pin.url, **({"size": pin.size} if pin.size is not None else {}), "hashes": {"sha256": pin.sha256}}
    if pin.direct:
        return {"name": pin.name, "version": pin.version, "archive": file}
    index = {"index": pin.index} if pin.index else {}
    return {"name": pin.name, "version": pin.version, **index, "wheels": [{"name": pin.filename, **file}]}


def file_name_of(url: str) -> str:
    """The last part of a URL, decoded."""
    return urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])


def recipe(lock_name: str = "kernelguard.lock") -> Iterator[str]:
    """The two lines that put a lock into an image of one's own."""
    yield f"COPY {lock_name} {REQUIREMENTS} ./"
    yield f"RUN kernelguard sync {lock_name} --python $(command -v python)"
