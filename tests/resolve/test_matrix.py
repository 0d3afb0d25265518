"""The data files: what ships is well-formed and says what the facts say; what is wrong with a file is all said."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from kernelguard.data import matrices
from kernelguard.errors import InputError
from kernelguard.resolve.archs import runs_on
from kernelguard.resolve.matrix import check_matrix, load_matrix, matrix
from kernelguard.resolve.values import Kind, Known


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the shipped files that a test can break."""
    for name in ("torch", "drivers", "hub"):
        shutil.copy(matrices() / f"{name}.toml", tmp_path)
    shutil.copytree(matrices() / "wheels", tmp_path / "wheels")
    return tmp_path


def edit(path: Path, change: Callable[[str], str]) -> None:
    before = path.read_text()
    after = change(before)
    assert before != after
    path.write_text(after)


def test_what_ships_has_no_problem() -> None:
    assert check_matrix(matrices()) == ()


@pytest.mark.parametrize(
    ("version", "channel", "cuda", "triton", "abi"),
    [
        ("2.6.0", "index", "12.4", "3.2.0", False),
        ("2.6.0", "cu126", "12.6", "3.2.0", True),
        ("2.10.0", "index", "12.8", "3.6.0", True),
        ("2.12.1", "index", "13.0", "3.7.1", True),
        ("2.12.1", "cu132", "13.2", "3.7.1", True),
        ("2.15.0", "index", "13.2", "3.9.0", True),
    ],
)
def test_torch_builds(version: str, channel: str, cuda: str, triton: str, abi: bool) -> None:
    [build] = [
        b for b in matrix().torch if b.version == Version(version) and b.channel == channel and b.machine == "x86_64"
    ]
    assert (build.cuda, build.triton_version, build.cxx11_abi) == (Version(cuda), Version(triton), abi)


def test_blackwell_came_with_torch_2_8_and_volta_went_with_2_11() -> None:
    archs = {str(b.version): b.archs for b in matrix().torch if b.channel == "index" and b.machine == "x86_64"}
    assert [v for v, a in archs.items() if a and not runs_on(a, (10, 0))][-1] == "2.7.1"
    assert [v for v, a in archs.items() if a and runs_on(a, (7, 0))][-1] == "2.10.0"


def test_arm_builds_have_cuda_from_2_11_on() -> None:
    cuda = {str(b.version): b.cuda for b in matrix().torch if b.channel == "index" and b.machine == "aarch64"}
    assert [v for v, c in cuda.items() if c is None][-1] == "2.10.0"
    assert cuda["2.11.0"] == Version("13.0")


def test_official_names_are_as_published() -> None:
    names = {c.filename for c in matrix().packages["causal-conv1d"].candidates}
    # This URL is in public use.
    assert "causal_conv1d-1.6.1+cu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl" in names
    urls = {c.url for c in matrix().packages["causal-conv1d"].candidates}
    assert any("/v1.6.1.post4/causal_conv1d-1.6.1%2Bcu12torch2.8" in url for url in urls)


def test_a_plan_is_never_called_observed() -> None:
    for facts in matrix().packages.values():
        for candidate in facts.candidates:
            if "publish.y" in candidate.evidence:
                assert candidate.known is Known.PLANNED, candidate.label


def test_no_official_wheel_is_listed_beyond_torch_2_10() -> None:
    for name in ("causal-conv1d", "mamba-ssm"):
        direct = [c.built_for.torch for c in matrix().packages[name].candidates if c.direct and c.built_for]
        assert max(filter(None, direct)) == Version("2.10")


def test_every_extension_can_be_built_from_source_by_an_sdist_that_is_known() -> None:
    kinds = {name: {c.kind for c in facts.candidates} for name, facts in matrix().packages.items()}
    assert all(Kind.SDIST in kinds[name] for name in ("causal-conv1d", "flash-attn", "mamba-ssm"))


def test_driver_floors_are_two() -> None:
    drivers = matrix().drivers
    assert drivers.floor(Version("13.2")) == Version("580")
    assert drivers.toolkit[Version("12.8")] == "570.26"
    assert drivers.floor(Version("14.0")) is None


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("torch.toml", lambda s: s.replace("schema = 1", "schema = 9", 1), "schema 9 is newer"),
        ("torch.toml", lambda s: s.replace('version = "2.4.1"', 'version = "2.4.0"', 1), "listed twice"),
        ("torch.toml", lambda s: s.replace('triton = "==3.0.0"', 'triton = "3.0.0"', 1), "does not match"),
        ("torch.toml", lambda s: s.replace("min_cxx = 17\n", "", 1), "'min_cxx' is a required property"),
        ("torch.toml", lambda s: s + "[[", "no TOML"),
        ("drivers.toml", lambda s: s.replace("retrieved", "retrieve", 1), "retrieve"),
        ("hub.toml", lambda s: s.replace("version = 3", "version = -3", 1), "-3 is less than"),
        ("wheels/mamba-ssm.toml", lambda s: s.replace('state = "planned"', 'state = "sure"', 1), "'sure'"),
        ("wheels/mamba-ssm.toml", lambda s: s.replace('"mamba-ssm"', '"mamba"', 1), "mamba.toml"),
        ("wheels/fla-core.toml", lambda s: s.replace('"einops"', '"einops >>"', 1), "is no requirement"),
        ("wheels/causal-conv1d.toml", lambda s: s.replace('cuda = "11 12"', 'cuda = "11 15"', 1), "no archs for it"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, file: str, change: Callable[[str], str], expected: str) -> None:
    edit(folder / file, change)
    problems = check_matrix(folder)
    assert any(expected in problem and Path(file).name in problem for problem in problems), problems
    with pytest.raises(InputError):
        load_matrix(folder)


def test_all_problems_are_named_at_once(folder: Path) -> None:
    edit(folder / "torch.toml", lambda s: s.replace("min_cxx = 17\n", "", 2))
    (folder / "drivers.toml").unlink()
    assert len(check_matrix(folder)) == 3


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (["8.0"], (8, 9), True),
        (["8.6"], (8, 0), False),
        (["9.0"], (10, 0), False),
        (["9.0+PTX"], (10, 0), True),
        (["9.0a"], (9, 0), True),
        (["10.0a"], (10, 3), False),
        (["10.0f"], (10, 3), True),
        (["10.0"], (12, 0), False),
        (["12.0"], (12, 1), True),
        ([], (9, 0), False),
    ],
)
def test_archs(archs: list[str], capability: tuple[int, int], expected: bool) -> None:
    assert runs_on(archs, capability) is expected


def test_an_unknown_arch_is_an_error_not_a_no() -> None:
    with pytest.raises(ValueError, match="no GPU arch"):
        runs_on(["sm_90"], (9, 0))
