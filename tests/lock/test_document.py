"""A lock file comes back as it was written, and is refused when it is not what was written."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.pylock import Pylock

from kernelguard.errors import InputError
from kernelguard.lock import load_lock, recipe, write_lock
from kernelguard.lock.document import dumps, to_document
from kernelguard.lock.files import pylock, requirements
from kernelguard.lock.values import (
    HubFilePin,
    HubPin,
    LockedPath,
    LockedTorch,
    Pin,
    Role,
    SourcePin,
)
from samples import sample_lock

A, B, C = "a" * 64, "b" * 64, "c" * 40
LOCK = sample_lock(
    torch=LockedTorch(version="2.12.1", cuda="13.0", channel="index", cxx11_abi=True, triton="3.7.1"),
    fast_paths=(LockedPath(symbol="f", package="fla", served_by="fla-core 0.6.0", layers=None),),
    pins=(
        Pin(
            name="causal-conv1d",
            version="1.7.0",
            filename="causal_conv1d-1.7.0+cu13torch2.12cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
            url="https://host/causal_conv1d-1.7.0%2Bcu13torch2.12cxx11abiTRUE-cp312-cp312-linux_x86_64.whl",
            sha256=A,
            role=Role.KERNEL,
            direct=True,
            size=5,
            verify=("measure it",),
            files_sha256=B,
        ),
        Pin(
            name="fla-core",
            version="0.6.0",
            filename="fla_core-0.6.0-py3-none-any.whl",
            url="https://host/fla_core-0.6.0-py3-none-any.whl",
            sha256=B,
            role=Role.KERNEL,
            index="https://host/simple/",
        ),
    ),
    hub=(
        HubPin(
            repository="org/conv",
            version=1,
            commit=C,
            variant="torch-cuda",
            files=(HubFilePin(path="a/b.py", sha256=A, size=3),),
        ),
    ),
    sources=(
        SourcePin(
            name="mamba-ssm",
            version="2.3.2.post1",
            url="https://host/mamba.tar.gz",
            sha256=B,
            commit="",
            requires=("ninja", "torch"),
            archs=("9.0",),
            arch_variable="",
            archs_note="lists its own",
            nvcc="13.0",
            cxx=17,
        ),
    ),
    notes=("one note",),
)


def test_a_lock_comes_back_as_it_was(tmp_path: Path) -> None:
    write_lock(LOCK, tmp_path / "kernelguard.lock")
    assert load_lock(tmp_path / "kernelguard.lock") == LOCK


@given(st.text(), st.text(), st.booleans(), st.integers(min_value=0) | st.none())
def test_any_text_comes_back(note: str, spec: str, admits: bool, layers: int | None) -> None:
    lock = dataclasses.replace(
        LOCK,
        notes=(note, note + "x"),
        target=dataclasses.replace(LOCK.target, spec=spec),
        admits_launch=admits,
        fast_paths=(dataclasses.replace(LOCK.fast_paths[0], layers=layers),),
    )
    document = tomllib.loads(dumps(lock))
    assert document == to_document(lock)


def test_the_same_lock_has_the_same_bytes() -> None:
    assert dumps(LOCK) == dumps(dataclasses.replace(LOCK))
    assert dumps(LOCK) != dumps(dataclasses.replace(LOCK, transformers="5.23.0"))


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('version = "2.12.1"', 'version = "2.11.0"', "was changed after it was written"),
        (f'sha256 = "{B}"', f'sha256 = "{A}"', "was changed after it was written"),
        ("admits_launch = true", "admits_launch = false", "was changed after it was written"),
        ("schema = 1", "schema = 2", "schema 2, this kernelguard reads up to 1"),
        ('sha256 = "', 'sha = "', "is no lock"),
        ("cxx = 17", 'cxx = "17"', "is no lock: source.0.cxx"),
        ('path = "a/b.py"', 'path = "../b.py"', "is no lock: hub.0.files.0.path"),
        ('path = "a/b.py"', 'path = "/etc/x"', "is no lock: hub.0.files.0.path"),
        ('digest = "', "digest = ", "is no lock"),
    ],
)
def test_an_edited_or_newer_lock_is_refused(tmp_path: Path, old: str, new: str, expected: str) -> None:
    path = tmp_path / "kernelguard.lock"
    write_lock(LOCK, path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(InputError, match=expected) as raised:
        load_lock(path)
    assert raised.value.exit_code == 2
    assert raised.value.hint


def test_every_problem_of_a_lock_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kernelguard.lock"
    path.write_text(dumps(LOCK).replace("cxx = 17", 'cxx = "x"').replace('machine = "x86_64"', 'machine = "z80"'))
    with pytest.raises(InputError) as raised:
        load_lock(path)
    assert "source.0.cxx" in str(raised.value)
    assert "z80" in str(raised.value)


def test_a_lock_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_lock(tmp_path / "nope.lock")


def test_requirements_have_one_hash_each_and_name_extra_indexes() -> None:
    text = requirements(LOCK)
    assert text.count("--hash=sha256:") == len(LOCK.pins)
    assert "--extra-index-url https://host/simple/\n" in text
    assert "causal-conv1d @ https://host/causal_conv1d-1.7.0%2Bcu13torch2.12" in text


def test_pylock_is_a_pep_751_file() -> None:
    document = tomllib.loads(pylock(LOCK))
    read = Pylock.from_dict(document)
    read.validate()
    assert [str(p.name) for p in read.packages] == ["causal-conv1d", "fla-core"]
    assert read.packages[0].archive is not None
    assert read.packages[1].wheels is not None


def test_what_is_built_is_in_a_file_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "kernelguard.lock"
    written = write_lock(LOCK, path)
    source = tmp_path / "requirements-source.txt"
    assert source in written
    assert "mamba-ssm==2.3.2.post1" in source.read_text()
    assert "nvcc 13.0, C++17, GPU archs 9.0; lists its own" in source.read_text()
    assert "mamba-ssm" not in (tmp_path / "requirements.txt").read_text()
    write_lock(dataclasses.replace(LOCK, sources=()), path)
    assert not source.exists()


def test_nothing_is_half_written(tmp_path: Path) -> None:
    path = tmp_path / "kernelguard.lock"
    write_lock(LOCK, path)
    before = path.read_bytes()
    (tmp_path / "pylock.toml").unlink()
    (tmp_path / "pylock.toml").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        write_lock(dataclasses.replace(LOCK, transformers="5.23.0"), path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))


def test_the_recipe_is_two_lines() -> None:
    copy, run = recipe()
    assert copy.startswith("COPY kernelguard.lock")
    assert run.startswith("RUN kernelguard sync kernelguard.lock --python")
