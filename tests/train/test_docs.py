"""What the documentation says happens does happen."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from kernelguard_train import configfile
from kernelguard_train.config import Config

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    *sorted((ROOT / "train" / "examples").glob("*.toml")),
    ROOT / "train" / "kernelguard_train" / "demo" / "demo.toml",
]
PAGES = sorted((ROOT / "docs" / "training").glob("*.md"))
DEMOS = ROOT / "docs" / "training" / "demos"


def test_a_recorded_step_keeps_the_boundaries_it_was_recorded_with() -> None:
    found = runpy.run_path(str(DEMOS / "cuda_graphs.py"))["main"]()
    assert found["error on the batch that was recorded"] < 1e-5
    assert found["error on a batch with other boundaries"] > 0.1


def test_a_nested_tensor_does_not_pass_a_hybrid_layer() -> None:
    found = runpy.run_path(str(DEMOS / "nested_tensor.py"))["main"]()
    page = (ROOT / "docs" / "training" / "why-not-cuda-graphs.md").read_text()
    for name, outcome in found.items():
        assert f"{name}: {outcome.split(':')[0]}" in page, "the page shows what the script prints"
    assert [name for name, outcome in found.items() if outcome == "works"] == [
        "projection (linear)",
        "norm (pow, mean, rsqrt)",
    ]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_a_usable_configuration(path: Path) -> None:
    tree = tomllib.loads(path.read_text())
    missing = [f"{section}.path=x" for section in ("model", "data") if "path" not in tree[section]]
    configfile.load(path, missing)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_settings_that_a_page_names_are_there_and_take_the_value(page: Path) -> None:
    text, tree = page.read_text(), configfile.to_dict(Config())
    named = re.findall(r"`([a-z]+)\.([a-z_0-9]+)`", text)
    wrong = [f"{section}.{key}" for section, key in named if section in tree and key not in {*tree[section], "py"}]
    assert wrong == []
    given = [f"{key}={value}" for key, value in re.findall(r"`([a-z]+\.[a-z_0-9]+) = ([^`]+)`", text)]
    given += re.findall(r" ([a-z]+\.[a-z_0-9]+=\S+)", "\n".join(re.findall(r"-m kernelguard_train .*", text)))
    assert given or page.stem == "why-not-cuda-graphs"
    for override in given:
        configfile.load(None, ["model.path=x", "data.path=x", override])


def test_the_page_names_the_modules_that_there_are() -> None:
    listed = re.findall(
        r"`([a-z_0-9]+\.py)`", (ROOT / "docs/training/README.md").read_text().split("## What it does")[0]
    )
    there = {path.name for path in (ROOT / "train" / "kernelguard_train").glob("*.py")}
    assert set(listed) - there == set()
