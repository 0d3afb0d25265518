from __future__ import annotations

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kernelguard_train import metrics
from kernelguard_train.batches import packed_batch


def test_amounts_of_a_packed_batch() -> None:
    amounts = metrics.Amounts.of([packed_batch(tiny.samples((30, 60)), 128, 0), packed_batch([], 128, 0)])
    assert (amounts.valid, amounts.computed, amounts.samples, amounts.squared) == (90, 256, 2, 900 + 3600)
    assert amounts.trained == 20 + 40


def test_mfu_is_the_stated_formula_per_gpu() -> None:
    meter = metrics.Meter((10**9, 10**8), 4096, peak=100.0, world=2, warmup=1)
    amounts = metrics.Amounts(trained=500, valid=1000, computed=2000, squared=10**6, samples=3)
    meter.add(amounts, 99.0, 0.0)  # warm-up
    rates = meter.add(amounts, 0.5, 0.1)
    assert rates["tokens_per_s"] == 1000
    assert rates["trained_tokens_per_s"] == 500
    assert rates["computed_tokens_per_s"] == 2000
    assert rates["density"] == 0.5
    work = 6 * (1e9 * 1000 + 1e8 * 500)  # the output layer works for trained tokens only
    assert rates["mfu"] == pytest.approx(work / (0.5 * 2 * 100e12))
    assert rates["mfu_with_attention"] == pytest.approx((work + 6 * 4096 * 1e6) / (0.5 * 2 * 100e12))
    summary = meter.summary()
    assert summary["steps"] == 1
    assert summary["tokens_per_s"] == 1000
    assert summary["data_wait_s"] == pytest.approx(0.1)


def test_percentiles_are_of_the_steps_after_warm_up() -> None:
    meter = metrics.Meter((1, 1), 1, peak=None, world=1, warmup=2)
    amounts = metrics.Amounts(trained=1, valid=1, computed=1, squared=1, samples=1)
    assert meter.summary() == {}
    for seconds in (50.0, 50.0, *(float(i) for i in range(1, 101))):
        rates = meter.add(amounts, seconds, 0.0)
    assert "mfu" not in rates, "no peak, no MFU"
    assert meter.summary()["step_p50_s"] == 50.5
    assert meter.summary()["step_p95_s"] == 96.0


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.0), ("NVIDIA A100-SXM4-80GB", 312.0), ("NVIDIA GH200 480GB", 989.0), ("NVIDIA L40S", 362.0),
     ("NVIDIA L4", 121.0), ("Some GPU", None), ("", None)],
)  # fmt: skip
def test_the_peak_is_known_by_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert metrics.peak_tflops(name, 0.0) == peak
    assert metrics.peak_tflops(name, 7.0) == 7.0


def test_of_experts_only_the_active_ones_count() -> None:
    text = AutoConfig.for_model(**tiny.ARCHITECTURES["qwen3_next"])
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text)
    experts = sum(p.numel() for n, p in lm.named_parameters() if ".experts." in n)
    others = sum(p.numel() for n, p in lm.named_parameters() if ".experts." not in n) - 2 * 600 * 64
    assert metrics.matmul_parameters(lm, text) == (others + experts // 2, 600 * 64)
    assert experts > 0


def test_a_tied_embedding_counts_as_the_output_layer() -> None:
    text = AutoConfig.for_model(**tiny.ARCHITECTURES["llama"])
    lm = AutoModelForCausalLM.from_config(text)
    assert sum(metrics.matmul_parameters(lm, text)) == sum(p.numel() for p in lm.parameters())


def test_a_machine_without_a_gpu_says_why_health_is_missing() -> None:
    health = metrics.Health(torch.device("cpu"))
    assert health.read() == {}
    assert health.note == "no GPU"
