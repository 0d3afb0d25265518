"""Rows about kernels that are not there, ignored or switched away, and about packed samples: from captured files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from failure_asks import CONV, GDN, GOOD, TRAINING, at_target, described

import configs
from kernelguard.matrix import kernel_packages
from kernelguard.observe.values import GpuState
from kernelguard.report.difference import Suspicion, compare, load_document

pytestmark = pytest.mark.observed

SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")
WITHOUT_CONV = {name: version for name, version in GOOD.items() if name != "causal-conv1d"}
LAYERS = {**configs.QWEN3_5, "num_hidden_layers": 32, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}


def test_a02_nothing_installed_names_every_kernel_and_counts_the_layers(tmp_path: Path) -> None:
    said = described(tmp_path, LAYERS, pkgs={}, gpu="10.0", machine={"torch": "2.11.0", "torch_cuda": "12.8"})
    assert said.code == 1
    for symbol in TRAINING:
        assert said.paths[symbol]["codes"] == ("not-installed",)
        assert said.paths[symbol]["layers"] == 24
        assert "pip install" in said.paths[symbol]["fix"]


def test_a04_one_missing_package_costs_one_op_of_qwen_and_the_whole_layer_of_mamba(tmp_path: Path) -> None:
    qwen = described(tmp_path / "qwen", transformers="5.5.4", pkgs=WITHOUT_CONV, gpu="9.0")
    assert (qwen.paths[CONV]["codes"], qwen.paths[CONV]["status"]) == (("not-installed",), "fail")
    # Per op: nothing is said against the delta rule, whatever the log of that release claims.
    assert not set(qwen.paths[GDN]["codes"]) & {"not-installed", "gated-off"}
    assert qwen.paths[GDN]["status"] == "unknown"
    assert "Qwen3_5GatedDeltaNet" in qwen.paths[CONV]["reason"]
    mamba = described(tmp_path / "mamba", configs.MAMBA2, transformers="5.5.4", pkgs=WITHOUT_CONV, gpu="9.0")
    assert "Mamba2Mixer.torch_forward" in mamba.paths[CONV]["reason"]
    assert mamba.paths["causal_conv1d_update"]["status"] == "fail"


def test_a05_a_missing_kernel_is_a_no_whatever_a_short_timing_says(tmp_path: Path) -> None:
    said = described(tmp_path, transformers="5.17.0", pkgs={}, gpu="8.6", machine={"torch": "2.14.0"})
    assert said.code == 1
    assert {s for s in TRAINING if said.paths[s]["status"] == "fail"} == set(TRAINING)


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0"])
def test_a07_compiling_hides_the_warning_and_not_the_answer(tmp_path: Path, version: str) -> None:
    said = described(tmp_path / "compiled", transformers=version, pkgs={}, compile=True)
    plain = described(tmp_path / "plain", transformers=version, pkgs={})
    assert said.code == plain.code == 1
    assert said.paths[GDN]["codes"] == plain.paths[GDN]["codes"] == ("not-installed",)


def test_a12_two_machines_that_run_different_code_are_told_apart_by_their_reports(tmp_path: Path) -> None:
    said = {
        "fast": described(tmp_path / "fast", gpu="9.0"),
        "slow": described(tmp_path / "slow", gpu="9.0", pkgs=WITHOUT_CONV, machine={"driver": "580.65.06"}),
    }
    for name, one in said.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(one.document))
    documents = [load_document(tmp_path / f"{name}.json") for name in said]
    first = compare(documents[0], documents[1], kernel_packages().values())[0]
    assert first.suspicion is Suspicion.BINDING
    assert CONV in first.subject
    assert compare(documents[0], documents[0], kernel_packages().values()) == ()


def test_a14_old_mamba_goes_around_its_kernels_when_compiled(tmp_path: Path) -> None:
    old = described(tmp_path / "old", configs.MAMBA2, transformers="5.5.4", gpu="9.0", compile=True)
    assert old.code == 1
    assert "blocked-by-compile" in old.paths[CONV]["codes"]
    assert "torch.compile" in old.text()
    eager = described(tmp_path / "eager", configs.MAMBA2, transformers="5.5.4", gpu="9.0")
    new = described(tmp_path / "new", configs.MAMBA2, transformers="5.24.0", gpu="9.0", compile=True)
    assert "blocked-by-compile" not in eager.codes() | new.codes()
    assert eager.code == new.code == 3


def test_b22_a_cpu_torch_on_a_gpu_machine(tmp_path: Path) -> None:
    cpu: dict[str, Any] = {
        "torch": "2.8.0+cpu",
        "torch_cuda": None,
        "torch_is_cpu": True,
        "gpu_state": GpuState.CPU_TORCH,
    }
    said = described(tmp_path / "gpu", gpu="9.0", machine={**cpu, "machine": "aarch64"})
    assert said.code == 1
    assert said.finding("cpu-torch-on-gpu-machine")["status"] == "fail"
    without_gpu = described(tmp_path / "none", machine=cpu)
    assert "cpu-torch-on-gpu-machine" not in without_gpu.codes()


def test_d03_boundaries_that_reach_one_op_of_two_name_the_other(tmp_path: Path) -> None:
    said = described(tmp_path, packed=True, signals=("position_ids", "cu_seq_lens_q"))
    assert said.code == 1
    assert "signal-not-sent" in said.paths[CONV]["codes"]
    assert "signal-not-sent" not in said.paths[GDN]["codes"]
    assert "seq_idx" in said.paths[CONV]["fix"]


def test_d04_packing_without_the_convolution_package_is_a_no(tmp_path: Path) -> None:
    said = described(tmp_path, pkgs=WITHOUT_CONV, packed=True, signals=SIGNALS)
    assert said.code == 1
    assert said.paths[CONV]["status"] == "fail"
    assert said.paths[GDN]["status"] != "fail"


def test_d06_position_ids_alone_do_not_reach_recurrent_layers(tmp_path: Path) -> None:
    said = described(tmp_path / "alone", packed=True, signals=("position_ids",))
    assert said.code == 1
    for symbol in TRAINING:
        assert "signal-not-sent" in said.paths[symbol]["codes"]
    assert "return_flash_attn_kwargs=True" in said.paths[GDN]["fix"]
    assert "return_seq_idx=True" in said.paths[CONV]["fix"]
    all_sent = described(tmp_path / "all", packed=True, signals=SIGNALS)
    assert "signal-not-sent" not in all_sent.codes()


@pytest.mark.parametrize("version", ["5.5.4", "5.17.0", "5.24.0"])
def test_d08_packing_on_pytorch_bodies_is_a_no_in_every_release(tmp_path: Path, version: str) -> None:
    said = described(tmp_path, transformers=version, pkgs={}, packed=True, signals=SIGNALS)
    assert said.code == 1
    assert {said.paths[symbol]["status"] for symbol in TRAINING} == {"fail"}


def test_d11_one_sequence_in_a_row_is_no_packing(tmp_path: Path) -> None:
    single = described(tmp_path / "single", packed=False)
    assert not {code for code in single.codes() if "signal" in code or "packing" in code or "boundary" in code}
    packed = described(tmp_path / "packed", signals=("cu_seq_lens_q",), packed=True)
    assert packed.code == 1


def test_h10_names_that_old_probes_ask_for_decide_nothing(tmp_path: Path) -> None:
    """5.24 has no `is_fast_path_available`: a report of it has no such gate, and the kernels are still found."""
    new = described(tmp_path / "new", gpu="9.0")
    old = described(tmp_path / "old", transformers="5.5.4", gpu="9.0")
    assert set(TRAINING) <= set(new.paths)
    assert set(TRAINING) <= set(old.paths)
    assert "is_fast_path_available" not in new.text()


def test_h14_no_visible_gpu_is_no_denial(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"attn_implementation": "flash_attention_2", "pkgs": {"flash-attn": "2.8.3"}}
    said = described(tmp_path, configs.LLAMA, **asked, machine={"gpu_state": GpuState.HIDDEN})
    assert said.code == 3
    assert "not installed" not in said.text()


# ---------------------------------------------------------------- kernels from the hub


def test_e02_a_cached_hub_kernel_cannot_be_resolved_offline(tmp_path: Path) -> None:
    """Release 5.5 asks the hub for Mamba's kernels as soon as `kernels` is there, and by version."""
    asked: dict[str, Any] = {"transformers": "5.5.4", "gpu": "9.0", "pkgs": {**GOOD, "kernels": "0.12.3"}}
    offline = {"HF_HUB_OFFLINE": "1"}
    said = described(tmp_path / "off", configs.MAMBA2, variables=offline, **asked)
    assert said.code == 1
    assert {path["status"] for path in said.paths.values()} == {"fail"}
    assert "not even a cached kernel is found" in said.paths["mamba_chunk_scan_combined"]["reason"]
    # With a network it depends on the hub; without `kernels` the installed package is used.
    assert described(tmp_path / "on", configs.MAMBA2, **asked).code == 3
    plain = described(tmp_path / "none", configs.MAMBA2, variables=offline, **{**asked, "pkgs": GOOD})
    assert "hub-offline" not in plain.codes()
    # What the hub serves is not missed because it was not installed.
    hub = described(tmp_path / "hub", configs.MAMBA2, **{**asked, "pkgs": {"kernels": "0.12.3"}})
    assert (hub.code, hub.codes("fail")) == (3, set())


