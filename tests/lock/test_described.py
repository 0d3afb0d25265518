"""A lock as the subject of a check: for this model, serving this run, and not spoken against by a rule."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import configs
from kernelguard.check import Request, run_check
from kernelguard.declare.config import read_config
from kernelguard.lock import write_lock
from kernelguard.lock.parts import locked_model
from kernelguard.lock.values import Lock, LockedPath
from kernelguard.report.document import to_document
from observed import transformers_base
from samples import pin, sample_lock

CONV, GDN = "causal_conv1d_fn", "chunk_gated_delta_rule"


def made(model: Path) -> Lock:
    """A lock for an H100 that serves both kernels of that model."""
    return sample_lock(
        model=locked_model(read_config(str(model))),
        fast_paths=(
            LockedPath(symbol=CONV, package="causal_conv1d", served_by="causal-conv1d 1.7.0", layers=3),
            LockedPath(symbol=GDN, package="fla", served_by="flash-linear-attention 0.6.0", layers=3),
        ),
        pins=(
            pin("causal-conv1d", "1.7.0"),
            pin("fla-core", "0.6.0"),
            pin("flash-linear-attention", "0.6.0"),
            pin("triton", "3.7.1"),
            pin("transformers", "5.24.0"),
        ),
    )


def asked(tmp_path: Path, lock: Lock, model: Path) -> dict[str, Any]:
    write_lock(lock, tmp_path / "kernelguard.lock")
    tree = transformers_base("5.24.0").site / "transformers"
    request = Request(model=str(model), flags={}, lock=tmp_path / "kernelguard.lock", transformers=str(tree))
    return to_document(run_check(request, {"PATH": "", "HOME": str(tmp_path)}))


def codes(said: dict[str, Any], status: str) -> set[str]:
    return {f["code"] for f in said["findings"] if f["status"] == status}


def test_a_lock_that_serves_the_run_holds_at_level_resolve(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", dict(configs.QWEN3_5))
    said = asked(tmp_path, made(model), model)
    assert codes(said, "pass") == {"locked"}
    assert not codes(said, "fail")
    assert (said["exit_code"], said["level"], said["environment"]["gpu_state"]) == (0, "resolve", "usable")


def test_a_lock_of_another_configuration_is_a_no(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", dict(configs.QWEN3_5))
    lock = made(model)
    changed = configs.write(tmp_path / "changed", {**configs.QWEN3_5, "linear_num_value_heads": 8})
    said = asked(tmp_path, lock, changed)
    assert said["exit_code"] == 1
    assert codes(said, "fail") == {"lock-other-model"}


def test_a_kernel_that_the_lock_leaves_out_is_a_no(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", dict(configs.QWEN3_5))
    lock = made(model)
    said = asked(tmp_path, dataclasses.replace(lock, fast_paths=lock.fast_paths[:1]), model)
    assert said["exit_code"] == 1
    assert {f["fast_path"] for f in said["findings"] if f["code"] == "not-locked"} == {GDN}


def test_rules_speak_about_what_is_pinned(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", dict(configs.QWEN3_5))
    lock = made(model)
    pins = tuple(pin("triton", "3.6.0") if p.name == "triton" else p for p in lock.pins)
    old = dataclasses.replace(lock, torch=dataclasses.replace(lock.torch, triton="3.6.0"), pins=pins)
    said = asked(tmp_path, old, model)
    assert said["exit_code"] == 1
    assert "fla-hopper-dqkwg-raise2" in codes(said, "fail")


def test_a_fleet_is_locked_again_for_all_of_it(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", dict(configs.QWEN3_5))
    lock = made(model)
    fleet = dataclasses.replace(lock, target=dataclasses.replace(lock.target, spec="a100 + h100"), fast_paths=())
    fixes = {f["fix"] for f in asked(tmp_path, fleet, model)["findings"] if f["code"] == "not-locked"}
    assert fixes == {f"kernelguard lock {model} --target a100 --target h100"}
