"""What a verdict proves for an image of a lock, and what it does not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from image.locks import pin, small_lock
from kernelguard.errors import InputError
from kernelguard.image.evidence import Evidence, dumps, from_file, holds, load_evidence, make_evidence, told
from kernelguard.judge.values import Finding, Level, Status
from kernelguard.lock.values import LockedPath, Role
from kernelguard.verify.files import to_document
from kernelguard.verify.findings import findings
from kernelguard.verify.values import CaseResult, Fingerprint, Outcome, ProbeResult, Verdict

SYMBOL = "chunk_gated_delta_rule"


def verdict(level: Level = Level.GPU, outcome: Outcome = Outcome.RIGHT, **changes: Any) -> Verdict:
    probe = ProbeResult(
        symbol=SYMBOL,
        package="fla",
        op="gated_delta_rule",
        outcome=outcome,
        cases=(CaseResult(name="one", lengths=(64,), shape={}, outcome=outcome),) if level is Level.GPU else (),
    )
    fingerprint = Fingerprint(capability=(9, 0), distributions={"torch": "2.13.0", "fla-core": "0.6.0"})
    return replace(Verdict(level=level, fingerprint=fingerprint, probes=(probe,)), **changes)


def evidence(of: Verdict, *more: Finding) -> Evidence:
    answer = {"verdict": to_document(of), "check": {}, "findings": [asdict(f) for f in (*findings(of), *more)]}
    return make_evidence(answer, content="sha256:" + "c" * 64, name="train:v1", lock="sha256:1")


def at_gpu(of: Verdict, *more: Finding, **lock: Any) -> tuple[Status, set[str]]:
    answer = holds(evidence(of, *more), replace(small_lock(), **lock), Level.GPU)
    return answer.status, {f.code for f in answer.against}


def at_import(of: Verdict, *more: Finding, **lock: Any) -> tuple[Status, set[str]]:
    answer = holds(evidence(of, *more), replace(small_lock(), **lock), Level.IMPORT)
    return answer.status, {f.code for f in answer.against}


LOADED = verdict(Level.IMPORT, Outcome.LOADED)


def test_the_claims_hold() -> None:
    assert at_gpu(verdict()) == (Status.PASS, set())
    assert at_import(LOADED) == (Status.PASS, set())
    assert at_import(verdict()) == (Status.PASS, set())


@pytest.mark.parametrize(
    ("of", "code", "status"),
    [
        (LOADED, "level", Status.UNKNOWN),
        (verdict(Level.INTERPRETED), "level", Status.UNKNOWN),
        (verdict(outcome=Outcome.WRONG), "wrong-result", Status.FAIL),
        (verdict(outcome=Outcome.CRASHED), "kernel-crashes", Status.FAIL),
        (verdict(outcome=Outcome.HUNG), "could-not-verify-hung", Status.UNKNOWN),
        (verdict(outcome=Outcome.NO_BACKWARD), "no-backward", Status.UNKNOWN),
        (verdict(probes=()), "not-measured", Status.UNKNOWN),
        (verdict(problems=("the worker died",)), "verify-problem", Status.UNKNOWN),
        (replace(verdict(), fingerprint=Fingerprint(capability=(8, 0))), "other-gpu", Status.UNKNOWN),
        (replace(verdict(), fingerprint=Fingerprint()), "other-gpu", Status.UNKNOWN),
        (
            replace(verdict(), fingerprint=Fingerprint(capability=(9, 0), distributions={"fla-core": "0.5.2"})),
            "other-version",
            Status.FAIL,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_only_one_thing_is_wrong(of: Verdict, code: str, status: Status) -> None:
    decided, codes = at_gpu(of)
    assert code in codes
    assert decided is status


def test_a_kernel_of_another_build() -> None:
    mine = replace(pin("fla-core", "0.6.0", Role.KERNEL), files_sha256="a" * 64)
    measured = replace(verdict().fingerprint, records={"fla-core": "b" * 64})
    assert at_gpu(replace(verdict(), fingerprint=measured), pins=(mine,)) == (Status.FAIL, {"other-build"})
    same = replace(verdict().fingerprint, records={"fla-core": "a" * 64})
    assert at_gpu(replace(verdict(), fingerprint=same), pins=(mine,)) == (Status.PASS, set())


def test_every_fast_path_of_the_lock_has_to_be_measured() -> None:
    more = LockedPath(symbol="causal_conv1d_fn", package="causal_conv1d", served_by="causal-conv1d 1.7.0", layers=48)
    assert at_gpu(verdict(), fast_paths=(*small_lock().fast_paths, more)) == (Status.UNKNOWN, {"not-measured"})
    assert at_import(LOADED, fast_paths=(*small_lock().fast_paths, more)) == (Status.UNKNOWN, {"not-loaded"})


def test_what_the_check_found_counts_too() -> None:
    broken = Finding(code="torch-moved", status=Status.FAIL, reason="torch 2.12.0 is installed, the lock has 2.13.0")
    assert at_gpu(verdict(), broken) == (Status.FAIL, {"torch-moved"})
    assert at_import(LOADED, broken) == (Status.FAIL, {"torch-moved"})
    assert "torch 2.12.0 is installed" in told((broken,))


def test_what_only_a_gpu_can_tell_does_not_stand_against_a_candidate() -> None:
    waits = Finding(code="needs-gpu-to-bind", status=Status.UNKNOWN, fast_path=SYMBOL, reason="looked up on a GPU only")
    other = Finding(code="binding-unknown", status=Status.UNKNOWN, fast_path=SYMBOL, reason="not known")
    assert at_import(verdict(Level.IMPORT, probes=()), waits) == (Status.PASS, set())
    assert at_import(LOADED, other) == (Status.UNKNOWN, {"binding-unknown"})
    assert at_gpu(verdict(), waits)[0] is Status.UNKNOWN


def test_a_cpu_lock_lacks_what_it_says_it_lacks() -> None:
    missing = Finding(code="not-installed", status=Status.FAIL, fast_path=SYMBOL, reason="causal-conv1d is not there")
    unserved = replace(small_lock().fast_paths[0], served_by="")
    assert at_import(LOADED, missing, admits_launch=False, fast_paths=(unserved,)) == (Status.PASS, set())
    # A lock for a GPU, or one that says who serves it, is held to that.
    assert at_import(LOADED, missing, fast_paths=(unserved,))[0] is Status.FAIL
    assert at_import(LOADED, missing, admits_launch=False)[0] is Status.FAIL
    assert at_gpu(verdict(), admits_launch=False) == (Status.UNKNOWN, {"cpu-lock"})


def test_a_file_round_trips_and_is_named_by_its_bytes(tmp_path: Path) -> None:
    made = evidence(verdict())
    path = tmp_path / "verdict.json"
    path.write_bytes(dumps(made.document))
    read = load_evidence(path)
    assert (read.verdict, read.content, read.sha256) == (made.verdict, made.content, made.sha256)
    path.write_bytes(path.read_bytes().replace(b'"outcome": "right"', b'"outcome": "wrong"'))
    assert load_evidence(path).sha256 != made.sha256


def test_a_finding_that_was_taken_out_of_a_file_comes_back() -> None:
    document = dict(evidence(verdict(outcome=Outcome.WRONG)).document)
    document["findings"] = []
    assert holds(from_file(document, source="x"), small_lock(), Level.GPU).status is Status.FAIL


@pytest.mark.parametrize("missing", ["image", "findings", "level", "probes"])
def test_a_file_that_lacks_something(tmp_path: Path, missing: str) -> None:
    document = {k: v for k, v in evidence(verdict()).document.items() if k != missing}
    path = tmp_path / "verdict.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"verdict\.json"):
        load_evidence(path)


def test_no_file_and_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_evidence(tmp_path / "none.json")
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="is not JSON"):
        load_evidence(tmp_path / "x.json")
