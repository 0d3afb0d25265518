"""A verdict round-trips through its schema, and below the gpu level no number ever passes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.judge.values import Level, Status, worst
from kernelguard.verify.files import from_document, load_verdict, to_document, violations
from kernelguard.verify.findings import findings, numbers
from kernelguard.verify.values import (
    UNTOLD,
    CaseResult,
    Configuration,
    Fingerprint,
    Outcome,
    ProbeResult,
    SignalCheck,
    TensorError,
    Verdict,
)

GOOD = TensorError(role="output", name="output", state="right", error=1e-3, plain=1e-3, allowed=4e-3, worst=1e-2)
BAD = TensorError(role="gradient", name="g", state="wrong", error=0.3, plain=1e-3, allowed=4e-3)
CASE = CaseResult(
    name="ragged",
    lengths=(1, 63),
    shape={"k_heads": 2},
    outcome=Outcome.RIGHT,
    tensors=(GOOD,),
    runs=3,
    differing={"output output": 1e-6},
    seconds=2.0,
)
CONFIG = Configuration(kernel="bwd", key="4,bf16", config="num_warps=4", case="ragged", state="right", picked=True)
PROBE = ProbeResult(
    symbol="chunk", package="fla", op="gated_delta_rule", outcome=Outcome.RIGHT, cases=(CASE,), configurations=(CONFIG,)
)
CLEAN = SignalCheck(signals=("position_ids", "seq_idx"), leak_gradient=0.0, leak_logit=0.0, isolated=True)
VERDICT = Verdict(
    level=Level.GPU,
    fingerprint=Fingerprint(gpu="NVIDIA H200", capability=(9, 0), distributions={"fla-core": "0.6.0"}),
    probes=(PROBE,),
    isolation=(CLEAN,),
    signals=("position_ids", "seq_idx"),
    seconds=3.5,
    created="2026-11-29T12:00:00+00:00",
    problems=("one",),
)


def with_probe(level: Level = Level.GPU, **changes: Any) -> Verdict:
    return replace(VERDICT, level=level, probes=(replace(PROBE, **changes),), isolation=(), problems=())


def codes(verdict: Verdict) -> dict[str, Status]:
    return {f.code: f.status for f in findings(verdict)}


def test_round_trip(tmp_path: Path) -> None:
    rich = replace(VERDICT, probes=(PROBE, replace(PROBE, configurations=(replace(CONFIG, tensors=(BAD,)),))))
    document = json.loads(json.dumps(to_document(rich), allow_nan=False))
    assert violations(document) == []
    assert from_document(document, source="x") == rich
    (tmp_path / "v.json").write_text(json.dumps(document))
    assert load_verdict(tmp_path / "v.json") == rich


def test_a_newer_writer_may_add_keys() -> None:
    document = to_document(VERDICT)
    document["future"] = document["probes"][0]["future"] = 1
    assert from_document(document, source="x") == VERDICT


def test_what_is_not_finite_stays_json() -> None:
    odd = replace(PROBE, cases=(replace(CASE, tensors=(replace(GOOD, error=float("inf")),)),))
    document = to_document(replace(VERDICT, probes=(odd,)))
    json.dumps(document, allow_nan=False)
    assert document["probes"][0]["cases"][0]["tensors"][0]["error"] is None
    assert violations(document) == []


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda d: d.pop("fingerprint"), "'fingerprint' is a required property"),
        (lambda d: d.update(level="maybe"), "level"),
        (lambda d: d["probes"][0].update(outcome="fine"), "probes.0.outcome"),
        (lambda d: d.update(schema=2), "reads up to schema 1"),
        (lambda d: d["probes"][0]["cases"][0].update(lengths="x"), "probes.0.cases.0.lengths"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(break_it: Any, words: str) -> None:
    document = to_document(VERDICT)
    break_it(document)
    with pytest.raises(InputError, match=words):
        from_document(document, source="x")


def test_the_schema_knows_every_field() -> None:
    schema = json.loads(data.schema("verdict").read_text("utf-8"))
    names = {
        "tensor": TensorError,
        "case": CaseResult,
        "configuration": Configuration,
        "probe": ProbeResult,
        "signals": SignalCheck,
        "fingerprint": Fingerprint,
    }
    for name, kind in names.items():
        assert {f.name for f in dataclasses.fields(kind)} <= set(schema["$defs"][name]["properties"]), name
    assert {f.name for f in dataclasses.fields(Verdict)} <= set(schema["properties"])
    assert set(schema["$defs"]["outcome"]["enum"]) == set(Outcome)


@pytest.mark.parametrize("level", [Level.RESOLVE, Level.IMPORT, Level.INTERPRETED])
@pytest.mark.parametrize("outcome", list(Outcome))
def test_no_number_passes_below_the_gpu_level(level: Level, outcome: Outcome) -> None:
    verdict = with_probe(level, outcome=outcome)
    assert numbers(verdict.probes[0], level) is not Status.PASS
    assert "verified" not in codes(verdict)
    document = to_document(verdict)
    assert document["probes"][0]["numbers"] != "pass"
    document["probes"][0]["numbers"] = "pass"
    assert violations(document)


@pytest.mark.parametrize("level", [Level.IMPORT, Level.INTERPRETED])
def test_isolation_without_a_gpu_is_no_pass(level: Level) -> None:
    assert codes(replace(VERDICT, level=level, probes=(), problems=())) == {"isolation-not-verified": Status.UNKNOWN}


@pytest.mark.parametrize("outcome", sorted(UNTOLD))
def test_could_not_tell_is_unknown(outcome: Outcome) -> None:
    found = codes(with_probe(outcome=outcome, reason="x"))
    assert found == {f"could-not-verify-{outcome}": Status.UNKNOWN}


@pytest.mark.parametrize(
    ("outcome", "code"),
    [(Outcome.WRONG, "wrong-result"), (Outcome.CRASHED, "kernel-crashes"), (Outcome.RAISED, "kernel-raises")],
)
def test_a_bad_kernel_fails(outcome: Outcome, code: str) -> None:
    case = replace(CASE, outcome=outcome)
    assert codes(with_probe(outcome=outcome, reason="x", cases=(case,))) == {code: Status.FAIL}


@pytest.mark.parametrize("outcome", [Outcome.RAISED, Outcome.CRASHED])
def test_what_only_lacks_a_gpu_is_no_fault_of_the_kernel(outcome: Outcome) -> None:
    """causal-conv1d refuses tensors of a CPU, and Triton's interpreter does not know all of its language."""
    ran = with_probe(Level.INTERPRETED, outcome=outcome, reason="x", target="fla.chunk", cases=())
    assert codes(ran) == {"could-not-interpret": Status.UNKNOWN}
    assert numbers(ran.probes[0], ran.level) is Status.UNKNOWN
    not_imported = with_probe(Level.INTERPRETED, outcome=outcome, reason="x", target="", cases=())
    assert worst(codes(not_imported).values()) is Status.FAIL


