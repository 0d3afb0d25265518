"""The matrices against an index that has moved on: each difference by name, and nothing overwritten."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelguard.data import matrices
from kernelguard.errors import UndeterminedError
from kernelguard.sources.http import Http
from kernelguard.sources.index import IndexSource
from kernelguard.sources.refresh import Difference, read_archs, refresh
from sources.servers import Site, broken, site, wheel

_TORCH = """
schema = 1
source = "test"
retrieved = 2026-01-01
channel_url = "https://host/{channel}"
cpu_channel_source = "test"

[[release]]
version = "2.12.1"
uploaded = 2026-06-17
requires_python = ">=3.10"
min_cxx = 17
extension_cxx = 20
triton = "==3.7.1"
x86_64 = { cuda = "13.0", cxx11_abi = true, glibc = "2.28", pythons = "cp312", archs = "8.0 9.0" }
"""
_FLA = """
schema = 1
distribution = "fla-core"
package = "fla"
kind = "pure"

[[release]]
version = "0.6.0"
date = 2026-10-23
requires = ["einops"]
sha256 = "{sha256}"
source = "test"
retrieved = 2026-01-01
"""
_CONV = """
schema = 1
distribution = "causal-conv1d"
package = "causal_conv1d"
kind = "extension"
[build]
version = "1.7.0"
"""
_HUB = '[published]\nkernels = "0.17.1 0.17.2"\n'


@pytest.fixture
def served() -> Iterator[Site]:
    with site() as running:
        put_torch(running, {"2.12.1": ("13.0", "3.7.1", "sm_80 sm_90")})
        running.put_index("fla-core", {"fla_core-0.6.0-py3-none-any.whl": wheel("fla-core", "0.6.0")})
        running.put_index("causal-conv1d", {"causal_conv1d-1.7.0.tar.gz": b""})
        kernels = {f"kernels-{v}-py3-none-any.whl": b"" for v in ("0.5.0", "0.17.1", "0.17.2")}
        running.put_index("kernels", kernels)
        yield running


def put_torch(served: Site, releases: dict[str, tuple[str, str, str]], **change: object) -> None:
    files, extra = {}, {}
    for version, (cuda, triton, archs) in releases.items():
        name = f"torch-{version}-cp312-cp312-manylinux_2_28_x86_64.whl"
        files[name] = wheel(
            "torch",
            version,
            files={
                "torch/version.py": f"__version__ = '{version}'\ncuda: str | None = '{cuda}'\n",
                # Long, so that the list lies where blocks meet.
                "torch/lib/libtorch_python.so": "\0" * 262_130 + archs + " compute_90" + "\0" * 1_000,
            },
            requires=(f"triton=={triton} ; platform_system == 'Linux'", "pytest ; extra == 'test'"),
        )
        extra[name] = {"upload-time": "2026-06-17T10:00:00Z", "requires-python": ">=3.10", **change}
    served.put_index("torch", files, **extra)


@pytest.fixture
def folder(tmp_path: Path, served: Site) -> Path:
    from sources.servers import sha256

    (tmp_path / "wheels").mkdir()
    (tmp_path / "torch.toml").write_text(_TORCH)
    (tmp_path / "hub.toml").write_text(_HUB)
    body = served.files["/files/fla_core-0.6.0-py3-none-any.whl"][1]
    (tmp_path / "wheels" / "fla-core.toml").write_text(_FLA.replace("{sha256}", sha256(body)))
    (tmp_path / "wheels" / "causal-conv1d.toml").write_text(_CONV)
    return tmp_path


def look(folder: Path, served: Site, *, deep: bool = False) -> Difference:
    http = Http(timeout=5, attempts=1)
    return refresh(folder, IndexSource(f"{served.url}/simple", http), http, deep=deep)


def test_what_agrees_shows_no_difference(folder: Path, served: Site) -> None:
    found = look(folder, served, deep=True)
    assert found.changes == ()
    assert found.unread == ()


def test_a_new_torch_is_shown_with_everything_that_could_be_derived(folder: Path, served: Site) -> None:
    before = (folder / "torch.toml").read_bytes()
    put_torch(served, {"2.12.1": ("13.0", "3.7.1", "sm_80 sm_90"), "2.16.0": ("13.4", "4.0.0", "sm_90 sm_100 sm_120a")})
    [change] = look(folder, served).changes
    text = str(change)
    assert text.startswith("+ torch.toml: torch 2.16.0: ")
    for part in ("triton ==4.0.0", "x86_64.cuda 13.4", "x86_64.archs 9.0 10.0 12.0a", "x86_64.glibc 2.28", "cp312"):
        assert part in text
    assert (folder / "torch.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("release", "change", "expected"),
    [
        (("13.2", "3.7.1", "sm_80 sm_90"), {}, "~ torch.toml: torch 2.12.1 x86_64.cuda: 13.0 -> 13.2"),
        (("13.0", "3.7.2", "sm_80 sm_90"), {}, "~ torch.toml: torch 2.12.1 triton: ==3.7.1 -> ==3.7.2"),
        (("13.0", "3.7.1", "sm_80 sm_90"), {"yanked": "bad"}, "~ torch.toml: torch 2.12.1 yanked: False -> True"),
        (("13.0", "3.7.1", "sm_90 sm_100"), {}, "~ torch.toml: torch 2.12.1 x86_64.archs: 8.0 9.0 -> 9.0 10.0"),
    ],
)
def test_a_changed_fact_is_shown(
    folder: Path, served: Site, release: tuple[str, str, str], change: dict[str, object], expected: str
) -> None:
    put_torch(served, {"2.12.1": release}, **change)
    assert [str(c) for c in look(folder, served, deep=True).changes] == [expected]


def test_a_release_that_is_gone_is_shown(folder: Path, served: Site) -> None:
    put_torch(served, {"2.16.0": ("13.4", "4.0.0", "sm_90")})
    assert "- torch.toml: torch 2.12.1: listed here" in [str(c) for c in look(folder, served).changes]


def test_new_kernel_releases_and_swapped_bytes_are_shown(folder: Path, served: Site) -> None:
    served.put_index(
        "fla-core",
        {
            "fla_core-0.6.0-py3-none-any.whl": wheel("fla-core", "0.6.0", requires=("swapped",)),
            "fla_core-0.7.0-py3-none-any.whl": wheel("fla-core", "0.7.0", requires=("einops", "torch>=2.9")),
        },
    )
    served.put_index("causal-conv1d", {"causal_conv1d-1.8.0.tar.gz": b"", "causal_conv1d-1.9.0rc1.tar.gz": b""})
    served.put_index("kernels", {f"kernels-{v}-py3-none-any.whl": b"" for v in ("0.17.2", "0.18.2")})
    told = [str(c) for c in look(folder, served).changes]
    assert "+ wheels/fla-core.toml: fla-core 0.7.0: requires_python ; requires einops, torch>=2.9" in told
    assert any(t.startswith("~ wheels/fla-core.toml: fla-core 0.6.0 sha256: ") for t in told)
    assert "~ wheels/causal-conv1d.toml: causal-conv1d build.version: 1.7.0 -> 1.8.0" in told
    assert "+ hub.toml: kernels 0.18.2: published" in told
    assert "- hub.toml: kernels 0.17.1: listed here" in told
    assert len(told) == 5


def test_what_could_not_be_read_is_said(folder: Path, served: Site) -> None:
    served.special["/files/torch-2.12.1-cp312-cp312-manylinux_2_28_x86_64.whl"] = broken
    found = look(folder, served)
    assert found.changes == ()
    [text] = found.unread
    assert text.startswith("torch 2.12.1: ")
    assert "503" in text


def test_an_index_that_is_down_is_an_error(folder: Path, served: Site) -> None:
    served.special["/simple/torch/"] = broken
    with pytest.raises(UndeterminedError):
        look(folder, served)


def test_a_library_without_the_list_has_no_archs(served: Site) -> None:
    url = served.put("/x.whl", wheel("x", "1.0", files={"torch/lib/libtorch_python.so": "nothing"}))
    assert read_archs(url, Http(timeout=5)) == ()
    url = served.put("/y.whl", wheel("y", "1.0"))
    assert read_archs(url, Http(timeout=5)) == ()


@pytest.mark.online
def test_the_shipped_matrices_agree_with_the_index_on_one_package(tmp_path: Path) -> None:
    """Of the real index only small pages are asked here; `kernelguard matrix refresh` asks for all."""
    import sys

    from kernelguard.sources.pipconfig import pip_config

    http = Http(timeout=60)
    index = IndexSource(pip_config(Path(sys.executable)).index_url, http)
    shutil.copytree(matrices() / "wheels", tmp_path / "wheels")
    listed = {f.filename: f.sha256 for f in index.files("fla-core")}
    text = (tmp_path / "wheels" / "fla-core.toml").read_text()
    assert listed["fla_core-0.6.0-py3-none-any.whl"] in text
