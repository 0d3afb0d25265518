"""What is read equals what is: symbols, layers and sample boundaries against the really imported modules."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from declare.fakes import FAKES
from declare.families import CASES, SIGNALS
from kernelguard.declare import Reader, find_tree
from kernelguard.declare.config import parse_config
from kernelguard.declare.index import Index
from kernelguard.declare.source import Source
from kernelguard.declare.values import BindingKind, Declaration, TransformersTree
from observed import VERSIONS, environment, transformers_base

pytestmark = pytest.mark.observed
ORACLE = Path(__file__).with_name("oracle.py")


@cache
def tree(version: str) -> TransformersTree:
    return find_tree(transformers_base(version).site / "transformers")


@cache
def reader(version: str) -> Reader:
    return Reader(tree(version))


@cache
def index(version: str) -> Index:
    return Index(Source(tree(version)))


@cache
def kernel_modules(version: str) -> tuple[str, ...]:
    """Every modeling module whose text names a kernel package, found by text search alone."""
    words = ("causal_conv1d", "mamba_ssm", "flash_linear_attention", '"fla"', "mambapy", "from apex")
    found = []
    for path in sorted((tree(version).root / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        if any(word in text for word in words):
            found.append(f"transformers.models.{path.parent.name}.{path.stem}")
    return tuple(found)


def cases(version: str) -> list[dict[str, Any]]:
    """The cases whose type this release knows."""
    return [case for case in CASES if index(version).entry(case["config"]["model_type"]) is not None]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the oracle once for each release."""

    @cache
    def run(version: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(version)
        env = environment(folder / "env", version, FAKES)
        spec = {
            "modules": kernel_modules(version),
            "models": [{**case, "signals": [] if "-none" in case["name"] else SIGNALS} for case in cases(version)],
        }
        (folder / "spec.json").write_text(json.dumps(spec))
        done = subprocess.run(
            [str(env.python), str(ORACLE), str(folder / "spec.json"), str(folder / "out.json")],
            capture_output=True,
            text=True,
            check=False,
            env={
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": "/usr/bin:/bin",
            },
        )
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads((folder / "out.json").read_text())
        return result

    return run


@cache
def read(version: str, name: str) -> Declaration:
    case = next(case for case in CASES if case["name"] == name)
    return reader(version).declare(parse_config(case["config"], source=name))


@pytest.mark.parametrize("version", VERSIONS)
def test_symbols(version: str, oracle: Any) -> None:
    """For every modeling file, the names bound to kernels are exactly those of the imported module."""
    really = oracle(version)["modules"]
    assert len(really) >= 10
    read_names: dict[str, dict[str, str]] = {name: {} for name in really}
    for model_type in index(version).types():
        entry = index(version).entry(model_type)
        if entry is None or not any(f".models.{entry.folder}." in name for name in really):
            continue
        for path in reader(version).declare(parse_config({"model_type": model_type}, source=model_type)).fast_paths:
            # A function that imports its kernel each time it runs leaves nothing to look at in the module; and what
            # is asked for under a helper that does not exist is never bound (falcon_mamba up to 5.14).
            if path.binding.kind is not BindingKind.AT_CALL and not path.availability_missing:
                read_names[path.binding.module][path.binding.name] = path.symbol
    for name, module in really.items():
        assert "error" not in module, module
        assert read_names[name] == module["bound"], name


@pytest.mark.parametrize("version", VERSIONS)
def test_layers(version: str, oracle: Any) -> None:
    """How many layers use a kernel is how many modules of its owner the real model has."""
    compared = 0
    for case in cases(version):
        really = oracle(version)["models"][case["name"]]
        if "error" in really:
            continue
        for path in read(version, case["name"]).fast_paths:
            if path.detail.startswith("With this configuration"):
                continue
            expected = really["counts"].get(path.binding.owner, 0)
            assert path.layers == expected, (case["name"], path.symbol)
            compared += 1
        if case["name"].endswith("-none"):
            assert all(path.layers == 0 for path in read(version, case["name"]).fast_paths), case["name"]
    assert compared >= 40


def _arrived(runs: dict[str, Any], symbol: str, argument: str) -> dict[str, bool] | None:
    """For each signal: it was in that argument at every call of the kernel. None: the kernel was never called."""
    calls = {signal: [given for name, given in run["calls"] if name == symbol] for signal, run in runs.items()}
    if not any(calls.values()):
        return None
    return {signal: bool(found) and all(argument in given for given in found) for signal, found in calls.items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_signals(version: str, oracle: Any) -> None:
    """The signals that are said to reach a kernel argument are those that arrive there when the model really runs."""
    compared: set[tuple[str, str]] = set()
    unknown = []
    for case in cases(version):
        really = oracle(version)["models"][case["name"]]
        if "error" in really or "arrivals" not in really:
            continue
        for path in read(version, case["name"]).fast_paths:
            for boundary in path.boundaries:
                real_name = "short_convolution" if path.symbol == "ShortConvolution" else path.symbol
                arrived = _arrived(really["arrivals"], real_name, boundary.argument)
                if arrived is None:
                    continue  # decoding only
                where = (case["name"], path.symbol, boundary.argument)
                if not boundary.known:
                    unknown.append(where)
                    continue
                assert {s for s, came in arrived.items() if came} == set(boundary.signals) & set(SIGNALS), where
                compared.add((case["name"], path.symbol))
    assert not unknown
    assert len(compared) >= 12


@pytest.mark.parametrize("version", VERSIONS)
def test_key_heads(version: str, oracle: Any) -> None:
    """Layers are said to repeat key heads exactly where as many as value heads arrive at the kernel."""
    compared = set()
    for case in cases(version):
        runs = oracle(version)["models"][case["name"]].get("arrivals", {})
        arrived = {(name, keys == values) for run in runs.values() for name, keys, values in run["heads"]}
        config = case["config"].get("text_config", case["config"])
        if config.get("linear_num_key_heads") == config.get("linear_num_value_heads"):
            continue
        for path in read(version, case["name"]).fast_paths:
            for name, equal in arrived:
                if name == path.symbol:
                    assert path.repeats_heads is equal, (case["name"], name)
                    compared.add(case["name"])
    assert len(compared) >= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_every_case_is_built(version: str, oracle: Any) -> None:
    """The comparisons above leave nothing out: every case that this release knows is built for real."""
    errors = {name: case["error"] for name, case in oracle(version)["models"].items() if "error" in case}
    assert not errors
