"""A transformers tree: found at any level, of a supported version, fetched whole or not at all."""

from __future__ import annotations

import os
import stat
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from kernelguard.declare import find_tree, tree_of_version
from kernelguard.errors import InputError, UndeterminedError


def make(root: Path, version: str | None = "5.24.0") -> Path:
    (root / "models").mkdir(parents=True)
    (root / "__init__.py").write_text(f'__version__ = "{version}"\n' if version else "")
    return root


@pytest.mark.parametrize(
    ("place", "asked"),
    [
        ("transformers", "transformers"),
        ("site-packages/transformers", "site-packages"),
        ("repo/src/transformers", "repo"),
        ("venv/lib/python3.12/site-packages/transformers", "venv"),
    ],
)
def test_it_is_found(tmp_path: Path, place: str, asked: str) -> None:
    make(tmp_path / place)
    tree = find_tree(tmp_path / asked)
    assert tree.root == tmp_path / place
    assert tree.version == Version("5.24.0")


def test_the_version_may_stand_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "transformers", None)
    with pytest.raises(InputError, match="cannot be told"):
        find_tree(tmp_path)
    (tmp_path / "transformers-5.1.0.dist-info").mkdir()
    assert find_tree(tmp_path).version == Version("5.1.0")


@pytest.mark.parametrize("version", ["4.56.2", "3.0", "4.56.0.dev0"])
def test_old_ones_are_refused(tmp_path: Path, version: str) -> None:
    make(tmp_path / "transformers", version)
    with pytest.raises(InputError, match=r"4\.57"):
        find_tree(tmp_path)


@pytest.mark.parametrize("version", ["4.57.0", "4.57.0.dev0", "5.24.0", "5.25.0.dev0", "9.0"])
def test_others_are_taken(tmp_path: Path, version: str) -> None:
    make(tmp_path / "transformers", version)
    assert find_tree(tmp_path).version == Version(version)


def test_no_tree(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder transformers/models"):
        find_tree(tmp_path)
    with pytest.raises(InputError, match="does not exist"):
        find_tree(tmp_path / "none")


@pytest.mark.parametrize("version", ["newest", "5.x", "../..", "4.56.0"])
def test_nonsense_versions(tmp_path: Path, version: str) -> None:
    with pytest.raises(InputError):
        tree_of_version(version, tmp_path)


def fake_python(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter whose pip does what `script` says, standing in for a package index."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))


def test_a_wheel_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "transformers-5.24.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("transformers/__init__.py", '__version__ = "5.24.0"\n')
        archive.writestr("transformers/models/mamba/modeling_mamba.py", "")
        archive.writestr("transformers/data.bin", "x" * 100)
        archive.writestr("other/x.py", "")
    # The folder is the argument after -d.
    fake_python(tmp_path, f'while [ "$1" != -d ]; do shift; done; cp {wheel} "$2"', monkeypatch)
    cache = tmp_path / "cache"
    tree = tree_of_version("5.24.0", cache)
    assert sorted(p.name for p in tree.root.rglob("*") if p.is_file()) == ["__init__.py", "modeling_mamba.py"]
    assert [p.name for p in cache.iterdir()] == ["transformers-5.24.0"]
    fake_python(tmp_path, "exit 9", monkeypatch)
    assert tree_of_version("5.24.0", cache) == tree


def test_a_version_that_was_never_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Could not find a version that satisfies it (from versions: 5.4.0, 5.5.3, 5.5.4, 5.6.0rc1, 5.7.0)"
    fake_python(tmp_path, f'echo "{said}" >&2; exit 1', monkeypatch)
    with pytest.raises(InputError) as caught:
        tree_of_version("5.5.9", tmp_path / "cache")
    assert caught.value.hint == "the nearest release is 5.5.4"
    assert not list((tmp_path / "cache").iterdir())


def test_offline_is_undetermined_and_credentials_stay_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "ERROR: Could not fetch URL https://user:secret@index.example/simple: connection refused"
    fake_python(tmp_path, f'echo "{said}" >&2; exit 1', monkeypatch)
    with pytest.raises(UndeterminedError) as caught:
        tree_of_version("5.24.0", tmp_path / "cache")
    assert "secret" not in caught.value.message
    assert "connection refused" in caught.value.message
    assert "pip download" in (caught.value.hint or "")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UndeterminedError, match="cannot be written"):
        tree_of_version("5.24.0", tmp_path / "file" / "cache")
    assert os.listdir(tmp_path) == ["file"]  # noqa: PTH208
