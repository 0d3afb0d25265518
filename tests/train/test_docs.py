"""What the documentation says happens does happen."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import pytest

from kernelguard_train import configfile

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = [
    *sorted((ROOT / "train" / "examples").glob("*.toml")),
    ROOT / "train" / "kernelguard_train" / "demo" / "demo.toml",
]
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
