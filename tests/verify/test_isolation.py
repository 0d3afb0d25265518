"""Packed isolation in real transformers models: clean only with every signal, and each one left out makes it fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import packages
import pytest

import configs
import observed
from kernelguard.declare.values import SubModel
from kernelguard.verify.isolation import run_isolation, signal_sets
from kernelguard.verify.values import SignalCheck

pytestmark = pytest.mark.observed

ALL = ("position_ids", "cu_seq_lens_q", "seq_idx")
SINGLE = tuple(((name,), "") for name in ALL)


def check(folder: Path, version: str, files: dict[str, str], sets: Any, raw: dict[str, Any]) -> list[SignalCheck]:
    env = observed.environment(folder / "env", version, files)
    part = SubModel(path="", model_type=raw["model_type"], raw=raw)
    found = run_isolation(
        str(env.python), [part], sets, dtype="float32", device="cpu", lengths=(11, 1, 7), timeout=180.0
    )
    return list(found)


@pytest.mark.parametrize("version", ["5.16.1", "5.17.0", "5.24.0"])
def test_clean_with_all_signals_and_leaks_with_any_left_out(version: str, tmp_path: Path) -> None:
    every, *rest = check(tmp_path, version, packages.working(), (*signal_sets(ALL), *SINGLE), configs.QWEN3_5)
    assert every.isolated is True, every
    assert every.leak_gradient == every.leak_logit == 0.0
    assert every.loss_packed == pytest.approx(every.loss_unpacked, rel=1e-6)
    assert every.worst_error is not None
    assert every.allowed is not None
    assert every.worst_error <= every.allowed < 1e-4
    assert [c.left_out for c in rest[:3]] == list(ALL)
    for one in rest:
        assert one.isolated is False, one
        assert (one.leak_gradient or 0.0) > 1e-3
        assert (one.leak_logit or 0.0) > 1e-3
    linear, attention = "Qwen3_5GatedDeltaNet", "Qwen3_5Attention"
    blamed = {c.left_out: " ".join(c.leaking_layers) for c in rest[:3]}
    assert attention in blamed["position_ids"]
    assert linear not in blamed["position_ids"]
    assert linear in blamed["cu_seq_lens_q"]
    assert linear in blamed["seq_idx"]
    assert all((c.worst_error or 0.0) > 100 * (c.allowed or 0.0) for c in rest[:3])


def test_a_kernel_that_ignores_boundaries_leaks_whatever_is_sent(tmp_path: Path) -> None:
    files = packages.working()
    ops = files["fla/ops/gated_delta_rule/__init__.py"]
    spoilt = ops.replace(
        "cuts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()", "cuts = [0, q.shape[1]]"
    )
    assert spoilt != ops
    files["fla/ops/gated_delta_rule/__init__.py"] = spoilt
    (found,) = check(tmp_path, "5.24.0", files, signal_sets(ALL)[:1], configs.QWEN3_5)
    assert found.isolated is False
    assert found.leaking_layers
    assert all("GatedDeltaNet" in layer for layer in found.leaking_layers)


def test_a_model_that_cannot_be_built_is_could_not_tell(tmp_path: Path) -> None:
    raw = {**configs.QWEN3_5, "model_type": "qwen99"}
    (found,) = check(tmp_path, "5.24.0", {}, signal_sets(ALL)[:1], raw)
    assert found.isolated is None
    assert "qwen99: unknown to this transformers" in found.detail
