"""What source builds need on this machine first: sdists, git trees at a commit, and wheels of their build tools."""

from __future__ import annotations

import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.image.context import walk
from kernelguard.image.fetch import Wanted, place_of
from kernelguard.image.values import ContextFile
from kernelguard.lock.files import file_name_of
from kernelguard.lock.tools import make_tools, run
from kernelguard.lock.values import Lock, SourcePin

_GIT_S = 1800.0


def source_files(lock: Lock, cache: Path, *, fetched: bool) -> tuple[tuple[str, tuple[ContextFile, ...]], ...]:
    """Place below `sources/` and files of each source build.

    An sdist need not be there yet; a git tree is fetched when `fetched`, and else left out.

    Raises:
        UndeterminedError: a repository does not answer.
        ToolError: git failed.
    """
    return tuple(
        (f"{number}-{pin.name}", _files(pin, cache, fetched=fetched)) for number, pin in enumerate(lock.sources)
    )


def _files(pin: SourcePin, cache: Path, *, fetched: bool) -> tuple[ContextFile, ...]:
    if not pin.commit:
        name = file_name_of(pin.url)
        place = place_of(Wanted(url=pin.url, filename=name, sha256=pin.sha256), cache)
        return (ContextFile(path=name, source=place, sha256=pin.sha256),)
    tree = cache / "git" / pin.commit
    if fetched and not (tree / "complete").is_file():
        _clone(pin, tree)
    return walk(tree / "tree")[0] if (tree / "complete").is_file() else ()


def _clone(pin: SourcePin, tree: Path) -> None:
    """A repository at a commit, with its submodules; git itself holds both against their digests."""
    url = pin.url.removeprefix("git+").rpartition("@")[0]
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=tree.parent) as folder:
        place = Path(folder, "tree")

        def git(*arguments: str) -> str:
            return run(["git", "-C", str(place), *arguments], timeout=_GIT_S, env={"GIT_TERMINAL_PROMPT": "0"})

        place.mkdir()
        try:
            git("init", "--quiet")
            git("fetch", "--quiet", "--depth=1", url, pin.commit)
            git("checkout", "--quiet", "FETCH_HEAD")
            git("submodule", "update", "--init", "--recursive", "--depth=1")
        except ToolError as error:
            raise UndeterminedError(
                f"{pin.name} at {pin.commit} cannot be fetched from {url}: {error.message}",
                hint="does this machine reach it, and does it still have that commit?",
            ) from error
        found = git("rev-parse", "HEAD").strip()
        if found != pin.commit:
            raise ToolError(f"{url} gave {found} when asked for {pin.commit}", hint="do not build from it")
        for inner in place.rglob(".git"):
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        shutil.rmtree(tree, ignore_errors=True)
        Path(folder, "complete").touch()
        shutil.copytree(folder, tree)


def tool_files(lock: Lock, cache: Path) -> tuple[ContextFile, ...]:
    """Wheels of everything that the source builds require and the lock does not have, each with its hash.

    They are needed only in the stage that builds, and are not part of the image.

    Raises:
        UndeterminedError: the package index cannot be asked.
    """
    locked = {pin.name for pin in lock.pins}
    if not lock.sources:
        return ()
    required = {text for pin in lock.sources for text in (*pin.requires, "setuptools", "wheel")}
    wanted = sorted(text for text in required if canonicalize_name(Requirement(text).name) not in locked)
    key = hashlib.sha256("\n".join([lock.target.python, lock.target.machine, *wanted]).encode()).hexdigest()[:16]
    folder = cache / "build-tools" / key
    if not (folder / "complete").is_file():
        _download(wanted, lock, folder, cache)
    return tuple(
        ContextFile(
            path=f"tools/{wheel.name}",
            source=wheel,
            sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
            size=wheel.stat().st_size,
        )
        for wheel in sorted(folder.glob("*.whl"))
    )


def _download(wanted: list[str], lock: Lock, folder: Path, cache: Path) -> None:
    glibc = Version(lock.target.glibc)
    platforms = [f"--platform=manylinux_2_{minor}_{lock.target.machine}" for minor in range(glibc.minor, 16, -1)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        make_tools(cache, Path(sys.executable)).run(
            "pip",
            "download",
            "--quiet",
            "--only-binary=:all:",
            f"--python-version={lock.target.python}",
            *platforms,
            f"--platform=manylinux2014_{lock.target.machine}",
            f"--dest={folder}",
            *wanted,
        )
    except ToolError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise UndeterminedError(
            f"what the source builds require cannot be had: {error.message}", hint="is the package index up?"
        ) from error
    (folder / "complete").touch()
