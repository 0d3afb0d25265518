"""What is committed as measured on an H200: verdicts with exact versions, which say what the documents claim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kernelguard.judge.values import Level, Status, worst
from kernelguard.trace import load_names, read_trace
from kernelguard.verify.files import load_verdict, violations
from kernelguard.verify.findings import findings, numbers
from kernelguard.verify.values import Outcome, Verdict

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
NAMES = (
    "fla060-triton371", "fla060-stock-triton", "fla041-stock-triton", "isolation", "names", "27b", "27b-grouped",
    "mamba", "flash-qla",
)  # fmt: skip


def path_of(name: str) -> Path:
    return RESULTS / f"verify-h200-{name}.json"


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    return {name: load_verdict(path_of(name)) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_each_follows_the_schema_and_names_exact_versions(name: str, verdicts: dict[str, Verdict]) -> None:
    document: dict[str, Any] = json.loads(path_of(name).read_text("utf-8"))
    assert violations(document) == []
    prints = verdicts[name].fingerprint
    assert (prints.gpu, prints.capability, prints.torch, prints.python) == (
        "NVIDIA H200",
        (9, 0),
        "2.11.0+cu130",
        "3.12.3",
    )
    assert prints.driver
    assert prints.ptxas
    assert prints.triton == ("3.6.0" if "stock" in name else "3.7.1")
    assert prints.distributions["fla-core"] == ("0.4.1" if "041" in name else "0.6.0")
    assert all(len(digest) == 64 for digest in prints.binaries.values())


def test_item_1_passes_with_every_configuration(verdicts: dict[str, Verdict]) -> None:
    verdict = verdicts["fla060-triton371"]
    assert {(p.package, p.symbol) for p in verdict.probes} >= {
        ("fla", "chunk_gated_delta_rule"),
        ("fla", "causal_conv1d"),
        ("fla", "FusedRMSNormGated"),
        ("causal_conv1d", "causal_conv1d_fn"),
        ("torch", "varlen_attn"),
        ("liger_kernel", "liger_rms_norm"),
        ("liger_kernel", "liger_swiglu"),
        ("liger_kernel", "liger_fused_linear_cross_entropy"),
    }
    assert all(numbers(p, Level.GPU) is Status.PASS for p in verdict.probes)
    assert worst(f.status for f in findings(verdict)) is Status.WARN, "only bits that differ from run to run"
    delta = next(p for p in verdict.probes if p.symbol == "chunk_gated_delta_rule")
    assert len(delta.configurations) == 236
    assert {c.state for c in delta.configurations} == {"right", "refused"}
    assert delta.backends["common/tilelang"] == "not installed"
    assert delta.backends["gated_delta_rule/flash_qla"] == "not installed"


def test_item_2_fails_with_the_reason_and_the_right_fix(verdicts: dict[str, Verdict]) -> None:
    (found,) = findings(verdicts["fla060-stock-triton"])
    assert (found.code, found.status) == ("kernel-raises", Status.FAIL)
    assert "Triton >= 3.4.0 and < 3.7.1 on Hopper" in found.reason
    assert found.fix == "pip install 'triton>=3.7.1'"


def test_item_3_is_a_whole_table_in_which_nothing_is_wrong(verdicts: dict[str, Verdict]) -> None:
    """Three head counts, each configuration and tensor: the fault is not reproduced here, and stays a fail by rule."""
    probes = verdicts["fla041-stock-triton"].probes
    assert [p.cases[0].shape["v_heads"] for p in probes] == [48, 16, 4]
    assert [len(p.configurations) for p in probes] == [302, 201, 201]
    for probe in probes:
        assert {c.state for c in probe.configurations} == {"right", "refused"}
        for one in probe.configurations:
            if one.state == "right":
                names = {(t.role, t.name) for t in one.tensors}
                assert names == {("output", "output"), *(("gradient", n) for n in ("q", "k", "v", "g", "beta"))}
                assert all(t.error is not None and t.allowed is not None and t.error <= t.allowed for t in one.tensors)


def test_item_4_leaks_with_each_signal_alone_and_is_clean_with_all(verdicts: dict[str, Verdict]) -> None:
    told = {frozenset(c.signals): c.isolated for c in verdicts["isolation"].isolation}
    every = {"position_ids", "cu_seq_lens_q", "seq_idx"}
    assert told[frozenset(every)] is True
    for name in every:
        assert told[frozenset({name})] is False
        assert told[frozenset(every - {name})] is False


def test_the_factors_leave_room_for_right_kernels_and_for_nothing_else(verdicts: dict[str, Verdict]) -> None:
    """docs/verify.md: the right kernels measured stay below their factor, though not by much."""
    ratios = [
        4.0 * t.error / t.allowed
        for name in ("fla060-triton371", "fla041-stock-triton", "names")
        for p in verdicts[name].probes
        for tensors in (*(c.tensors for c in p.cases), *(c.tensors for c in p.configurations))
        for t in tensors
        if t.error is not None and t.allowed
    ]
    assert 3.0 < max(ratios) < 3.3


def test_recorded_kernel_names_are_those_of_the_measurement(verdicts: dict[str, Verdict]) -> None:
    """Each row of matrices/traces that says it was recorded has a kernel in the document that it names."""
    rows = [row for row in load_names() if row.recorded]
    packages = {"fla", "flash_qla", "causal_conv1d", "liger_kernel", "torch", "kernelguard_train"}
    assert {row.package for row in rows} == packages
    for row in rows:
        if row.package == "flash_qla":
            ran = {run.name for run in read_trace(RESULTS / "trace-flash-qla-h200.json.gz").kernels}
            assert (len(set(row.forward) & ran), len(set(row.backward) & ran)) == (3, 3), "two were only read"
            continue
        name = next(n for n in NAMES if f"verify-h200-{n}.json" in row.recorded)
        probes = [p for p in verdicts[name].probes if (p.package, p.symbol) == (row.package, row.symbol)]
        assert any(set(row.forward) & set(p.forward_kernels) for p in probes), row
        if row.backward:
            assert any(set(row.backward) & set(p.backward_kernels) for p in probes), row


def test_kernels_that_only_decode_are_told_from_liars(verdicts: dict[str, Verdict]) -> None:
    outcomes = {p.symbol: p.outcome for p in verdicts["names"].probes}
    assert outcomes["fused_recurrent_kda"] is Outcome.NO_BACKWARD
    assert outcomes["causal_conv1d_update"] in {Outcome.NO_BACKWARD, Outcome.RIGHT}
    assert outcomes["flex_attention"] is Outcome.RIGHT


def test_the_whole_command_on_the_27b(verdicts: dict[str, Verdict]) -> None:
    """`verify --trace` as a person runs it, with int32 boundaries: every configuration, isolation, one real step."""
    verdict = verdicts["27b"]
    probes = {p.symbol: p for p in verdict.probes}
    assert set(probes) == {"chunk_gated_delta_rule", "causal_conv1d_fn", "scaled_dot_product_attention"}
    assert all(numbers(p, Level.GPU) is Status.PASS for p in probes.values())
    states = [c.state for c in probes["chunk_gated_delta_rule"].configurations]
    assert (states.count("right"), states.count("refused"), len(states)) == (167, 1, 168)
    every, *rest = verdict.isolation
    assert every.isolated is True
    assert [(c.left_out, c.isolated) for c in rest] == [
        ("position_ids", False),
        ("cu_seq_lens_q", False),
        ("seq_idx", False),
    ]
    assert verdict.trace is not None
    ran = {p.symbol: p for p in verdict.trace.fast_paths}
    assert all(ran[s].forward and ran[s].backward for s in ("chunk_gated_delta_rule", "causal_conv1d_fn"))
    assert not any(p.fallbacks for p in verdict.trace.fast_paths)
    assert worst(f.status for f in findings(verdict)) is Status.WARN, "only bits that differ from run to run"


def test_the_bundled_trainers_own_calls_on_the_27b(verdicts: dict[str, Verdict]) -> None:
    """`verify --train-config`: grouped key heads, torch's varlen attention, packed samples apart."""
    verdict = verdicts["27b-grouped"]
    probes = {p.symbol: p for p in verdict.probes}
    assert set(probes) == {
        "chunk_gated_delta_rule", "causal_conv1d_fn", "varlen_attn", "FusedRMSNormGated", "packed_convolution",
    }  # fmt: skip
    assert all(numbers(p, Level.GPU) is Status.PASS for p in probes.values())
    delta = probes["chunk_gated_delta_rule"]
    assert {(c.shape["k_heads"], c.shape["v_heads"]) for c in delta.cases} == {(16, 48)}
    assert {c.state for c in delta.configurations} == {"right", "refused"}
    assert len(delta.configurations) == 118
    norm = probes["FusedRMSNormGated"]
    assert {c.state for c in norm.configurations} == {"right"}
    assert len(norm.configurations) == 36, "9 forward and 9 backward at each of two numbers of rows"
    assert probes["packed_convolution"].forward_kernels == ("_convolve",)
    assert verdict.isolation[0].isolated is True


