"""A base image out of this machine's own files: a Python, a C compiler, a shell. No registry, no network, seconds."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
_PACKAGES = (
    "dash",
    "coreutils",
    "grep",
    "sed",
    "passwd",
    "libc-bin",
    "libc6",
    "gcc",
    "gcc-12",
    "cpp-12",
    "g++",
    "g++-12",
    "libgcc-12-dev",
    "libstdc++-12-dev",
    "binutils",
    "binutils-x86-64-linux-gnu",
    "libc6-dev",
    "linux-libc-dev",
)
_COMPILER = ("gcc", "g++", "cpp", "binutils", "libgcc", "libstdc", "libc6-dev", "linux-libc-dev")
_LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
_UNWANTED = re.compile(
    r"/share/(doc|man|locale|info|lintian|bug)/|(?<!/libgcc)(?<!_nonshared)\.a$"
    r"|/(x86_64-linux-gnu-)?(lto1|lto-wrapper|g\+\+-mapper-server|ld\.gold|dwp|lto-dump-12)$"
    r"|/lib[at]san|/gconv/|/lib[lu]bsan|/gprofng"
)


def base_tar(*, compiler: bool = True) -> bytes:
    """The root file system of a base image. Without a compiler it is what makes Triton fail late."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for folder in ("usr", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "usr/local", "usr/local/bin", "etc"):
            _folder(archive, folder, 0o755)
        for name, target in _LINKS.items():
            _link(archive, name, target)
        for name, target in (
            ("usr/bin/sh", "dash"),
            ("etc/alternatives/cc", "/usr/bin/gcc"),
            ("etc/alternatives/c++", "/usr/bin/g++"),
        ):
            if compiler or name.endswith("sh"):
                _link(archive, name, target)
        if compiler:
            _link(archive, "usr/bin/cc", "/etc/alternatives/cc")
            _link(archive, "usr/bin/c++", "/etc/alternatives/c++")
        for place, text in (
            ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n"),
            ("etc/group", "root:x:0:\n"),
            ("etc/shadow", "root:*:19000:0:99999:7:::\n"),
            ("etc/gshadow", "root:*::\n"),
            ("etc/nsswitch.conf", "passwd: files\ngroup: files\n"),
            ("etc/login.defs", "UID_MIN 1000\nUID_MAX 60000\nGID_MIN 1000\nGID_MAX 60000\nUSERGROUPS_ENAB yes\n"),
        ):
            _text(archive, place, text)
        for folder, mode in (
            ("tmp", 0o1777),
            ("root", 0o700),
            ("home", 0o755),
            ("etc/skel", 0o755),
            ("var/tmp", 0o1777),
        ):
            _folder(archive, folder, mode)
        packages = [p for p in _PACKAGES if compiler or not p.startswith(_COMPILER)]
        done = set(archive.getnames())
        files = list(dict.fromkeys(_of_packages(packages)))
        for place in [*files, *libraries([*files, *_python_binaries()])]:
            if not place.is_relative_to(sys.base_prefix):
                _add(archive, place, _merged(place), done)
        _add_python(archive, done)
    return out.getvalue()


def _add_python(archive: tarfile.TarFile, done: set[str]) -> None:
    prefix = Path(sys.base_prefix)
    for top in (prefix / "lib" / PYTHON, prefix / "include" / PYTHON):
        for folder, folders, names in os.walk(top):
            folders[:] = [f for f in folders if f not in {"test", "idlelib", "tkinter", "site-packages"}]
            for name in names:
                place = Path(folder, name)
                if place.suffix != ".a":
                    _add(archive, place, f"usr/local/{place.relative_to(prefix)}", done)
    _add(archive, (prefix / "bin" / PYTHON).resolve(), f"usr/local/bin/{PYTHON}", done)
    for name in ("python3", "python"):
        _link(archive, f"usr/local/bin/{name}", PYTHON)
    for library in (prefix / "lib").glob("libpython3*.so.*"):
        # Not where it was built, which only root may look into.
        _add(archive, library.resolve(), f"usr/lib/x86_64-linux-gnu/{library.name}", done)


def _python_binaries() -> list[Path]:
    prefix = Path(sys.base_prefix)
    return [(prefix / "bin" / PYTHON).resolve(), *_extensions()]


def _extensions() -> list[Path]:
    folder = Path(sys.base_prefix, "lib", PYTHON, "lib-dynload")
    return [place for place in folder.glob("*.so") if not place.name.startswith("_tkinter")]


def _of_packages(packages: Iterable[str]) -> Iterator[Path]:
    listed = subprocess.run(["dpkg", "-L", *packages], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        place = Path(line)
        # /bin is a folder to dpkg and a link on disk.
        if len(place.parts) > 2 and not _UNWANTED.search(line) and (place.is_symlink() or place.is_file()):
            yield place


def libraries(files: Iterable[Path]) -> Iterator[Path]:
    """The shared libraries that programs load, as the loader names them and as they are called."""
    binaries = [
        place for place in files if not place.is_symlink() and (os.access(place, os.X_OK) or ".so" in place.name)
    ]
    told = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False).stdout
    for found in dict.fromkeys(re.findall(r"(?:=> )?(/\S+) \(0x", told)):
        yield from (Path(found), Path(found).resolve())


def _merged(place: Path) -> str:
    """The path in a system where /bin is /usr/bin."""
    top = place.parts[1]
    text = str(place).lstrip("/")
    return f"usr/{text}" if top in _LINKS else text


def _add(archive: tarfile.TarFile, place: Path, name: str, done: set[str]) -> None:
    if name in done or not (place.is_file() or place.is_symlink()):
        return
    done.add(name)
    info = archive.gettarinfo(place, name)
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    if info.isreg():
        with place.open("rb") as handle:
            archive.addfile(info, handle)
    elif info.issym():
        archive.addfile(info)
    elif info.islnk():
        info.type, info.size = tarfile.REGTYPE, place.stat().st_size
        with place.open("rb") as handle:
            archive.addfile(info, handle)


def _folder(archive: tarfile.TarFile, name: str, mode: int) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    archive.addfile(info)


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    archive.addfile(info)


def _text(archive: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(text.encode())
    archive.addfile(info, io.BytesIO(text.encode()))
