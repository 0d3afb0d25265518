"""`kernelguard verify` as a command: what it takes, and what it refuses before it measures anything."""

from __future__ import annotations

import json
from pathlib import Path

import packages
import pytest

import configs
import observed
from command import Command
from kernelguard.declare.config import read_config
from kernelguard.lock.document import dumps, to_document
from kernelguard.lock.parts import locked_model
from kernelguard.lock.values import Lock, LockedTarget, LockedTorch, Pin, Role
from kernelguard.verify.files import load_verdict

SIGNALS = "position_ids,cu_seq_lens_q,seq_idx"


def lock_file(folder: Path, model: Path) -> Path:
    """Of a model, with another fla than the one that is installed."""
    name = "fla_core-0.5.2-py3-none-any.whl"
    pin = Pin(
        name="fla-core", version="0.5.2", filename=name, url=f"https://e.x/{name}", sha256="0" * 64, role=Role.KERNEL
    )
    target = LockedTarget(
        spec="cpu", python="3.11", machine="x86_64", glibc="2.28", driver="", gpus=(), capabilities=()
    )
    torch = LockedTorch(version="2.13.0", cuda="", channel="cpu", cxx11_abi=True, triton="")
    lock = Lock(
        model=locked_model(read_config(str(model))), intent=(("packed", "True"), ("signals", SIGNALS)),
        transformers="5.24.0", target=target, torch=torch, fast_paths=(), pins=(pin,), admits_launch=False,
    )  # fmt: skip
    path = folder / "kernelguard.lock"
    path.write_text(dumps(lock))
    return path


@pytest.mark.observed
@pytest.mark.thorough
def test_a_lock_says_what_is_verified_and_its_digest_is_in_the_verdict(tmp_path: Path) -> None:
    env = observed.environment(tmp_path / "env", "5.24.0", packages.working())
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    path = lock_file(tmp_path, model)
    output = tmp_path / "verdict.json"
    run = Command("verify", path, "--python", env.python, "--level", "import", "-o", output, "--length", "128")
    assert output.exists(), run.err
    verdict = load_verdict(output)
    assert verdict.subject is not None
    assert verdict.subject.lock == json.loads(json.dumps(to_document(_read(path))))["digest"]
    assert verdict.subject.config_sha256 == _read(path).model.sha256
    assert verdict.subject.length == 128
    assert set(verdict.subject.layers) == {"linear_attention", "full_attention"}
    assert verdict.subject.intent["signals"] == SIGNALS.split(",")
    assert {(p.symbol, p.bound_to) for p in verdict.fast_paths} >= {("chunk_gated_delta_rule", "kernel")}
    assert set(verdict.phases) >= {"check", "prepare", "chunk_gated_delta_rule"}
    assert run.code == 1, run.out
    assert "fla-core 0.6.0 is installed, the lock has 0.5.2" in " ".join(run.out.split())


def _read(path: Path) -> Lock:
    from kernelguard.lock import load_lock

    return load_lock(path)


def test_another_model_than_the_locks_is_refused(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    path = lock_file(tmp_path, model)
    configs.write(tmp_path / "model", {**configs.QWEN3_5, "hidden_size": 4096})
    run = Command("verify", path, "--level", "import")
    assert run.code == 2
    assert "is not the model of the lock" in run.err


def test_a_trace_needs_a_gpu(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    run = Command("verify", model, "--trace", "--level", "import")
    assert run.code == 2
    assert "--trace records what a GPU runs" in run.err


def test_what_to_resume_has_to_be_a_verdict(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    (tmp_path / "v.json").write_text("{}")
    run = Command("verify", model, "--level", "import", "--resume", tmp_path / "v.json")
    assert run.code == 2
    assert "is no verdict" in run.err


@pytest.mark.parametrize("option", ["--trace", "--warm-cache=cache", "--resume=v.json"])
def test_what_names_this_machine_does_not_go_with_an_image(option: str, tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    run = Command("verify", model, "--image", "train:v1", option)
    assert run.code == 2
    assert "cannot be combined with --image" in run.err


def test_without_an_engine_an_image_cannot_be_told(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    run = Command("verify", model, "--image", "train:v1", env={"DOCKER_HOST": f"unix://{tmp_path}/nothing"})
    assert run.code == 3
    assert "no Docker engine answers" in run.err
