"""Where is the transformers source, and which release is it? Found and fetched without importing it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from kernelguard.declare.values import TransformersTree
from kernelguard.errors import InputError, UndeterminedError

OLDEST = Version("4.57")
NEWEST_READ = Version("5.24.0")
"""The newest release whose source the tests of this room compare with the imported modules."""
DOWNLOAD_TIMEOUT_S = 300
_VERSION = re.compile(r"""^__version__\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_HEAD_BYTES = 256 * 1024


def find_tree(path: Path, *, origin: str = "path") -> TransformersTree:
    """Finds transformers at `path`: its own folder, or one that holds `transformers/` or `src/transformers/`.

    Raises:
        InputError: There is none, its version cannot be told, or it is older than 4.57.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist.", hint="give the folder of transformers, or a version such as 5.24.0")
    tried = [path, path / "transformers", path / "src" / "transformers"]
    for pattern in ("lib/python3*/site-packages/transformers", "lib64/python3*/site-packages/transformers"):
        tried += sorted(path.glob(pattern))
    for root in tried:
        if (root / "models").is_dir() and (root / "__init__.py").is_file():
            return TransformersTree(
                root=root.resolve(), version=_supported(_version_of(root), str(root)), origin=origin
            )
    raise InputError(
        f"{path} is not and does not hold a transformers source tree: no folder transformers/models was found in it.",
        hint="give site-packages, the transformers folder in it, or a version such as 5.24.0",
    )


def parse_version(text: str) -> Version:
    """A version given by a person.

    Raises:
        InputError: It is no version, or an unsupported one.
    """
    try:
        version = Version(text)
    except InvalidVersion as error:
        raise InputError(
            f"{text[:80]!r} is neither a folder nor a version of transformers.", hint="a version looks like 5.24.0"
        ) from error
    return _supported(version, f"transformers {version}")


def tree_of_version(version: str, cache_dir: Path) -> TransformersTree:
    """The source of a released version, from `cache_dir` or else from the wheel that pip downloads.

    Raises:
        InputError: No such version exists, or it is unsupported.
        UndeterminedError: It is not cached, and the package index cannot be reached.
    """
    wanted = parse_version(version)
    folder = cache_dir / f"transformers-{wanted}"
    if not (folder / "transformers" / "models").is_dir():
        _fetch(wanted, folder)
    return TransformersTree(root=(folder / "transformers").resolve(), version=wanted, origin="wheel")


def _fetch(version: Version, folder: Path) -> None:
    """Makes `folder` with the wheel's Python files; it appears whole or not at all."""
    import shutil  # noqa: PLC0415 - together with the imports below 20 ms that a cached or installed tree does not need
    import tempfile  # noqa: PLC0415

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise UndeterminedError(
            f"The cache folder {folder.parent} cannot be written: {error.strerror}.", hint="give another cache folder"
        ) from error
    try:
        wheel = _download(version, work)
        _unpack(wheel, work / "tree")
        try:
            (work / "tree").rename(folder)
        except OSError:
            # Another process was faster; a folder that is there is complete: it is only ever renamed into place.
            if not (folder / "transformers" / "models").is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _download(version: Version, into: Path) -> Path:
    import subprocess  # noqa: PLC0415

    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--disable-pip-version-check",
    ]
    command += ["--progress-bar=off", "--retries=1", "--timeout=15", "-d", str(into), f"transformers=={version}"]
    hint = (
        f"where there is a network run: pip download --no-deps transformers=={version}; unzip it and give that folder"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise UndeterminedError(
            f"Downloading transformers {version} took more than {DOWNLOAD_TIMEOUT_S} s.", hint=hint
        ) from error
    wheels = sorted(into.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    listed = re.search(r"\(from versions: ([^)]*)\)", done.stderr)
    if listed and listed.group(1).strip() not in {"", "none"}:
        known = [text.strip() for text in listed.group(1).split(",")]
        raise InputError(
            f"transformers {version} was never released.", hint=f"the nearest release is {_nearest(version, known)}"
        )
    if "No module named pip" in done.stderr:
        raise UndeterminedError(f"transformers {version} is not cached, and {sys.executable} has no pip.", hint=hint)
    raise UndeterminedError(
        f"transformers {version} is not cached, and pip could not download it: {_last_line(done.stderr)}", hint=hint
    )


def _unpack(wheel: Path, into: Path) -> None:
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            if member.filename.startswith("transformers/") and member.filename.endswith(".py"):
                archive.extract(member, into)


def _nearest(version: Version, known: list[str]) -> str:
    """The release of the same minor version that is closest, else the newest before it."""
    releases = []
    for text in known:
        try:
            releases.append(Version(text))
        except InvalidVersion:
            continue
    same = [r for r in releases if r.release[:2] == version.release[:2] and not r.is_prerelease]
    if same:
        return str(max(same))
    older = [r for r in releases if r < version and not r.is_prerelease]
    if older:
        return str(max(older))
    return str(min(releases, default=NEWEST_READ))


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("WARNING")]
    # pip shows index URLs, which may hold credentials.
    return re.sub(r"//[^/@\s]+@", "//***@", lines[-1])[:300] if lines else "it gave no reason"


def _version_of(root: Path) -> Version:
    """`__version__` of `__init__.py`, else the version of the installed distribution beside it."""
    with (root / "__init__.py").open("rb") as handle:
        head = handle.read(_HEAD_BYTES).decode("utf-8", errors="replace")
    found = _VERSION.search(head)
    texts = [found.group(1)] if found else []
    texts += [
        p.name.removesuffix(".dist-info").split("-")[1] for p in sorted(root.parent.glob("transformers-*.dist-info"))
    ]
    for text in texts:
        try:
            return Version(text)
        except InvalidVersion:
            continue
    raise InputError(
        f"The version of the transformers at {root} cannot be told: __init__.py has no __version__.",
        hint="install it properly, or give a version such as 5.24.0",
    )


def _supported(version: Version, what: str) -> Version:
    # A development version of 4.57 sorts before it, hence the comparison of releases.
    if version.release[:2] < OLDEST.release[:2]:
        raise InputError(
            f"{what} is version {version}; the oldest that kernelguard reads is {OLDEST}.",
            hint=f"pip install 'transformers>={OLDEST}'",
        )
    return version


__all__ = ["NEWEST_READ", "OLDEST", "find_tree", "parse_version", "tree_of_version"]
