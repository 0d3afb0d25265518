"""Admission: one lock, one verdict and one machine that fit, and each rule with only its own fact wrong."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.guard.admission import admit
from kernelguard.guard.question import Admission, Image, Overrides, Place, Question, order
from kernelguard.judge.values import Finding, Level, Status
from kernelguard.lock.values import LockedModel, Role
from kernelguard.observe.values import Environment, Gpu, GpuState
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import (
    CaseResult,
    Configuration,
    Fingerprint,
    Outcome,
    ProbeResult,
    SignalCheck,
    Subject,
    Verdict,
)
from samples import SHA, hopper, pin, sample_lock

OTHER = "b" * 64
SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")
SHAPE = {"k_heads": 48, "k_dim": 128}


LOCK = sample_lock(
    model=LockedModel(source="m/config.json", model_type="qwen3_5", sha256=SHA),
    intent=(("packed", "True"), ("signals", ",".join(SIGNALS)), ("dtype", "bfloat16 (assumed)")),
    target=hopper("h200"),
    pins=(
        pin("fla-core", "0.6.0", files_sha256=SHA),
        pin("torch", "2.13.0+cu130", Role.TORCH, files_sha256=SHA),
        pin("triton", "3.7.1", Role.TORCH, files_sha256=SHA),
        pin("transformers", "5.24.0", Role.DEPENDENCY, files_sha256=SHA),
        pin("numpy", "2.3.0", Role.DEPENDENCY, files_sha256=SHA),
    ),
)
PROBE = ProbeResult(
    symbol="chunk_gated_delta_rule",
    package="fla",
    op="gated_delta_rule",
    outcome=Outcome.RIGHT,
    dtype="bfloat16",
    cases=(
        CaseResult(name="ragged", lengths=(1, 63), shape=SHAPE, outcome=Outcome.RIGHT),
        CaseResult(name="training", lengths=(4096,), shape=SHAPE, outcome=Outcome.RIGHT),
    ),
    configurations=(Configuration(kernel="k", key="1", config="BLOCK=64", state="right"),),
)
VERDICT = Verdict(
    level=Level.GPU,
    fingerprint=Fingerprint(
        gpu="NVIDIA H200",
        capability=(9, 0),
        driver="580.95.05",
        torch="2.13.0+cu130",
        cuda="13.0",
        triton="3.7.1",
        transformers="5.24.0",
        python="3.12.3",
        machine="x86_64",
        distributions={"fla-core": "0.6.0", "torch": "2.13.0+cu130", "triton": "3.7.1", "transformers": "5.24.0"},
        binaries={"triton/_C/libtriton.so": SHA},
        model_type="qwen3_5",
        records={"fla-core": SHA},
    ),
    probes=(PROBE,),
    isolation=(SignalCheck(signals=SIGNALS, isolated=True),),
    signals=SIGNALS,
    created="2026-11-29T10:00:00+00:00",
)
REQUEST = ProbeRequest(
    symbol="chunk_gated_delta_rule",
    package="fla",
    module="fla.ops.gated_delta_rule",
    op="gated_delta_rule",
    cases=(
        Case(name="ragged", lengths=(1, 63), shape=SHAPE),
        Case(name="training", lengths=(4096,), shape=SHAPE),
    ),
)
HERE = Environment(
    origin="/env/bin/python",
    live=True,
    driver=Version("580.95.05"),
    gpus=(Gpu(name="NVIDIA H200", capability=(9, 0)),) * 2,
    gpu_state=GpuState.USABLE,
)
HOLDS = Finding(code="lock-holds", status=Status.PASS, reason="5 distributions are exactly those of the lock")
PLACE = Place(environment=HERE, lock_findings=(HOLDS,), binaries={"triton/_C/libtriton.so": SHA})
QUESTION = Question(
    lock=LOCK,
    lock_digest="sha256:" + SHA,
    verdict=VERDICT,
    requests=(REQUEST,),
    model_sha256=SHA,
    place=PLACE,
    floor=Version("580"),
    names={"lock": "kernelguard.lock", "model": "m/config.json", "python": "env/bin/python", "verdict": "v.json"},
)
IMAGE = Image(reference=f"r/train@sha256:{SHA}", digest=f"sha256:{SHA}", lock_digest="sha256:" + SHA)


def ask(**changes: Any) -> Admission:
    return admit(replace(QUESTION, **changes))


def fingerprint(**changes: Any) -> dict[str, Any]:
    return {"verdict": replace(VERDICT, fingerprint=replace(VERDICT.fingerprint, **changes))}


def probe(**changes: Any) -> dict[str, Any]:
    return {"verdict": replace(VERDICT, probes=(replace(PROBE, **changes),))}


def place(**changes: Any) -> dict[str, Any]:
    return {"place": replace(PLACE, **changes)}


def here(**changes: Any) -> dict[str, Any]:
    return place(environment=replace(HERE, **changes))


def locked(**changes: Any) -> dict[str, Any]:
    return {"lock": replace(LOCK, **changes)}


def image(**changes: Any) -> dict[str, Any]:
    return {"place": Place(gpus_here=False, image=replace(IMAGE, **changes))}


def test_what_fits_is_admitted() -> None:
    admission = ask()
    assert admission.refusals == ()
    assert admission.admitted
    assert admission.status is Status.PASS
    assert not admission.overrides
    assert any("2 x NVIDIA H200 (9.0)" in reason for reason in admission.reasons)


def failing(code: str, status: Status = Status.FAIL) -> Finding:
    return Finding(code=code, status=status, reason="fla-core 0.4.1 is installed, the lock has 0.6.0", fix="x")


NEW_WHEELS = tuple(replace(p, files_sha256=OTHER) if p.name == "fla-core" else p for p in LOCK.pins)
NO, UNKNOWN = Status.FAIL, Status.UNKNOWN
# name: only this fact is wrong, the code and status that it gives, and words that name both sides.
WRONG: dict[str, tuple[dict[str, Any], str, Status, tuple[str, ...]]] = {
    "a lock without a GPU build": (locked(admits_launch=False), "launch-lock", NO, ("h200",)),
    "no verdict": ({"verdict": None}, "launch-no-verdict", UNKNOWN, ("no verdict",)),
    "an import verdict": (
        {"verdict": replace(VERDICT, level=Level.IMPORT)},
        "launch-level",
        UNKNOWN,
        ("import", "gpu"),
    ),
    "an interpreted verdict": (
        {"verdict": replace(VERDICT, level=Level.INTERPRETED)},
        "launch-level",
        UNKNOWN,
        ("interpreted",),
    ),
    "a wrong kernel": (probe(outcome=Outcome.WRONG, reason="dg is off"), "launch-verdict-no", NO, ("dg is off",)),
    "a kernel that hung": (probe(outcome=Outcome.HUNG), "launch-verdict-unknown", UNKNOWN, ("could not be verified",)),
    "a configuration that was not measured": (
        probe(configurations=(replace(PROBE.configurations[0], state="not-measured"),)),
        "launch-verdict-unknown",
        UNKNOWN,
        ("not measured",),
    ),
    "a verdict with a problem": (
        {"verdict": replace(VERDICT, problems=("ptxas could not be asked",))},
        "launch-verdict-unknown",
        UNKNOWN,
        ("ptxas",),
    ),
    "packed samples that leak": (
        {"verdict": replace(VERDICT, isolation=(SignalCheck(signals=SIGNALS, isolated=False, leak_gradient=1.0),))},
        "launch-verdict-no",
        NO,
        ("leak",),
    ),
    "no isolation measured": ({"verdict": replace(VERDICT, isolation=())}, "launch-packing", UNKNOWN, ("apart",)),
    "no packing measured": ({"verdict": replace(VERDICT, signals=None)}, "launch-packing", UNKNOWN, ("no packing",)),
    "other signals measured": (
        {"verdict": replace(VERDICT, signals=("position_ids",))},
        "launch-packing",
        UNKNOWN,
        ("seq_idx", "position_ids"),
    ),
    "no configuration of the model": ({"requests": None}, "launch-model", UNKNOWN, ("m/config.json",)),
    "another configuration": ({"model_sha256": OTHER}, "launch-model-changed", NO, (SHA[:16], OTHER[:16])),
    "a verdict of another model": (fingerprint(model_type="mamba2"), "launch-other-model", NO, ("mamba2", "qwen3_5")),
    "a verdict of another configuration": (
        {"verdict": replace(VERDICT, subject=Subject(source="x.json", model_type="qwen3_5", config_sha256=OTHER))},
        "launch-other-model",
        NO,
        ("x.json", OTHER[:16]),
    ),
    "a kernel that is not in the verdict": (
        {"requests": (REQUEST, replace(REQUEST, symbol="causal_conv1d_fn", package="causal_conv1d"))},
        "launch-not-measured",
        UNKNOWN,
        ("causal_conv1d_fn",),
    ),
    "inputs that were not measured": (
        {"requests": (replace(REQUEST, cases=(*REQUEST.cases, Case(name="rows", lengths=(5,), shape=SHAPE))),)},
        "launch-not-measured",
        UNKNOWN,
        ("rows",),
    ),
    "other head counts": (
        probe(cases=tuple(replace(c, shape={**SHAPE, "k_heads": 32}) for c in PROBE.cases)),
        "launch-other-shapes",
        NO,
        ("k_heads=32", "k_heads=48"),
    ),
    "another dtype": (probe(dtype="float16"), "launch-other-dtype", NO, ("float16", "bfloat16")),
    "another torch measured": (fingerprint(torch="2.12.0+cu130"), "launch-stale-verdict", NO, ("2.12.0", "2.13.0")),
    "another CUDA measured": (fingerprint(cuda="12.8"), "launch-stale-verdict", NO, ("12.8", "13.0")),
    "another triton measured": (fingerprint(triton="3.6.0"), "launch-stale-verdict", NO, ("3.6.0", "3.7.1")),
    "another transformers measured": (fingerprint(transformers="5.16.1"), "launch-stale-verdict", NO, ("5.16.1",)),
    "another fla measured": (
        fingerprint(distributions={**VERDICT.fingerprint.distributions, "fla-core": "0.4.1"}),
        "launch-stale-verdict",
        NO,
        ("fla-core 0.4.1", "0.6.0"),
    ),
    "no fla measured": (
        fingerprint(distributions={"torch": "2.13.0+cu130"}),
        "launch-stale-verdict",
        NO,
        ("fla-core (none)",),
    ),
    "a kernel measured that is not locked": (
        fingerprint(distributions={**VERDICT.fingerprint.distributions, "tilelang": "0.1.6"}),
        "launch-stale-verdict",
        NO,
        ("tilelang 0.1.6", "none of it"),
    ),
    "another build of the same version measured": (
        fingerprint(records={"fla-core": OTHER}),
        "launch-stale-verdict",
        NO,
        ("another build of fla-core",),
    ),
    "another build of the same version locked": (locked(pins=NEW_WHEELS), "launch-stale-verdict", NO, (OTHER[:16],)),
    "another Python measured": (fingerprint(python="3.11.7"), "launch-stale-verdict", NO, ("3.11.7", "3.12")),
    "another machine measured": (fingerprint(machine="aarch64"), "launch-stale-verdict", NO, ("aarch64",)),
    "another GPU measured than locked": (
        {**fingerprint(capability=(10, 0)), **here(gpus=(Gpu(name="NVIDIA B200", capability=(10, 0)),))},
        "launch-other-gpu",
        NO,
        ("10.0", "9.0"),
    ),
    "an environment that is not the lock's": (
        place(lock_findings=(failing("lock-version"),)),
        "launch-lock-version",
        NO,
        ("0.4.1", "0.6.0"),
    ),
    "an environment that could not be looked at": (
        place(lock_findings=(failing("hub-unreachable", Status.UNKNOWN),)),
        "launch-hub-unreachable",
        UNKNOWN,
        (),
    ),
    "an environment that was not looked at": (place(lock_findings=()), "launch-environment", UNKNOWN, ()),
    "a model bound to the slow path": (
        place(check_findings=(failing("bound-to-torch"),)),
        "launch-bound-to-torch",
        NO,
        (),
    ),
    "a binding that could not be read": (
        place(check_findings=(failing("binding-unknown", Status.UNKNOWN),)),
        "launch-binding-unknown",
        UNKNOWN,
        (),
    ),
    "a changed binary": (
        place(binaries={"triton/_C/libtriton.so": OTHER}),
        "launch-other-binary",
        NO,
        (SHA[:16], OTHER[:16]),
    ),
    "a missing binary": (place(binaries={}), "launch-other-binary", NO, ("no such file",)),
    "a binary that was not measured": (
        place(binaries={**PLACE.binaries, "fla/x.so": OTHER}),
        "launch-other-binary",
        NO,
        ("fla/x.so",),
    ),
    "no GPU": (here(gpus=(), gpu_state=GpuState.NONE), "launch-no-gpu", UNKNOWN, ("none",)),
    "a hidden GPU": (
        here(gpu_state=GpuState.HIDDEN, gpu_detail="hides every GPU"),
        "launch-no-gpu",
        UNKNOWN,
        ("hides",),
    ),
    "another GPU here": (
        here(gpus=(Gpu(name="NVIDIA A100", capability=(8, 0)),)),
        "launch-other-gpu",
        NO,
        ("8.0", "9.0"),
    ),
    "one other GPU among the right ones": (
        here(gpus=(*HERE.gpus, Gpu(name="NVIDIA L4", capability=(8, 9)))),
        "launch-other-gpu",
        NO,
        ("NVIDIA L4",),
    ),
    "a GPU of unknown kind": (
        here(gpus=(Gpu(name="NVIDIA GPU", capability=None),)),
        "launch-other-gpu",
        NO,
        ("unknown",),
    ),
    "an unknown driver": (here(driver=None), "launch-driver", UNKNOWN, ("this machine",)),
    "a verdict without a driver": (fingerprint(driver=""), "launch-driver", UNKNOWN, ("the verdict",)),
    "an unknown floor": ({"floor": None}, "launch-driver", UNKNOWN, ("13.0",)),
    "a driver below the floor": (here(driver=Version("575.51.03")), "launch-driver", NO, ("580", "575.51")),
    "a driver of an older branch": (
        fingerprint(driver="590.10"),
        "launch-driver-branch",
        NO,
        ("590.10", "580.95"),
    ),
    "a candidate image": (image(candidate=True), "launch-candidate", NO, ("never verified",)),
    "an image that was changed": (image(changed=True), "launch-image-changed", NO, ("no longer what was verified",)),
    "an image by tag": (image(digest=""), "launch-image-tag", NO, ("tag",)),
    "an image of another lock": (image(lock_digest="sha256:" + OTHER), "launch-other-image", NO, (OTHER,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_one_wrong_fact_refuses(name: str) -> None:
    changes, code, status, words = WRONG[name]
    admission = ask(**changes)
    assert not admission.admitted
    assert admission.status is status
    codes = {f.code for f in admission.refusals}
    assert codes == {code}, admission.refusals
    finding = next(f for f in admission.refusals if f.code == code)
    assert finding.fix, "a refusal names what would settle it"
    for word in words:
        assert word in finding.reason
    assert admission.reasons == tuple(f.reason for f in admission.refusals)


def test_all_reasons_are_told_at_once() -> None:
    admission = ask(**fingerprint(torch="2.12.0+cu130", machine="aarch64"), floor=None)
    assert {f.code for f in admission.refusals} == {"launch-stale-verdict", "launch-driver"}
    assert len(admission.refusals) == 3
    # A definite no decides over what is not known.
    assert admission.status is Status.FAIL
    assert [f.status for f in order(admission.findings)][:3] == [Status.FAIL, Status.FAIL, Status.UNKNOWN]


def test_the_driver_may_be_newer() -> None:
    assert ask(**here(driver=Version("595.1"))).admitted
    assert ask(**here(driver=Version("580.65.06"))).admitted, "an older release of the same branch"


def test_what_every_rank_looks_at_is_not_asked_here() -> None:
    admission = ask(**image())
    assert admission.admitted
    assert any("by every rank" in reason for reason in admission.reasons)


def test_an_engine_without_digests_takes_a_tag_and_says_who_compares() -> None:
    admission = ask(**image(digest="", tag_is_all=True, lock_digest=""))
    assert admission.admitted
    assert admission.status is Status.WARN
    assert any("each rank compares" in reason for reason in admission.reasons)


OVERRIDES: dict[str, tuple[str, Overrides, str]] = {
    "driver": (
        "a driver of an older branch",
        Overrides(accept_older_driver=True),
        "accept-older-driver-branch",
    ),
    "unmeasured": (
        "a kernel that is not in the verdict",
        Overrides(accept_unmeasured=("causal_conv1d_fn",)),
        "accept-unmeasured causal_conv1d_fn",
    ),
    "configurations": (
        "a configuration that was not measured",
        Overrides(accept_unmeasured=("chunk_gated_delta_rule",)),
        "accept-unmeasured chunk_gated_delta_rule",
    ),
}


def test_a_fix_can_be_pasted_whatever_its_paths_hold() -> None:
    names = {"lock": "l", "model": "my model/config.json", "python": "env/bin/python", "verdict": "v $1.json"}
    [finding] = ask(verdict=None, names=names).refusals
    typed = [
        "kernelguard",
        "verify",
        names["model"],
        "--python",
        names["python"],
        "--level",
        "gpu",
        "-o",
        names["verdict"],
    ]
    assert shlex.split(finding.fix) == typed


def test_a_kernel_of_the_trainers_own_need_not_be_in_the_verdict_and_has_to_fit_if_it_is() -> None:
    """The trainer takes it only if the ticket has a probe of it."""
    own = replace(REQUEST, symbol="packed_convolution", package="kernelguard_train", stands_for="causal_conv1d_fn")
    assert ask(requests=(REQUEST, own)).admitted
    measured = replace(PROBE, symbol=own.symbol, package=own.package)
    fits = replace(VERDICT, probes=(PROBE, measured))
    assert ask(requests=(REQUEST, own), verdict=fits).admitted
    other = replace(measured, cases=tuple(replace(case, shape={"channels": 7}) for case in measured.cases))
    refused = ask(requests=(REQUEST, own), verdict=replace(VERDICT, probes=(PROBE, other)))
    assert not refused.admitted
    assert {f.code for f in refused.findings if f.status is Status.FAIL} == {"launch-other-shapes"}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_accepts_only_what_it_names(name: str) -> None:
    wrong, overrides, text = OVERRIDES[name]
    admission = ask(**WRONG[wrong][0], overrides=overrides)
    assert admission.admitted
    assert admission.overrides == (text,)
    for other in WRONG:
        if other != wrong and not (
            name == "configurations" and WRONG[other][1] in {"launch-verdict-unknown", "launch-not-measured"}
        ):
            assert not ask(**WRONG[other][0], overrides=overrides).admitted, other


def test_other_dependencies_can_be_accepted_but_no_other_kernel() -> None:
    numpy = Finding(code="lock-version", status=Status.FAIL, reason="numpy 2.2.0 is installed, the lock has 2.3.0")
    overrides = Overrides(accept_other_dependencies=True)
    assert not ask(**place(lock_findings=(numpy,))).admitted
    assert ask(**place(lock_findings=(numpy,)), overrides=overrides).admitted
    assert not ask(**place(lock_findings=(numpy, failing("lock-version"))), overrides=overrides).admitted


def test_a_wrong_kernel_is_never_accepted() -> None:
    overrides = Overrides(accept_unmeasured=("chunk_gated_delta_rule",), accept_older_driver=True)
    assert not ask(**WRONG["a wrong kernel"][0], overrides=overrides).admitted


def test_the_test_override_needs_no_gpu_but_everything_else() -> None:
    overrides = Overrides(accept_level=Level.INTERPRETED)
    verdict = replace(VERDICT, level=Level.INTERPRETED, fingerprint=replace(VERDICT.fingerprint, capability=None))
    without_gpu = here(gpus=(), gpu_state=GpuState.NONE, driver=None)
    admission = ask(verdict=verdict, **without_gpu, overrides=overrides, **locked(admits_launch=False))
    assert admission.admitted
    assert admission.overrides == ("test-only-accept-level interpreted",)
    assert not ask(verdict=replace(verdict, level=Level.IMPORT), **without_gpu, overrides=overrides).admitted
    stale = replace(verdict, fingerprint=replace(verdict.fingerprint, triton="3.6.0"))
    assert not ask(verdict=stale, **without_gpu, overrides=overrides).admitted
