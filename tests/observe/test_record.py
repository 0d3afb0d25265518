"""Installed files against RECORD, against each other, and siblings against their pins."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path

from kernelguard.observe.record import ChangedFile, RecordState, SharedFile, UnmetPin, inspect_records
from kernelguard.observe.values import Distribution


def _install(
    site: Path, name: str, version: str, files: Mapping[str, str], *, requires: tuple[str, ...] = ()
) -> Distribution:
    """Files and metadata as pip leaves them."""
    rows = []
    for path, text in files.items():
        content = text.encode()
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(content)
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
        rows.append(f"{path},sha256={digest},{len(content)}")
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {entry}" for entry in requires)]
    (info / "METADATA").write_text("\n".join(lines) + "\n\nRequires-Dist: not-a-header==1\n")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")
    return Distribution(name=name, version=version, location=str(site))


def _all(*distributions: Distribution) -> dict[str, Distribution]:
    return {entry.name: entry for entry in distributions}


def test_an_untouched_installation(tmp_path: Path) -> None:
    core = _install(tmp_path, "fla-core", "0.6.0", {"fla/ops/a.py": "a", "fla/x.so": "b"})
    full = _install(tmp_path, "flash-linear-attention", "0.6.0", {"fla/layers/b.py": ""}, requires=("fla-core==0.6.0",))
    assert inspect_records(_all(core, full), ["fla-core", "flash-linear-attention", "not-installed"]) == RecordState()


def test_changed_and_missing_files(tmp_path: Path) -> None:
    files = {"p/same_size.py": "abc", "p/longer.py": "x", "p/gone.so": "y", "p/fine.py": "", "p/README.md": "z"}
    package = _install(tmp_path, "p", "1", files)
    (tmp_path / "p/same_size.py").write_text("abd")
    (tmp_path / "p/longer.py").write_text("xx")
    (tmp_path / "p/gone.so").unlink()
    (tmp_path / "p/README.md").write_text("who cares")
    assert inspect_records(_all(package), ["p"]).changed == (
        ChangedFile(distribution="p", path="p/same_size.py", missing=False),
        ChangedFile(distribution="p", path="p/longer.py", missing=False),
        ChangedFile(distribution="p", path="p/gone.so", missing=True),
    )


def test_one_file_of_two_distributions(tmp_path: Path) -> None:
    first = _install(tmp_path, "flash-attn", "2.8", {"flash_attn/__init__.py": "first", "flash_attn/a.py": "same"})
    second = _install(tmp_path, "sgl-kernel", "1.0", {"flash_attn/__init__.py": "second", "flash_attn/a.py": "same"})
    third = _install(tmp_path, "unrelated", "1", {"unrelated.py": ""})
    seen = inspect_records(_all(first, second, third), ["flash-attn"])
    assert seen.shared == (
        SharedFile(path="flash_attn/__init__.py", distributions=("flash-attn", "sgl-kernel"), same_content=False),
        SharedFile(path="flash_attn/a.py", distributions=("flash-attn", "sgl-kernel"), same_content=True),
    )
    # The second has overwritten the first one's file.
    assert seen.changed == (ChangedFile(distribution="flash-attn", path="flash_attn/__init__.py", missing=False),)
    assert inspect_records(_all(first, second, third), ["unrelated"]) == RecordState()


def test_the_same_path_in_two_folders_is_not_shared(tmp_path: Path) -> None:
    first = _install(tmp_path / "one", "a", "1", {"x.py": "1"})
    second = _install(tmp_path / "two", "b", "1", {"x.py": "2"})
    assert inspect_records(_all(first, second), ["a", "b"]).shared == ()


def test_siblings_of_different_versions(tmp_path: Path) -> None:
    core = _install(tmp_path, "fla-core", "0.5.0", {})
    requires = (
        "fla_core==0.6.0",
        "fla-core[cuda]==0.6.0; extra == 'cuda'",
        "transformers>=99",
        "gone==1",
        "torch==2.13.0",
    )
    full = _install(tmp_path, "flash-linear-attention", "0.6.0", {"fla/x.py": ""}, requires=requires)
    others = _install(tmp_path, "transformers", "5.24.0", {}), _install(tmp_path, "torch", "2.13.0+cpu", {})
    seen = inspect_records(_all(core, full, *others), ["flash-linear-attention"])
    assert seen.unmet == (
        UnmetPin(distribution="flash-linear-attention", version="0.6.0", wants="fla-core==0.6.0", installed="0.5.0"),
    )
    assert seen.problems == ()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    first = _install(tmp_path, "a", "1", {"a.py": ""}, requires=("this is no requirement ==",))
    second = _install(tmp_path, "b", "1", {"b.py": ""})
    (tmp_path / "b-1.dist-info/RECORD").unlink()
    third = Distribution(name="c", version="1", location=str(tmp_path))
    fourth = _install(tmp_path, "d", "1", {"d.py": ""})
    (tmp_path / "d-1.dist-info/RECORD").write_bytes(b"\xff\xfe")
    seen = inspect_records(_all(first, second, third, fourth), ["a", "b", "c", "d"])
    assert [
        next(word for word in ("requirement", "no RECORD", "could not") if word in text) for text in seen.problems
    ] == [
        "requirement",
        "no RECORD",
        "no RECORD",
        "could not",
        "no RECORD",
    ]


def test_a_leftover_of_another_version_is_not_taken_for_the_installed_one(tmp_path: Path) -> None:
    _install(tmp_path, "a", "0.9", {"a.py": "old"})
    _install(tmp_path, "a", "2.0", {"a.py": "newest"})
    installed = _install(tmp_path, "a", "1.0", {"a.py": "right"})
    assert inspect_records(_all(installed), ["a"]) == RecordState()