def test_e02_use_kernels_without_a_network(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"transformers": "5.17.0", "gpu": "9.0", "pkgs": {"kernels": "0.16.2"}, "use_kernels": True}
    said = described(tmp_path / "off", configs.LLAMA, variables={"HF_HUB_OFFLINE": "1"}, **asked)
    assert said.code == 1
    assert "hub-offline" in said.codes("fail")
    online = described(tmp_path / "on", configs.LLAMA, variables={"HF_HUB_OFFLINE": "0"}, **asked)
    assert "hub-offline" not in online.codes()
    assert "hub-layers-not-verified" in online.codes("unknown")
    # What a newer `kernels` does without a network was not read.
    asked |= {"transformers": "5.24.0", "pkgs": {"kernels": "0.18.2"}}
    assert described(tmp_path / "new", configs.LLAMA, variables={"HF_HUB_OFFLINE": "1"}, **asked).code == 3


def test_e03_kernels_alone_do_not_make_up_for_missing_packages(tmp_path: Path) -> None:
    said = described(tmp_path, transformers="5.5.4", pkgs={"kernels": "0.12.0"}, gpu="9.0")
    assert said.code == 1
    assert "not-installed" in said.paths[CONV]["codes"]


def test_e01_a_version_without_a_build_for_this_torch_names_the_one_that_has(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"pkgs": {"kernels": "0.18.2"}, "gpu": "9.0"}
    first = "kernels-community/flash-attn2@v1"
    said = described(tmp_path / "v1", configs.LLAMA, attn_implementation=first, **asked)
    assert said.code == 1
    lost = said.finding("attention-no-build")
    assert "torch <2.13" in lost["reason"]
    assert "torch 2.13.0" in lost["reason"]
    assert lost["fix"] == "attn_implementation=kernels-community/flash-attn2@v3"
    # Another version, another torch, or a revision that nothing is known about: not a no.
    for number, (name, torch) in enumerate(
        ((f"{first[:-1]}3", "2.13.0"), (first, "2.12.1"), (f"{first[:-2]}abcdef", "2.13.0"))
    ):
        other = described(
            tmp_path / str(number), configs.LLAMA, attn_implementation=name, machine={"torch": torch}, **asked
        )
        assert (other.code, other.codes("fail")) == (3, set())


