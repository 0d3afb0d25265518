"""The wheel that users install: built for real, put into a clean environment, and asked the main question there."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from command import ROOT
from observed import transformers_base


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(list(map(str, command)), check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_it_is_not_named_like_the_unrelated_distribution(wheel: Path) -> None:
    assert wheel.name.startswith("kernelguard_preflight-")


def test_it_ships_what_the_commands_read(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for shipped in ("matrices", "examples"):
        for file in (ROOT / shipped).rglob("*"):
            if file.is_file():
                assert f"kernelguard/_data/{shipped}/{file.relative_to(ROOT / shipped)}" in names
    assert "kernelguard/schemas/report.schema.json" in names
    assert any(name.startswith("kernelguard_train/") for name in names)
    assert not any(name.startswith("tests/") for name in names)


@pytest.mark.online
@pytest.mark.observed
@pytest.mark.thorough
def test_the_main_job_runs_in_a_clean_environment(wheel: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", prefix], check=True)
    subprocess.run([prefix / "bin" / "pip", "install", "--quiet", wheel], check=True)
    tree = transformers_base("5.24.0").site / "transformers"
    example = next(prefix.glob("lib/python*/site-packages/kernelguard/_data/examples/qwen3.8-27b"))
    command = [prefix / "bin" / "kernelguard", "check", example, "--target", "h100", "--json", "--transformers", tree]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    report = json.loads(done.stdout)
    assert {p["symbol"] for p in report["fast_paths"]} == {"causal_conv1d_fn", "chunk_gated_delta_rule"}
    assert {p["layers"] for p in report["fast_paths"]} == {48}


@pytest.mark.online
@pytest.mark.observed
def test_the_core_is_light(wheel: Path) -> None:
    metadata = zipfile.ZipFile(wheel).read(next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("METADATA")))
    needs = [
        line for line in metadata.decode().splitlines() if line.startswith("Requires-Dist") and "extra" not in line
    ]
    for heavy in ("torch", "transformers", "docker", "kernels", "datasets", "triton", "pip-tools"):
        assert not any(line.split()[1].startswith(heavy) for line in needs), needs