def test_a_mamba_hybrid_moves_logits_by_rounding_and_no_gradient(verdicts: dict[str, Verdict]) -> None:
    every, *rest = verdicts["mamba"].isolation
    assert (every.leak_gradient, every.leaking_layers) == (0.0, ())
    assert every.leak_logit == 2.0**-5, "one unit in the last place of bf16 between 4 and 8"
    leaks = {c.left_out: c.leak_gradient or 0.0 for c in rest}
    assert leaks["position_ids"] > 1
    assert leaks["seq_idx"] > 1
    assert leaks["cu_seq_lens_q"] == 0, "torch's masks go by position_ids, the scan by seq_idx"


def test_a_quick_run_fits_into_a_minute_and_a_first_step_into_seconds() -> None:
    document = json.loads((RESULTS / "verify-h200-quick.json").read_text("utf-8"))
    cold, warm = document["cold"], document["warm"]
    assert cold["exit_code"] == warm["exit_code"] == 0
    assert warm["seconds"] <= 60.0 < cold["seconds"]
    assert document["first_step_of_a_new_process_seconds"] < 5.0


def test_what_is_said_of_flashqla_was_measured() -> None:
    found = json.loads((RESULTS / "flash-qla-h200.json").read_text("utf-8"))
    whole = [error for tensors in found["errors"].values() for error, _ in tensors.values()]
    page = (RESULTS.parents[1] / "docs" / "verify.md").read_text("utf-8")
    assert f"within {min(whole):.4f} to {max(whole):.4f} of the\nreference" in page
    assert found["repeats_that_differed_of_5"] == 0
    assert found["samples_apart"]
    assert f"{found['forward_and_backward_ms']['median']:.1f} ms forward" in page


def test_flashqla_in_verify_is_told_as_what_it_was(verdicts: dict[str, Verdict]) -> None:
    """Its backward pass was not compiled in time: no pass, whatever else is known of it."""
    verdict = verdicts["flash-qla"]
    delta = next(p for p in verdict.probes if p.symbol == "chunk_gated_delta_rule")
    assert delta.outcome is Outcome.HUNG
    assert delta.seconds == pytest.approx(127, abs=0.5)
    assert "flash-qla" in verdict.fingerprint.distributions
    found = findings(verdict)
    assert worst(f.status for f in found) is Status.UNKNOWN
    assert [f.status for f in found if f.code == "cache-incomplete"] == [Status.WARN]
    assert verdict.isolation[0].isolated is True
    assert verdict.trace is not None
    ran = next(p for p in verdict.trace.fast_paths if p.symbol == "chunk_gated_delta_rule")
    assert all(run.name.startswith("tilelang_") for run in ran.kernels)
    assert ran.forward
    assert ran.backward
