"""The main job on a CPU: lock, verify and launch the bundled trainer with its fused layers and its own convolution.

Two gloo ranks; fla and causal-conv1d are crafted ones that work on a CPU, the trainer's Triton kernel is interpreted.
On GPUs `benchmarks/two_h200.toml` does the same with the real kernels.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import launch_world
import pytest

import observed
from command import ROOT, Command

pytestmark = [pytest.mark.thorough, pytest.mark.observed]
NORM = """
import torch
import torch.nn.functional as F

def rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
                   eps=1e-6):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (weight.float() * y * F.silu(g.float())).to(x.dtype)
"""
MODEL = {**launch_world.TINY, "hidden_size": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 64, "linear_value_head_dim": 64}  # fmt: skip
"""As small as the trainer's own convolution takes it."""
# A configuration with device = "cpu" would not ask for the fused layers, so that is said here.
INTENT = """
packed = true
signals = ["position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"]
attn_implementation = "sdpa"
grouped_heads = true
own_convolution = true
"""
INTERPRETED = {"PYTHONPATH": str(ROOT / "train"), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}


@dataclass(frozen=True, slots=True)
class Prepared:
    folder: Path
    python: Path

    def command(self, *words: str | Path) -> Command:
        return Command(*words, "--python", self.python, "--intent", self.folder / "intent.toml", env=INTERPRETED)

    def launch(self, run_dir: Path) -> Command:
        fixed = ["launch", self.folder / "k.lock", "--verdict", self.folder / "k.verdict.json", "--python", self.python]
        options = ["--test-only-accept-level", "interpreted", "--processes", "2", "--run-dir", run_dir]
        return Command(
            *fixed, *options, "--", "-m", "kernelguard_train", f"model.path={self.folder / 'model' / 'config.json'}",
            "model.init=random", "model.compute_dtype=float32", "model.kernels=fused", "model.fused=on",
            "model.attention=sdpa", "data.path=synthetic", "data.synthetic_samples=500", "batch.tokens=128",
            f"train.output={run_dir}-out", "train.steps=1", "train.device=cpu", "checkpoint.every=0",
            "checkpoint.at_end=true", "checkpoint.export=false", "report.progress=false",
            env=INTERPRETED,
        )  # fmt: skip


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    """The interpreter is kept for later test runs; lock and verdict are made anew."""
    folder = observed.CACHE / f"launch-trainer-{launch_world.VERSION}"
    with observed._locked(folder.name):
        env = observed.Interpreter(folder / "env")
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            launch_world.make_interpreter(folder / "env", {"fla/modules/fused_norm_gate.py": NORM})
            observed._pip_install(env, "triton==3.7.1", "datasets>=4.0", "tqdm", "jinja2>=3.1.6")
            (folder / "complete").touch()
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text(json.dumps(MODEL))
        (folder / "intent.toml").write_text(INTENT)
        made = Prepared(folder, env.python)
        config = folder / "model" / "config.json"
        locked = made.command("lock", config, "--record", "-o", folder / "k.lock")
        assert locked.code == 0, locked.out + locked.err
        verified = made.command(
            "verify", config, "--level", "interpreted", "--length", "64", "-o", folder / "k.verdict.json"
        )
        assert verified.code == 3, verified.out + verified.err  # without a GPU it is never a pass
    return made


def test_the_trainer_runs_on_what_was_verified_and_the_guard_sees_it(prepared: Prepared, tmp_path: Path) -> None:
    verdict = json.loads((prepared.folder / "k.verdict.json").read_text())
    assert {probe["symbol"]: probe["outcome"] for probe in verdict["probes"]} == dict.fromkeys(
        ("causal_conv1d_fn", "chunk_gated_delta_rule", "FusedRMSNormGated", "packed_convolution",
         "scaled_dot_product_attention"), "right",
    )  # fmt: skip
    done = prepared.launch(tmp_path / "run")
    assert done.code == 0, done.out + done.err
    said = done.out + done.err
    assert "gated delta layers without repeated heads, 1 with the trainer's own convolution" in said
    assert "after step 1 the model is as it was admitted" in said
    steps = (tmp_path / "run-out" / "steps.jsonl").read_text().splitlines()
    assert len(steps) == 1
    (checkpoint,) = (tmp_path / "run-out" / "checkpoints").glob("step-*")
    attestation = json.loads((checkpoint / "kernelguard-attestation.json").read_text())
    assert attestation["bound"]["causal_conv1d_fn in modeling_qwen3_5"] == "package causal_conv1d.causal_conv1d_fn"
    assert attestation["intent"]["own_convolution"] == "True"
