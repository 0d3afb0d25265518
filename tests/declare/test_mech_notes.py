"""The notes on models say what the sources say, in every release they name and in no other."""

from __future__ import annotations

import ast

import pytest
from packaging.version import Version

from kernelguard.declare import declare, find_tree, parse_config
from kernelguard.declare.modes import CarriesState
from kernelguard.declare.notes import NotedClass, model_notes
from observed import VERSIONS, transformers_base

pytestmark = pytest.mark.observed
NOTES = model_notes()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("slow", NOTES.always_slow, ids=lambda slow: slow.name)
def test_a_slow_class_loops_and_declares_nothing(version: str, slow: NotedClass) -> None:
    file = find_tree(transformers_base(version).site / "transformers").root / slow.file
    text = file.read_text("utf-8") if file.is_file() else ""
    node = next((n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == slow.name), None)
    assert (node is not None) == slow.transformers.contains(version)
    if node is None:
        return
    assert any(isinstance(n, ast.For) for n in ast.walk(node))
    decorators = [ast.unparse(d) for d in node.decorator_list]
    assert not [d for d in decorators if "kernel" in d]


def test_slow_classes_were_read_up_to_the_newest_release_and_no_further() -> None:
    for slow in NOTES.always_slow:
        assert slow.transformers.contains(VERSIONS[-1])
        assert not slow.transformers.contains("99.0")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("noted", NOTES.carries_state, ids=lambda noted: noted.name)
def test_a_class_that_carries_state_takes_no_boundaries(version: str, noted: NotedClass) -> None:
    file = find_tree(transformers_base(version).site / "transformers").root / noted.file
    text = file.read_text("utf-8") if file.is_file() else ""
    node = next((n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == noted.name), None)
    assert (node is not None) == noted.transformers.contains(version)
    if node is not None:
        assert not {"seq_idx", "cu_seqlens", "cu_seq_lens_q"} & {
            n.id for n in ast.walk(node) if isinstance(n, ast.Name)
        }


def test_a_model_reaches_the_class_that_carries_its_state() -> None:
    tree = find_tree(transformers_base("5.24.0").site / "transformers")
    for name in ("minimax", "recurrent_gemma", "zaya", "rwkv", "deepseek_v4"):
        found = declare(parse_config({"model_type": name}, source="test"), tree).modes
        assert [f.model_type for f in found if isinstance(f, CarriesState)] == [name]
    llama = declare(parse_config({"model_type": "llama"}, source="test"), tree).modes
    assert not [f for f in llama if isinstance(f, CarriesState)]


def test_liger_releases_are_in_order_and_types_come_with_one_that_was_read() -> None:
    liger = NOTES.liger
    assert list(liger.read) == sorted(liger.read)
    assert set(liger.since.values()) <= set(liger.read)
    assert liger.since["llama"] == liger.minimum == Version("0.3.0")
    assert liger.since["qwen3_5"] == Version("0.8.0")
    assert "qwen4_exp" not in liger.since
