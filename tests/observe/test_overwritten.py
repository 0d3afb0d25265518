"""Which of two distributions' files is there, and which one torch asks for."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from kernelguard.observe.overwritten import Overwritten, overwritten_libraries
from kernelguard.observe.values import Distribution

PATH = "nvidia/nccl/lib/libnccl.so.2"
CU12, CU13 = "nvidia-nccl-cu12", "nvidia-nccl-cu13"


def _install(site: Path, name: str, content: bytes, *, requires: str = "") -> Distribution:
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"{PATH},sha256={digest},{len(content)}\nREADME.txt,,\n")
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n{requires}\n\n")
    return Distribution(name=name, version="1.0", location=str(site))


@pytest.mark.parametrize(
    ("on_disk", "requires", "expected"),
    [
        (b"12", "Requires-Dist: nvidia_nccl.cu12==1.0; x == 'y'", ((CU12,), ())),
        (b"12", "Requires-Dist: nvidia_nccl.cu12==1.0; sys_platform == 'linux'", ((CU12,), (CU12,))),
        (b"13", "Requires-Dist: nvidia-nccl-cu12", ((CU13,), (CU12,))),
        (b"13", "", ((CU13,), ())),
        (b"patched", "Requires-Dist: ???\nRequires-Dist: nvidia-nccl-cu13", ((), (CU13,))),
        (None, "", ((), ())),
    ],
)
def test_whose_file_is_there(
    tmp_path: Path, on_disk: bytes | None, requires: str, expected: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    found = {
        CU12: _install(tmp_path, CU12, b"12"),
        CU13: _install(tmp_path, CU13, b"13"),
        "torch": _install(tmp_path, "torch", b"12", requires=requires),
    }
    if on_disk is not None:
        (tmp_path / PATH).parent.mkdir(parents=True)
        (tmp_path / PATH).write_bytes(on_disk)
    assert overwritten_libraries(found) == (
        Overwritten(path=PATH, owners=(CU12, CU13), on_disk=expected[0], wanted=expected[1]),
    )


def test_one_owner_equal_contents_and_other_folders_are_nothing(tmp_path: Path) -> None:
    one = _install(tmp_path / "a", CU12, b"12")
    assert overwritten_libraries({CU12: one}) == ()
    assert overwritten_libraries({CU12: one, CU13: _install(tmp_path / "a", CU13, b"12")}) == ()
    assert overwritten_libraries({CU12: one, CU13: _install(tmp_path / "b", CU13, b"13")}) == ()
    absent = Distribution(name=CU13, version="9", location=str(tmp_path / "a"))
    assert overwritten_libraries({CU12: one, CU13: absent}) == ()
