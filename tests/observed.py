"""The interpreters that tests observe: real transformers wheels on a real CPU torch, and crafted kernel packages.

Everything is made once under `.cache/observed` and shared between test runs; each test gets a virtual environment of
its own (a few files and links, made in milliseconds) that adds its crafted packages to one of the shared ones.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CACHE = Path(__file__).resolve().parent.parent / ".cache" / "observed"
TORCH = "2.13.0"
"""Pinned exactly: a CPU build of this version can be had without downloading CUDA."""
VERSIONS = ("4.57.6", "5.5.4", "5.16.1", "5.17.0", "5.24.0")
"""One transformers release for each way of declaring fast paths, and the newest."""
_LIB = f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A virtual environment made for observing."""

    prefix: Path

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def site(self) -> Path:
        return self.prefix / _LIB


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """One maker at a time, also between parallel test processes."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{name}.lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make_venv(prefix: Path, *, sees: tuple[Path, ...] = ()) -> Interpreter:
    """A minimal virtual environment at `prefix` that also sees the given site-packages folders."""
    env = Interpreter(prefix)
    env.site.mkdir(parents=True)
    env.python.parent.mkdir()
    base = Path(sys.executable).resolve()
    env.python.symlink_to(base)
    (prefix / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    if sees:
        (env.site / "shared.pth").write_text("".join(f"{path}\n" for path in sees))
    return env


def _pip_install(env: Interpreter, *requirements: str) -> None:
    # The test environment's own pip installs into the other prefix; the observed interpreters carry no pip.
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(env.python), "install", "--quiet", *requirements],
        check=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )


@cache
def torch_base() -> Interpreter:
    """An interpreter with torch and nothing that depends on transformers' version."""
    prefix = CACHE / f"torch-{TORCH}"
    with _locked(prefix.name):
        if not (prefix / "complete").exists():
            env = Interpreter(prefix) if prefix.exists() else make_venv(prefix)
            _pip_install(env, f"torch=={TORCH}", "numpy")
            (prefix / "complete").touch()
    return Interpreter(prefix)


@cache
def transformers_base(version: str) -> Interpreter:
    """An interpreter with torch and this transformers release, and no kernel package."""
    torch = torch_base()
    prefix = CACHE / f"transformers-{version}"
    with _locked(prefix.name):
        if not (prefix / "complete").exists():
            env = Interpreter(prefix) if prefix.exists() else make_venv(prefix, sees=(torch.site,))
            _pip_install(env, f"transformers=={version}")
            (prefix / "complete").touch()
    return Interpreter(prefix)


def environment(prefix: Path, version: str | None, packages: Mapping[str, str] | None = None) -> Interpreter:
    """A fresh interpreter at `prefix`: transformers `version` (None: torch alone) plus crafted files.

    `packages` maps a path below site-packages to its text, for example `{"fla/__init__.py": ""}`.
    """
    sees = (torch_base().site,) if version is None else (transformers_base(version).site, torch_base().site)
    env = make_venv(prefix, sees=sees)
    for name, text in (packages or {}).items():
        path = env.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return env


def with_changed_transformers(env: Interpreter, version: str, changes: Mapping[str, tuple[str, str]]) -> None:
    """Give `env` a transformers of its own that differs from the release in a few replaced words.

    `changes` maps a file below `transformers/` to (old, new). Everything else is linked, not copied.
    """
    original = transformers_base(version).site / "transformers"
    copied = {Path(name).parents[i] for name in changes for i in range(len(Path(name).parents))}
    for folder in sorted(copied):
        (env.site / "transformers" / folder).mkdir(parents=True)
        for entry in (original / folder).iterdir():
            relative = folder / entry.name
            if relative not in copied and str(relative) not in changes and entry.name != "__pycache__":
                (env.site / "transformers" / relative).symlink_to(entry)
    for name, (old, new) in changes.items():
        text = (original / name).read_text()
        assert old in text, f"{old!r} is not in {name} of transformers {version}"
        (env.site / "transformers" / name).write_text(text.replace(old, new))
    for metadata in original.parent.glob("transformers-*.dist-info"):
        (env.site / metadata.name).symlink_to(metadata)