def test_e11_an_attention_of_the_hub_without_code_for_this_gpu(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "transformers": "5.5.4",
        "pkgs": {"kernels": "0.12.0"},
        "machine": {"machine": "aarch64", "torch": "2.10.0a0"},
        "attn_implementation": "kernels-community/vllm-flash-attn3",
    }
    said = described(tmp_path / "gb10", configs.LLAMA, gpu="12.1", **asked)
    assert (said.code, "attention-no-build" in said.codes("fail")) == (1, True)
    assert "capability 12.1" in said.text()
    fits = described(tmp_path / "h100", configs.LLAMA, gpu="9.0", **asked)
    assert (fits.code, fits.finding("attention-not-verified")["status"]) == (3, "unknown")
    assert "kernels-community/vllm-flash-attn3" in fits.text()


def test_e10_hub_kernels_that_nobody_looked_up_are_unknown(tmp_path: Path) -> None:
    layers = described(tmp_path / "a", configs.LLAMA, pkgs={"kernels": "0.18.2"}, gpu="9.0", use_kernels=True)
    assert layers.code == 3
    assert layers.finding("hub-layers-not-verified")["status"] == "unknown"
    flash = described(
        tmp_path / "b", configs.LLAMA, pkgs={"kernels": "0.18.2"}, gpu="9.0", attn_implementation="flash_attention_2"
    )
    assert (flash.code, flash.finding("attention-from-hub")["status"]) == (3, "unknown")


