"""Environments survive being written and read; files that are none are refused with every problem named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from kernelguard.errors import InputError
from kernelguard.observe.files import (
    SCHEMA,
    environment_from_json,
    environment_to_json,
    load_environment,
    save_environment,
)
from kernelguard.observe.interpreter import observe
from kernelguard.observe.targets import target
from kernelguard.observe.values import Distribution, Environment, Gpu, GpuState
from observed import transformers_base

_NUMBERS = st.integers(0, 10**6)
_VERSIONS = st.builds(
    lambda numbers, suffix: Version(".".join(map(str, numbers)) + suffix),
    st.lists(_NUMBERS, min_size=1, max_size=4),
    st.sampled_from(["", "+cu128", "a0", ".post1", "rc2", ".dev3", "+cpu"]),
)
_NAMES = st.from_regex(r"[a-z0-9]+(-[a-z0-9]+)*", fullmatch=True)
_TEXT = st.text(max_size=20)
_DISTRIBUTIONS = st.dictionaries(_NAMES, st.tuples(_TEXT, _TEXT, st.lists(_TEXT, max_size=3)), max_size=4).map(
    lambda rows: {
        name: Distribution(name=name, version=version, location=location, top_level=tuple(top))
        for name, (version, location, top) in rows.items()
    }
)
_ENVIRONMENTS = st.builds(
    Environment,
    origin=_TEXT,
    live=st.booleans(),
    executable=st.none() | _TEXT,
    python=st.none() | _VERSIONS,
    system=st.none() | _TEXT,
    machine=st.none() | _TEXT,
    glibc=st.none() | _VERSIONS,
    torch=st.none() | _VERSIONS,
    torch_cuda=st.none() | _VERSIONS,
    torch_is_cpu=st.none() | st.booleans(),
    cxx11_abi=st.none() | st.booleans(),
    triton=st.none() | _VERSIONS,
    ptxas=st.none() | _VERSIONS,
    driver=st.none() | _VERSIONS,
    gpus=st.lists(
        st.builds(
            Gpu,
            name=_TEXT,
            capability=st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
            memory_bytes=st.none() | st.integers(0, 2**40),
        ),
        max_size=3,
    ).map(tuple),
    gpu_state=st.sampled_from(GpuState),
    gpu_detail=_TEXT,
    distributions=st.none() | _DISTRIBUTIONS,
    transformers_root=st.none() | _TEXT,
    transformers_version=st.none() | _VERSIONS,
    variables=st.dictionaries(_TEXT, _TEXT, max_size=3),
    cuda_toolkit=st.none() | _VERSIONS,
    problems=st.lists(_TEXT, max_size=3).map(tuple),
)


@given(_ENVIRONMENTS)
def test_round_trip(environment: Environment) -> None:
    """All of it comes back, except that a file is not live and is its own origin."""
    back = environment_from_json(environment_to_json(environment), source="a.json")
    assert back == replace(environment, live=False, origin="file a.json")


@pytest.mark.parametrize("spec", ["cpu", "h100,torch=2.12.1+cu128,driver=580", "gb10"])
def test_a_target_goes_to_a_file_and_back(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "target.json"
    save_environment(target(spec), path)
    assert load_environment(path) == replace(target(spec), origin=f"file {path}")


def test_a_real_environment_goes_to_a_file_and_back(tmp_path: Path) -> None:
    seen = observe(str(transformers_base("5.24.0").python))
    path = tmp_path / "environment.json"
    save_environment(seen, path)
    assert load_environment(path) == replace(seen, live=False, origin=f"file {path}")
    assert json.loads(path.read_text())["captured_from"] == seen.origin


def _document(**changes: Any) -> str:
    return json.dumps({"schema": SCHEMA, "kind": "environment", **changes})


def test_what_a_file_does_not_say_is_unknown() -> None:
    assert environment_from_json(_document(), source="x") == Environment(origin="file x", live=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("", ["is not JSON"], id="empty"),
        pytest.param("{", ["is not JSON"], id="cut-off"),
        pytest.param("[" * 100_000, ["is not JSON"], id="deeply-nested"),
        pytest.param("[]", ["is not of type 'object'"], id="list"),
        pytest.param("{}", ["'schema' is a required property", "'kind' is a required property"], id="other-json"),
        pytest.param(json.dumps({"schema": 1, "kind": "lock"}), ["kind: 'environment' was expected"], id="a-lock"),
        pytest.param(_document(torhc="2.9"), ["'torhc' was unexpected"], id="unknown-key"),
        pytest.param(_document(torch="main"), ["torch: 'main' is no version"], id="no-version"),
        pytest.param(
            _document(torch=2.9, gpu_state="fast", gpus=[{"name": "H100", "capability": [9]}], distributions=[{}]),
            ["torch: 2.9", "gpu_state: 'fast'", "gpus.0.capability: [9]", "distributions.0: 'name'"],
            id="every-problem",
        ),
        pytest.param(_document(distributions=[{"name": "Fla_Core", "version": "1"}]), ["'Fla_Core'"], id="not-normal"),
        pytest.param(
            _document(distributions=[{"name": "fla-core", "version": "1"}] * 2),
            ["fla-core is listed twice"],
            id="twice",
        ),
    ],
)
def test_files_that_are_no_environment(text: str, words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_environment(path)
    assert str(path) in caught.value.message
    for word in words:
        assert word in caught.value.message
    assert "\n" not in caught.value.message
    assert "kernelguard observe" in (caught.value.hint or "")


def test_a_newer_schema_says_what_is_supported_and_how_to_get_there() -> None:
    with pytest.raises(InputError) as caught:
        environment_from_json(_document(schema=SCHEMA + 1, surprising="key"), source="new.json")
    assert caught.value.message == f"new.json has schema {SCHEMA + 1}; this kernelguard reads up to schema {SCHEMA}"
    assert caught.value.hint == "pip install --upgrade kernelguard-preflight"


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        load_environment(tmp_path / "missing.json")
    with pytest.raises(InputError, match="Is a directory"):
        load_environment(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x9f")
    with pytest.raises(InputError, match="is no text file"):
        load_environment(tmp_path / "binary")
    with (tmp_path / "huge").open("wb") as handle:
        handle.truncate(100 * 2**20)
    with pytest.raises(InputError, match="is larger than any environment"):
        load_environment(tmp_path / "huge")
    with pytest.raises(InputError, match="cannot be written"):
        save_environment(target("cpu"), tmp_path / "missing/x.json")