def test_right_kernels_pass_and_say_what_was_measured() -> None:
    (found,) = [f for f in findings(with_probe()) if f.code == "verified"]
    assert found.status is Status.PASS
    assert "with each of 1 configurations" in found.reason
    assert any("beside 0.001 of plain torch" in line for line in found.evidence)
    assert codes(with_probe())["not-deterministic"] is Status.WARN
    still = replace(CASE, differing={})
    assert codes(with_probe(cases=(still,))) == {"verified": Status.PASS}


def test_a_configuration_that_nobody_measured_is_no_pass() -> None:
    other = replace(CONFIG, config="num_warps=8", state="not-measured", picked=False)
    verdict = with_probe(configurations=(CONFIG, other))
    assert codes(verdict) == {"configurations-not-measured": Status.UNKNOWN}
    assert numbers(verdict.probes[0], Level.GPU) is Status.UNKNOWN
    refused = replace(other, state="refused")
    assert codes(with_probe(configurations=(CONFIG, refused)))["verified"] is Status.PASS


def test_a_wrong_configuration_has_its_own_code() -> None:
    wrong = replace(CONFIG, state="wrong", picked=False, tensors=(BAD,))
    verdict = with_probe(outcome=Outcome.WRONG, configurations=(wrong,), reason="bwd with num_warps=4")
    assert codes(verdict) == {"wrong-configuration": Status.FAIL}


def test_the_fix_comes_from_the_rule_or_else_from_the_exception() -> None:
    text = "Triton >= 3.4.0 and < 3.7.1 on Hopper is wrong. Please upgrade Triton to >= 3.7.1 or install tilelang"
    verdict = with_probe(outcome=Outcome.RAISED, error=text, error_type="RuntimeError")
    assert findings(verdict)[0].fix == "pip install 'triton>=3.7.1'"
    assert findings(verdict, {"chunk": "pip install 'torch>=2.12.1'"})[0].fix == "pip install 'torch>=2.12.1'"
    assert text in findings(verdict)[0].evidence[0]


def test_a_leak_fails_and_names_the_missing_signal() -> None:
    leak = SignalCheck(
        signals=("position_ids",), leak_gradient=0.4, leak_logit=0.1, isolated=False, leaking_layers=("layers.0 (GDN)",)
    )
    left = replace(CLEAN, signals=("seq_idx",), left_out="position_ids", isolated=False)
    fuller = replace(CLEAN, left_out="nothing")
    verdict = replace(VERDICT, probes=(), problems=(), isolation=(leak, left, fuller))
    (found,) = findings(verdict)
    assert (found.code, found.status) == ("packed-samples-leak", Status.FAIL)
    assert "layers.0 (GDN)" in found.reason
    assert found.fix == "have the collator send seq_idx as well"
    untold = replace(verdict, isolation=(replace(leak, isolated=None),))
    assert codes(untold) == {"isolation-not-verified": Status.UNKNOWN}
    assert codes(replace(verdict, isolation=(CLEAN,))) == {"isolated": Status.PASS}


def test_what_moves_by_rounding_alone_passes_and_is_said() -> None:
    rounded = replace(CLEAN, leak_logit=0.03, allowed_logit=0.1)
    (found,) = findings(replace(VERDICT, probes=(), problems=(), isolation=(rounded,)))
    assert (found.code, found.status) == ("isolated", Status.PASS)
    assert "no more than rounding" in found.reason
    assert "0.03, allowed 0.1" in found.reason
    leak = replace(rounded, leak_logit=0.3, isolated=False)
    (found,) = findings(replace(VERDICT, probes=(), problems=(), isolation=(leak,)))
    assert (found.status, "logits move by 0.3" in found.reason) == (Status.FAIL, True)


def test_every_outcome_has_a_finding_and_only_right_ones_pass() -> None:
    for outcome in Outcome:
        found = findings(with_probe(outcome=outcome, cases=()))
        assert found, outcome
        passes = worst(f.status for f in found) in {Status.PASS, Status.WARN}
        assert passes is (outcome in {Outcome.RIGHT, Outcome.NO_BACKWARD}), outcome
