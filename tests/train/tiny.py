"""Tiny models of real architectures, and the configuration that trains them on a CPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernelguard_train import configfile
from kernelguard_train.chat import Sample
from kernelguard_train.config import Config
from kernelguard_train.demo.make import CHATS, tiny_qwen
from kernelguard_train.ranks import Ranks, StopRequest
from kernelguard_train.report import Report
from kernelguard_train.train import train

VOCABULARY = 600
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3_5": tiny_qwen(VOCABULARY),
    "qwen3_next": {
        **tiny_qwen(VOCABULARY),
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "llama": {
        **_SIZES,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "tie_word_embeddings": True,
    },
    "bamba": {
        **_SIZES,
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_expand": 2,
        "mamba_chunk_size": 32,
        "tie_word_embeddings": False,
    },
}


def write_config(folder: Path, architecture: str, **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ARCHITECTURES[architecture] | changes))
    return folder


def configured(model: Path, *overrides: str) -> Config:
    """A run on the bundled chats, small enough for a test."""
    base = [
        f"model.path={model}",
        f"data.path={CHATS}",
        "model.init=random",
        "model.compute_dtype=float32",
        "model.recompute=none",
        "batch.tokens=256",
        "batch.window=32",
        "data.workers=0",
        "train.device=cpu",
        "optim.lr=3e-3",
        "report.progress=false",
        "checkpoint.every=0",
        "checkpoint.export=false",
    ]
    return configfile.load(None, [*base, *overrides])


def run(config: Config, ranks: Ranks, report: Report | None = None) -> list[dict[str, Any]]:
    """Trains, and returns what was logged of every step so far, earlier runs in the same folder included."""
    with report or Report(config, first=ranks.first) as sink, StopRequest() as stop:
        train(config, ranks, sink, stop)
    return logged(config)


def logged(config: Config) -> list[dict[str, Any]]:
    lines = (Path(config.train.output) / "steps.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def synthetic(folder: Path, architecture: str, output: Path) -> Config:
    """Two steps of two small batches of random tokens."""
    changes = [
        "data.path=synthetic",
        "data.synthetic_median=40",
        "train.steps=2",
        "batch.per_step=2",
        "batch.tokens=128",
    ]
    return configured(write_config(folder / architecture, architecture), f"train.output={output}", *changes)


def samples(lengths: Sequence[int], seed: int = 0) -> list[Sample]:
    """Samples of random tokens; the first third of each is a prompt."""
    draw = np.random.default_rng(seed)
    return [
        Sample(name=f"s{i}", ids=draw.integers(0, VOCABULARY, n), trained=np.arange(n) >= n // 3)
        for i, n in enumerate(lengths)
    ]


def remember(model: torch.nn.Module) -> None:
    """Makes recurrent states last: at their initial values forget gates hide a leak within a few tokens."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-5.0)
            elif name.endswith("dt_bias"):
                parameter.fill_(0.1)
