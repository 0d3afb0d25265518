"""The notes on models say what the sources say, in every release they name and in no other."""

from __future__ import annotations

import ast

import pytest
from packaging.version import Version

from kernelguard.declare import find_tree
from kernelguard.declare.notes import SlowClass, model_notes
from observed import VERSIONS, transformers_base

pytestmark = pytest.mark.observed
NOTES = model_notes()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("slow", NOTES.always_slow, ids=lambda slow: slow.name)
def test_a_slow_class_loops_and_declares_nothing(version: str, slow: SlowClass) -> None:
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


def test_liger_releases_are_in_order_and_types_come_with_one_that_was_read() -> None:
    liger = NOTES.liger
    assert list(liger.read) == sorted(liger.read)
    assert set(liger.since.values()) <= set(liger.read)
    assert liger.since["llama"] == liger.minimum == Version("0.3.0")
    assert liger.since["qwen3_5"] == Version("0.8.0")
    assert "qwen4_exp" not in liger.since