def test_e09_a_flag_that_replaces_nothing_is_a_no(tmp_path: Path) -> None:
    said = described(tmp_path / "absent", configs.LLAMA, pkgs={}, gpu="9.0", use_kernels=True)
    assert said.code == 1
    assert "kernels-unusable" in said.codes("fail")
    off: dict[str, Any] = {
        "pkgs": {"kernels": "0.18.2"},
        "gpu": "9.0",
        "use_kernels": True,
        "variables": {"USE_HUB_KERNELS": "NO"},
    }
    # One fault, one finding: the rule of the same words says nothing beside what was really found.
    assert described(tmp_path / "off", configs.LLAMA, **off).codes("fail") == {"hub-switched-off"}
    window = described(tmp_path / "window", configs.LLAMA, pkgs={"kernels": "0.16.2"}, gpu="9.0", use_kernels=True)
    assert window.codes("fail") == {"kernels-unusable"}
    assert "kernels-unusable" not in described(tmp_path / "plain", configs.LLAMA, pkgs={}, gpu="9.0").codes()


def test_h16_a_beta_of_another_name_is_named_as_it_is(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"attn_implementation": "flash_attention_3", "gpu": "9.0"}
    said = described(tmp_path / "there", configs.LLAMA, pkgs={"flash-attn-3": "3.0.0b1"}, **asked)
    assert said.code == 3
    for name in ("flash-attn-3 3.0.0b1", "flash_attn_interface"):
        assert name in said.text()
    other = described(tmp_path / "other", configs.LLAMA, pkgs={"flash-attn": "2.8.3"}, **asked)
    assert "flash-attn-3 is not installed" in other.text()


def test_a01_a09_a_target_with_5_16_ignores_fla_and_not_the_convolution(tmp_path: Path) -> None:
    said = described(tmp_path, transformers="5.16.1", gpu="9.0")
    assert said.code == 1
    assert said.paths[GDN]["status"] == "fail"
    assert said.paths[CONV]["status"] == "unknown"
    assert "transformers>=5.17" in said.paths[GDN]["fix"]
    assert "install 'flash" not in said.paths[GDN]["fix"]


def test_a_bare_target_of_the_newest_gpu_raises_no_alarm(tmp_path: Path) -> None:
    assert at_target(tmp_path, "h100").codes("fail") == set()
