"""Every transformers release that was read: where each change stands, and what a newer one would change."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import configs
from kernelguard import data
from kernelguard.declare import Reader, declare, find_tree, parse_config
from kernelguard.declare.choices.hub_layers import hub_mapping
from kernelguard.declare.reading import kernels_window
from kernelguard.declare.source import Source
from kernelguard.declare.survey import _rows, drift
from kernelguard.declare.tree import NEWEST_READ, tree_of_version
from kernelguard.declare.values import TransformersTree
from kernelguard.judge.hub import window_text
from observed import CACHE, VERSIONS, Interpreter, make_venv, transformers_base, with_changed_transformers

pytestmark = pytest.mark.observed
CHANGES: dict[str, Any] = tomllib.loads((data.matrices() / "transformers.toml").read_text("utf-8"))
WINDOWS = tomllib.loads((data.matrices() / "hub.toml").read_text("utf-8"))["window"]
READ = CHANGES["read"].split()
NEWEST = VERSIONS[-1]
VISION = {"model_type": "qwen3_5_vision"}
WITHOUT = (configs.LLAMA, VISION)
FAMILIES = (configs.MAMBA2, configs.BAMBA, configs.JAMBA, configs.QWEN3_NEXT, configs.QWEN3_5, *WITHOUT)


@cache
def tree(version: str) -> TransformersTree:
    """The source of a release: of an observed interpreter, else its wheel."""
    if version in VERSIONS:
        return find_tree(transformers_base(version).site / "transformers")
    return tree_of_version(version, CACHE.parent / "sources")


def test_the_newest_release_is_the_newest_that_was_read() -> None:
    assert READ[-1] == str(NEWEST_READ) == NEWEST
    assert READ[0] == "4.57.0"


@pytest.mark.thorough
@pytest.mark.parametrize("version", READ)
def test_every_change_stands_where_it_is_said_to(version: str) -> None:
    """All rows of matrices/transformers.toml and all windows of matrices/hub.toml, on every release."""
    source = Source(tree(version))
    mapping = hub_mapping(source, [])
    for change in CHANGES["change"]:
        here = Version(change["since"]) <= Version(version) < Version(change.get("until", "99"))
        if "trains" in change:
            found = any(o.training and o.device == "cuda" for o in mapping.get(change["trains"], ()))
        else:
            found = change["text"] in (source.text(change["file"]) or "")
        assert found == here, change["id"]
    window = next(row["kernels"] for row in WINDOWS if SpecifierSet(row["transformers"]).contains(version))
    said = window_text(kernels_window(source))
    probes = [Version(f"0.{minor}.{micro}") for minor in range(9, 21) for micro in range(8)]
    assert [p for p in probes if p in SpecifierSet(said)] == [p for p in probes if p in SpecifierSet(window)]


@pytest.mark.thorough
@pytest.mark.parametrize("version", READ)
def test_every_release_is_understood(version: str) -> None:
    """The families with kernels declare them in every release that has them, and nothing is left unread."""
    reader = Reader(tree(version))
    known = reader.model_types()
    seen = 0
    for config in FAMILIES:
        if config["model_type"] not in known:
            continue
        found = reader.declare(parse_config(config, source=config["model_type"]))
        assert not found.unknowns, (version, config["model_type"], found.unknowns)
        used = {path.symbol for path in found.fast_paths if path.layers}
        assert bool(used) is (config not in WITHOUT), (version, config["model_type"])
        seen += 1
    assert seen >= 5


# ---------------------------------------------------------------- tomorrow


def newer(tmp_path: Path, **changes: tuple[str, str]) -> TransformersTree:
    """A transformers 5.25.0 that differs from the newest one in a few words."""
    env = Interpreter(tmp_path / "env")
    make_venv(env.prefix)
    files = {"__init__.py": ('__version__ = "5.24.0"', '__version__ = "5.25.0"')}
    files |= {name.replace("__", "/") + ".py": change for name, change in changes.items()}
    with_changed_transformers(env, NEWEST, files)
    return find_tree(env.site / "transformers")


QWEN = "models__qwen3_5__modeling_qwen3_5"


def test_what_a_newer_release_changed_is_said_in_one_line(tmp_path: Path) -> None:
    types = ["qwen3_5_text", "mamba2", "llama"]
    before = _rows(tree(NEWEST), types)
    after = newer(tmp_path, **{QWEN: ('"chunk_gated_delta_rule", "fla"', '"chunk_gdn", "fla"')})
    assert after.version == Version("5.25.0")
    (line,) = drift(before, _rows(after, types))
    assert line.startswith("qwen3_5_text: symbols +chunk_gdn -chunk_gated_delta_rule; ")
    assert "unknowns +Nothing is known about the kernel fla.chunk_gdn" in line


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        (QWEN, '"chunk_gated_delta_rule", "fla")', '"chunk_gated_delta_rule", "fla", strict=True)', "not known here"),
        (QWEN, "use_kernel_func_from_hub_with_fallback", "use_fused_function", "not known here"),
        (
            "integrations__hub_kernels",
            "def use_kernel_func_from_hub_with_fallback(",
            "def renamed(",
            "has no use_kernel_func_from_hub_with_fallback",
        ),
    ],
)
def test_a_newer_release_that_declares_in_another_way_is_unknown(
    tmp_path: Path, file: str, old: str, new: str, says: str
) -> None:
    found = declare(parse_config(configs.QWEN3_5, source="t"), newer(tmp_path, **{file: (old, new)}))
    assert any(says in text for text in found.unknowns), found.unknowns


def test_a_newer_release_that_changed_nothing_is_read_like_the_newest(tmp_path: Path) -> None:
    config = parse_config(configs.QWEN3_5, source="t")
    found, known = declare(config, newer(tmp_path)), declare(config, tree(NEWEST))
    assert (found.fast_paths, found.unknowns, found.modes) == (known.fast_paths, known.unknowns, known.modes)
