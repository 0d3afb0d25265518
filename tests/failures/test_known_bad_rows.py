"""Rows that a known bad combination explains: the machine of the row, and a twin that differs in what matters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from failure_asks import GOOD, described

import configs
from kernelguard.observe.values import GpuState

pytestmark = pytest.mark.observed

MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
}
FALCON = {**MAMBA, "model_type": "falcon_mamba", "architectures": ["FalconMambaForCausalLM"]}
GROUPED_NOT = {**configs.QWEN3_5, "linear_num_value_heads": 2}
"""As many value heads as key heads, so that only the fault of the row is there."""
FA2 = {"attn_implementation": "flash_attention_2"}
SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")


def fla(version: str, **others: str) -> dict[str, str]:
    return {**GOOD, "fla-core": version, "flash-linear-attention": version, **_dashed(others)}


def pkgs(**versions: str) -> dict[str, str]:
    return {**GOOD, **_dashed(versions)}


def _dashed(versions: Mapping[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): version for name, version in versions.items()}


@dataclass(frozen=True)
class Row:
    """`code` is said of this machine with `status`, and not of the twin."""

    code: str
    status: str
    twin: dict[str, Any]
    config: dict[str, Any] = field(default_factory=lambda: configs.QWEN3_5)
    fix: str = ""
    asked: dict[str, Any] = field(default_factory=dict)


CASES: dict[str, Row] = {
    "B18": Row(
        "fla-old-torch",
        "warn",
        {"machine": {"torch": "2.10.0a0+nv25.11", "torch_cuda": "13.0"}},
        asked={"gpu": "9.0", "machine": {"torch": "2.5.0a0+nv24.10", "torch_cuda": "12.6"}},
    ),
    "B24": Row(
        "mamba-conv1d-arity",
        "fail",
        {"pkgs": pkgs(mamba_ssm="1.2.0.post1", causal_conv1d="1.1.1")},
        MAMBA,
        asked={"gpu": "9.0", "pkgs": pkgs(mamba_ssm="1.2.2", causal_conv1d="1.5.2")},
    ),
    "B26": Row(
        "mamba-needs-conv1d-cpp-functions",
        "fail",
        {"pkgs": pkgs(mamba_ssm="2.3.1", causal_conv1d="1.6.1")},
        MAMBA,
        asked={"gpu": "9.0", "pkgs": pkgs(mamba_ssm="2.3.1", causal_conv1d="1.4.0")},
    ),
    "B30": Row(
        "transformers-fla-minimum",
        "fail",
        {"pkgs": fla("0.4.1")},
        configs.QWEN3_NEXT,
        asked={"gpu": "8.0", "pkgs": fla("0.2.0"), "transformers": "5.5.4"},
    ),
    "C01": Row(
        "fla-hopper-dqkwg",
        "fail",
        {"machine": {"triton": "3.7.1"}},
        GROUPED_NOT,
        "triton>=3.7.1",
        {"gpu": "9.0", "machine": {"triton": "3.5.0"}, "pkgs": fla("0.4.1")},
    ),
    "C02": Row(
        "fla-hopper-dqkwg-raise2",
        "fail",
        {"machine": {"triton": "3.7.1"}},
        GROUPED_NOT,
        "triton>=3.7.1",
        {"gpu": "9.0", "machine": {"triton": "3.6.0"}},
    ),
    "C04": Row(
        "fla-blackwell-fwdh-race",
        "fail",
        {"machine": {"triton": "3.8.0"}, "pkgs": GOOD},
        asked={"gpu": "10.0", "machine": {"triton": "3.7.0"}, "pkgs": fla("0.5.0")},
    ),
    "C05": Row(
        "fla-blackwell-hoist-tmem",
        "fail",
        {"pkgs": fla("0.4.1")},
        asked={"gpu": "10.0", "machine": {"triton": "3.4.0"}, "pkgs": fla("0.4.0")},
    ),
    "C06": Row(
        "cc1d-cu13-wheel-sm103",
        "warn",
        {"machine": {"torch_cuda": "12.9"}},
        asked={"gpu": "10.3", "pkgs": pkgs(causal_conv1d="1.6.1")},
    ),
    "C08": Row("torch-cuda13-old-gpu", "fail", {"machine": {"torch_cuda": "12.6"}}, asked={"gpu": "6.1"}),
    "C09": Row(
        "fa2-sm121",
        "warn",
        {"gpu": "9.0"},
        configs.LLAMA,
        asked={"gpu": "12.1", "pkgs": {"flash-attn": "2.8.3"}, **FA2},
    ),
    "C10": Row(
        "triton-sm121a",
        "fail",
        {"machine": {"triton": "3.5.0", "ptxas": "13.0"}},
        asked={"gpu": "12.1", "machine": {"triton": "3.5.0", "ptxas": "12.8"}},
    ),
    "C12": Row(
        "mamba-seq-idx-layout",
        "warn",
        {"packed": False, "signals": None},
        configs.MAMBA2,
        asked={"gpu": "9.0", "pkgs": pkgs(mamba_ssm="2.2.6.post3"), "packed": True, "signals": SIGNALS},
    ),
    "C14": Row(
        "fa2-head-dim-backward",
        "fail",
        {"gpu": "8.0"},
        {**configs.LLAMA, "head_dim": 256},
        asked={"gpu": "8.6", "pkgs": {"flash-attn": "2.5.2"}, **FA2},
    ),
    "C16": Row(
        "triton-320-hopper-abort",
        "warn",
        {"machine": {"triton": "3.1.0"}},
        asked={"gpu": "9.0", "machine": {"triton": "3.2.0"}, "pkgs": fla("0.3.2")},
    ),
    "C17": Row(
        "mamba-chunk-scan-overrun",
        "fail",
        {"pkgs": GOOD},
        configs.MAMBA2,
        asked={"gpu": "9.0", "pkgs": pkgs(mamba_ssm="2.2.2")},
    ),
    "C18": Row(
        "mamba-220-gradients",
        "fail",
        {"pkgs": pkgs(mamba_ssm="2.2.1")},
        configs.MAMBA2,
        asked={"gpu": "9.0", "pkgs": pkgs(mamba_ssm="2.2.0")},
    ),
    "C20": Row(
        "falcon-mamba-plain-inner",
        "fail",
        {"pkgs": pkgs(mamba_ssm="2.2.4")},
        FALCON,
        asked={"gpu": "9.0", "pkgs": pkgs(mamba_ssm="2.2.2")},
    ),
    "C21": Row(
        "fa2-pre-ampere",
        "fail",
        {"attn_implementation": "sdpa"},
        configs.LLAMA,
        asked={"gpu": "7.5", "pkgs": {"flash-attn": "2.7.4.post1"}, **FA2},
    ),
    "C22": Row(
        "liger-unsupported",
        "fail",
        {"pkgs": pkgs(liger_kernel="0.8.0")},
        fix="liger-kernel>=0.8.0",
        asked={"gpu": "9.0", "pkgs": pkgs(liger_kernel="0.7.0"), "liger": True},
    ),
    "D02": Row(
        "boundary-never-passed",
        "fail",
        {"transformers": "5.17.0"},
        fix="transformers>=5.17",
        asked={"gpu": "9.0", "transformers": "5.5.4", "packed": True, "signals": SIGNALS},
    ),
    "F02": Row(
        "cuda13-driver",
        "fail",
        {"machine": {"driver": "580.65.06", "gpu_state": GpuState.BROKEN}},
        configs.LLAMA,
        asked={"gpu": "9.0", "machine": {"driver": "570.86.15", "gpu_state": GpuState.BROKEN}},
    ),
    "H03": Row(
        "fa-two-owners",
        "warn",
        {"pkgs": {"flash-attn": "2.8.3"}},
        configs.LLAMA,
        asked={"gpu": "9.0", "pkgs": {"flash-attn": "2.8.3", "sgl-kernel": "0.3.0"}, **FA2},
    ),
    "H07": Row(
        "mamba-switch-without-effect",
        "warn",
        {"transformers": "5.5.4"},
        {**configs.JAMBA, "use_mamba_kernels": False},
        asked={"gpu": "9.0"},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_row_and_its_twin(tmp_path: Path, name: str) -> None:
    row = CASES[name]
    said = described(tmp_path / "row", row.config, **row.asked)
    assert said.finding(row.code)["status"] == row.status
    assert row.fix in said.text()
    # Nothing was executed, so that only a definite no and "cannot tell" are possible where kernels are needed.
    assert said.code == (1 if "fail" in {f["status"] for f in said.findings} else 3)
    twin = described(tmp_path / "twin", row.config, **{**row.asked, **row.twin})
    assert row.code not in twin.codes()
