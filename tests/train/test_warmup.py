"""What first steps compile, made ahead: which layers it takes, what it leaves, and that a run finds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from command import ROOT
from kernelguard_train import compiled, warmup
from kernelguard_train.config import CheckpointConfig, Config
from kernelguard_train.errors import ConfigError, ModelError, OutputError


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("qwen3_5", {}, 4),
        ("qwen3_5", {"num_hidden_layers": 8, "layer_types": ["linear_attention", "full_attention"] * 4}, 2),
        ("qwen3_next", {"mlp_only_layers": [1]}, 4),
        ("llama", {"num_hidden_layers": 12}, 2),
        ("llama", {"num_hidden_layers": 1}, 1),
        ("bamba", {"num_hidden_layers": 6, "attn_layer_indices": [4]}, 5),
        ("llama", {"num_hidden_layers": 12, "attn_implementation": "flash_attention_2"}, 2),
        (
            "llama",
            {"model_type": "smollm3", "num_hidden_layers": 6, "no_rope_layers": [1, 1, 1, 0, 1, 1], "pad_token_id": 0},
            4,
        ),
    ],
)
def test_as_few_layers_as_hold_one_of_each_kind(
    tmp_path: Path, architecture: str, changes: dict[str, Any], expected: int
) -> None:
    config = tiny.configured(tiny.write_config(tmp_path / "m", architecture, **changes))
    assert warmup.layers_of_each_kind(config) == expected
    shorter = replace(config, model=replace(config.model, layers=1))
    assert warmup.layers_of_each_kind(shorter) == 1, "model.layers is the run's own limit"


def test_layers_that_differ_only_in_a_setting_are_two_kinds(tmp_path: Path) -> None:
    """Every layer of Gemma 2 has the same modules; every other one attends to a window."""
    gemma = {**tiny.ARCHITECTURES["llama"], "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    gemma |= {"num_hidden_layers": 6, "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3}
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    assert warmup.layers_of_each_kind(tiny.configured(tmp_path)) == 4


def test_where_fewer_layers_make_no_model_all_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a later layer shares its weights with an earlier one (Zamba)."""
    whole = warmup._on_meta

    def refusing(config: Config) -> Any:
        if config.model.layers:
            raise ModelError("tied weights")
        return whole(config)

    monkeypatch.setattr(warmup, "_on_meta", refusing)
    config = tiny.configured(tiny.write_config(tmp_path / "m", "llama", num_hidden_layers=7))
    assert warmup.layers_of_each_kind(config) == 7


def test_it_is_the_runs_own_configuration_and_writes_nothing_of_the_run(model_folder: Path, tmp_path: Path) -> None:
    config = tiny.configured(
        model_folder, "batch.per_step=16", "model.recompute=selective", "train.steps=900", "optim.loss_chunk=512",
        "checkpoint.every=5", "checkpoint.export=true", "report.tensorboard=true", "data.streaming=true",
    )  # fmt: skip
    short = warmup.shortened(config, tmp_path)
    assert (short.train.steps, short.train.output, short.batch.per_step) == (2, str(tmp_path), 2)
    assert short.checkpoint == CheckpointConfig(every=0, at_end=False, export=False)
    assert (short.data.path, short.data.workers, short.model.init) == ("synthetic", 0, "random")
    assert not short.report.tensorboard
    assert short.optim == config.optim
    assert replace(short.batch, per_step=16) == config.batch
    assert replace(short.model, init=config.model.init, layers=config.model.layers) == config.model
    groups = replace(config, parallel=replace(config.parallel, shard=8))
    assert warmup.shortened(groups, tmp_path).parallel == config.parallel, "one rank shares with nobody"
    assert warmup.shortened(replace(config, batch=replace(config.batch, per_step=0)), tmp_path).batch.per_step == 0


def test_it_is_no_run_of_several_ranks(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="--warm-up is one process"):
        warmup.shortened(tiny.configured(model_folder), tmp_path)


def trainer(cache: Path, inductor: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "train"), "TRITON_CACHE_DIR": str(cache)}
    environ |= {"TORCHINDUCTOR_CACHE_DIR": str(inductor), "TORCH_LOGS": "+torch._inductor.codecache"}
    return subprocess.run(
        [sys.executable, "-m", "kernelguard_train", *arguments],
        capture_output=True, text=True, check=False, env=environ, cwd=cache.parent,
    )  # fmt: skip


RUN = (
    "model.init=random", "model.compute_dtype=float32", 'model.compile=["mlp"]', "data.path=synthetic",
    "data.synthetic_samples=40", "data.synthetic_median=40", "batch.window=16", "train.device=cpu", "train.steps=1",
    "checkpoint.at_end=false", "checkpoint.export=false",
)  # fmt: skip


def test_runs_find_what_was_compiled_ahead_for_each_of_them(tmp_path: Path) -> None:
    model = tiny.write_config(tmp_path / "m", "llama", num_hidden_layers=3)
    cache, output = tmp_path / "cache", tmp_path / "run"
    settings = [f"model.path={model}", f"train.output={output}", *RUN]
    for tokens in (256, 512):
        made = trainer(cache, tmp_path / f"made-{tokens}", *settings, f"batch.tokens={tokens}", "--warm-up")
        assert made.returncode == 0, made.stderr[-2000:]
        assert f"warm: {cache}, with 2 graphs of torch.compile" in made.stderr, "one forward, one backward"
    assert not output.exists()
    left = sorted(path.name for path in cache.iterdir())
    assert len(left) == len(list(cache.glob(compiled.NAME))) == 2
    ran = trainer(cache, tmp_path / "ran", *settings, "batch.tokens=256")
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert all(f"compiled: 2 graphs from {cache / name}" in ran.stderr for name in left)
    assert "fx graph cache hit" in ran.stderr
    assert "fx graph cache miss" not in ran.stderr
    assert sorted(path.name for path in cache.iterdir()) == left, "a run leaves the folder as it is"


def test_a_stop_ends_it_where_it_is_and_leaves_nothing(tmp_path: Path) -> None:
    model = tiny.write_config(tmp_path / "m", "llama", num_hidden_layers=3)
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "train"), "TMPDIR": str(tmp_path / "tmp")}
    environ.pop("TRITON_CACHE_DIR", None)
    # So large that the check of isolation alone takes seconds, into which the stop falls.
    settings = [f"model.path={model}", *RUN[:2], *RUN[3:], "batch.tokens=16384", "--warm-up"]
    command = [sys.executable, "-m", "kernelguard_train", *settings]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stderr is not None
        try:
            while "attention: sdpa" not in (line := process.stderr.readline()):
                assert line, "it ended before it could be stopped"
            process.terminate()
            told = process.stderr.read()
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()
    assert "error: asked to stop; nothing is kept\n" in told
    assert not list((tmp_path / "tmp").glob("kernelguard-train-*"))


def test_what_cannot_be_unpacked_is_told_and_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiled.load() == 0
    (tmp_path / "torch-compile-a.bin").write_bytes(b"of another torch")
    assert compiled.load() == 0
    assert f"what torch.compile made before is not used: {tmp_path / 'torch-compile-a.bin'}" in caplog.text


def test_where_nothing_can_be_left_the_folder_is_named(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny.configured(model_folder)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "x"))
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: (b"x", None))
    with pytest.raises(OutputError, match=r"TRITON_CACHE_DIR: .*torch-compile-\w+.bin cannot be written: Not a dir"):
        compiled.save(config)
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert "as TRITON_CACHE_DIR is not set" in compiled.save(config)
