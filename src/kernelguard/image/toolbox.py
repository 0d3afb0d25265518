"""kernelguard for a container's Python, carried in when the container runs and never part of an image.

It is a folder that is run as `python -I FOLDER`: it puts itself on sys.path of that one process. Nothing is installed,
and the workers, which look at what the image has, never see it.
"""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kernelguard import data
from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.image.values import ContextFile
from kernelguard.lock.tools import make_tools

BOX = "/kernelguard-box"
"""Where it lies in the container."""
OLDEST = Version("3.11")
_DISTRIBUTION = "kernelguard-preflight"
_LEFT_OUT = frozenset({"huggingface-hub"})
"""Needed only to ask the hub, and there is no network in there."""
_MAIN = b"from kernelguard.image.inside import main\n\nmain()\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """The Python of a container, as far as a wheel can depend on it."""

    version: Version
    """major.minor."""
    machine: str
    glibc: Version


def toolbox(interpreter: Interpreter, cache: Path) -> tuple[ContextFile, ...]:
    """The files of the folder.

    Raises:
        UndeterminedError: that Python is too old for kernelguard, or its dependencies cannot be had for it.
    """
    if interpreter.version < OLDEST:
        raise UndeterminedError(
            f"the image's Python is {interpreter.version}; kernelguard needs {OLDEST} to look into an image",
            hint="run it where the image runs: kernelguard verify MODEL --python PATH, from an environment of its own",
        )
    here = Version(f"{sys.version_info.major}.{sys.version_info.minor}")
    same = interpreter.version == here and interpreter.machine == _machine()
    brought = tuple(_from_here() if same else _from_index(interpreter, cache))
    main = ContextFile(path="__main__.py", content=_MAIN, size=len(_MAIN))
    return (main, *_package(), *brought)


def _machine() -> str:
    import platform  # noqa: PLC0415

    return platform.machine()


def _package() -> Iterator[ContextFile]:
    """Kernelguard itself, with its data where an installed one has it."""
    package = data.package()
    for file in sorted(package.rglob("*")):
        below = file.relative_to(package)
        if file.is_file() and below.parts[0] != "_data":
            yield _file(f"kernelguard/{below.as_posix()}", file)
    for folder in (data.matrices(), data.docker()):
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                yield _file(f"kernelguard/_data/{folder.name}/{file.relative_to(folder).as_posix()}", file)


def _from_here() -> Iterator[ContextFile]:
    """What kernelguard needs, as it is installed here, with its bytecode."""
    for name in _closure():
        distribution = importlib.metadata.distribution(name)
        for entry in distribution.files or ():
            path = entry.as_posix()
            place = Path(str(distribution.locate_file(entry)))
            wanted = not path.startswith("..") and (".dist-info/" not in path or path.endswith("METADATA"))
            if wanted and place.is_file():
                yield _file(path, place)


def _closure() -> list[str]:
    """Every distribution that the core of kernelguard needs, without extras."""
    found: dict[str, None] = {}
    waiting = list(_requirements(_DISTRIBUTION))
    while waiting:
        name = waiting.pop()
        if name in found or name in _LEFT_OUT:
            continue
        found[name] = None
        waiting += _requirements(name)
    return sorted(found)


def _requirements(name: str) -> Iterator[str]:
    try:
        listed = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise UndeterminedError(
            f"{name} is not installed as a distribution here, so it cannot be carried into a container",
            hint="pip install kernelguard-preflight",
        ) from error
    for line in listed:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def _from_index(interpreter: Interpreter, cache: Path) -> Iterator[ContextFile]:
    """What kernelguard needs, as wheels for another Python or machine, fetched once."""
    wanted = [f"{name}=={importlib.metadata.version(name)}" for name in _closure()]
    version = f"{interpreter.version.major}.{interpreter.version.minor}"
    folder = cache / "toolbox" / f"{version}-{interpreter.machine}"
    stamp = folder / "complete"
    if not stamp.is_file() or stamp.read_text("utf-8") != "\n".join(wanted):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        platforms = [
            f"--platform=manylinux_2_{minor}_{interpreter.machine}" for minor in range(interpreter.glibc.minor, 16, -1)
        ]
        # Without --no-deps pip would look for what only this Python's versions need.
        try:
            make_tools(cache, Path(sys.executable)).run(
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                f"--python-version={version}",
                *platforms,
                f"--platform=manylinux2014_{interpreter.machine}",
                f"--dest={folder}",
                *wanted,
                timeout=600,
            )
        except ToolError as error:
            raise UndeterminedError(
                f"what kernelguard needs cannot be had for Python {version} on {interpreter.machine}: {error.message}",
                hint=f"run kernelguard itself with Python {version}, or give this machine a package index once",
            ) from error
        stamp.write_text("\n".join(wanted), "utf-8")
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith("/") and (".dist-info/" not in name or name.endswith("/METADATA")):
                    body = archive.read(name)
                    yield ContextFile(path=name, content=body, size=len(body))


def _file(path: str, place: Path) -> ContextFile:
    facts = place.stat()
    # Bytecode names its source's time.
    return ContextFile(path=path, source=place, size=facts.st_size, mtime=int(facts.st_mtime))


def interpreter_of(said: str) -> Interpreter:
    """What the one-line probe printed: `3.12 x86_64 2.36`."""
    version, machine, glibc = said.split()
    return Interpreter(version=Version(version), machine=machine, glibc=Version(glibc))


PROBE = (
    "import platform, sys; print('%d.%d' % sys.version_info[:2], platform.machine(), platform.libc_ver()[1] or '2.17')"
)
