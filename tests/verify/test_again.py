"""Going on with what is known: configurations judged before, a verdict whose time was up, a cache that is filled."""

from __future__ import annotations

import json
import logging
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelguard.errors import InputError
from kernelguard.judge.values import Level, Status
from kernelguard.trace.values import FastPathTrace, KernelRun
from kernelguard.verify.cache import NOTE, cache_variables, is_filled, make_folder, note_filled
from kernelguard.verify.findings import findings
from kernelguard.verify.merge import earlier_of, merged
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import (
    CaseResult,
    Configuration,
    Fingerprint,
    Outcome,
    ProbeResult,
    StepTrace,
    Verdict,
)
from kernelguard.workers.probes.autotune import Forcing
from kernelguard.workers.probes.backends import Dispatch

PRINTS = Fingerprint(gpu="NVIDIA H200", triton="3.7.1", distributions={"fla-core": "0.6.0"}, shapes="a" * 64)
REQUEST = ProbeRequest(
    symbol="chunk", package="fla", module="fla.ops", op="kda", cases=(Case(name="odd", lengths=(321,), shape={"h": 4}),)
)


def configuration(number: int, state: str) -> Configuration:
    return Configuration(kernel="bwd", key="4", config=f"num_warps={number}", state=state)


def result(*configurations: Configuration, case: str = "odd", outcome: Outcome = Outcome.RIGHT) -> ProbeResult:
    cases = (CaseResult(name=case, lengths=(321,), shape={"h": 4}, outcome=Outcome.RIGHT),)
    return ProbeResult(
        symbol="chunk", package="fla", op="kda", dtype="bfloat16", outcome=outcome, reason="why", cases=cases,
        configurations=configurations,
    )  # fmt: skip


def states(probe: ProbeResult) -> dict[str, str]:
    return {c.config: c.state for c in probe.configurations}


def test_two_measurements_together_know_what_either_knew() -> None:
    before = result(configuration(2, "right"), configuration(4, "not-measured"), case="ragged")
    both = merged(before, result(configuration(2, "not-measured"), configuration(4, "right")))
    assert states(both) == {"num_warps=2": "right", "num_warps=4": "right"}
    assert [case.name for case in both.cases] == ["odd", "ragged"]
    assert both.outcome is Outcome.RIGHT


@pytest.mark.parametrize("wrong_first", [True, False])
def test_what_was_wrong_once_stays_wrong(wrong_first: bool) -> None:
    wrong = result(configuration(2, "wrong"), outcome=Outcome.WRONG)
    right = result(configuration(2, "right"))
    both = merged(wrong, right) if wrong_first else merged(right, wrong)
    assert both.outcome is Outcome.WRONG
    assert states(both) == {"num_warps=2": "wrong"}


def test_a_later_failure_is_not_made_good_by_an_earlier_success() -> None:
    late = result(outcome=Outcome.HUNG)
    assert merged(result(configuration(2, "right")), late) is late


def test_an_earlier_verdict_counts_only_on_the_same_ground() -> None:
    verdict = Verdict(level=Level.GPU, fingerprint=PRINTS, probes=(result(configuration(2, "right")),))
    assert earlier_of(verdict, REQUEST, replace(PRINTS, shapes="b" * 64)) is verdict.probes[0]
    assert earlier_of(None, REQUEST, PRINTS) is None
    for other in (
        replace(PRINTS, triton="3.6.0"),
        replace(PRINTS, gpu="NVIDIA H100"),
        replace(PRINTS, driver="1"),
        replace(PRINTS, distributions={"fla-core": "0.6.1"}),
        replace(PRINTS, binaries={"a.so": "0" * 64}),
    ):
        assert earlier_of(verdict, REQUEST, other) is None, other
    assert earlier_of(verdict, replace(REQUEST, cases=(replace(REQUEST.cases[0], shape={"h": 8}),)), PRINTS) is None
    assert earlier_of(verdict, replace(REQUEST, dtype="float16"), PRINTS) is None


def test_a_cache_is_filled_for_one_fingerprint(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert not is_filled(folder, PRINTS)
    make_folder(folder)
    note_filled(folder, PRINTS)
    assert is_filled(folder, PRINTS)
    assert is_filled(folder, replace(PRINTS, driver="999")), "the driver compiles nothing of Triton's"
    for other in (replace(PRINTS, triton="3.6.0"), replace(PRINTS, shapes="b"), replace(PRINTS, capability=(8, 0))):
        assert not is_filled(folder, other)
    assert json.loads((folder / NOTE).read_text("utf-8"))["set"] == cache_variables(folder)
    assert not is_filled(folder, PRINTS, first_step="one run's"), "no trainer took its first step"
    note_filled(folder, PRINTS, first_step="one run's")
    assert not is_filled(folder, PRINTS, first_step="one run's"), "what torch.compile made is not there"
    (folder / "torch-compile-a.bin").touch()
    assert is_filled(folder, PRINTS, first_step="one run's")
    assert is_filled(folder, PRINTS)
    assert not is_filled(folder, PRINTS, first_step="another's")
    (folder / NOTE).write_text("[]")
    assert not is_filled(folder, PRINTS)
    with pytest.raises(InputError, match="cannot make the cache folder"):
        make_folder(folder / NOTE / "below a file")


def forcing(candidates: dict[str, list[str]], judged: dict[str, dict[str, str]]) -> Any:
    """Without Triton, which only `take` needs."""
    found = object.__new__(Forcing)
    found.candidates, found.judged, found.refused = candidates, judged, {}
    return found


def test_only_kernels_that_are_new_are_swept() -> None:
    known = {"fwd[1]": {"a": "right", "b": "wrong"}}
    held = forcing({"fwd[1]": ["b", "a"], "bwd[2]": ["a", "b", "c"]}, known)
    assert held.settled("fwd[1]") == 1, "it takes one that is right"
    assert held.settled("bwd[2]") is None
    assert held.rows == 3
    held.learn({0: "right", 1: "wrong", 2: "untold"})
    assert held.judged["bwd[2]"] == {"a": "right", "b": "wrong"}
    assert held.judged["fwd[1]"] == {"a": "right", "b": "wrong"}, "what is settled was not swept"
    assert held.rows == 3, "one configuration is still not known"
    held.learn({2: "right"})
    assert held.rows == 0


def test_a_right_row_clears_what_a_wrong_row_shared() -> None:
    held = forcing({"fwd[1]": ["a"], "bwd[2]": ["a", "b"]}, {})
    held.learn({0: "right", 1: "wrong"})
    assert held.judged["fwd[1]"] == {"a": "right"}
    held.refused = {"bwd[2]": {1}}
    other = forcing({"bwd[2]": ["a", "b"]}, {"bwd[2]": {"a": "right"}})
    other.refused = {"bwd[2]": {1}}
    other.learn({})
    assert other.settled("bwd[2]") == 0


class Backend:
    """As fla's, with the answers that a test wants."""

    def __init__(self, package: str | None, *, available: bool = True, enabled: bool = True) -> None:
        self.package_name, self._available, self._enabled = package, available, enabled

    def is_available(self) -> bool:
        return self._available

    def is_enabled(self) -> bool:
        return self._enabled


def test_which_implementation_ran_is_told_for_each_that_could_have(monkeypatch: pytest.MonkeyPatch) -> None:
    class BackendRegistry:
        def __init__(self, operation: str) -> None:
            self.operation_name, self._backends, self._logged = operation, {}, set()

        def _get_sorted_backends(self) -> list[Any]:
            return list(self._backends.values())

    BackendRegistry.__module__ = "fla.backends"
    module = types.ModuleType("fla.backends")
    module.BackendRegistry = BackendRegistry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fla.backends", module)
    logger = logging.getLogger("fla.backends")
    dispatch = Dispatch()
    dispatch.take()
    assert dispatch.known
    registry, silent = BackendRegistry("common"), BackendRegistry("never asked")
    silent._backends["x"] = Backend(None)
    registry._backends = {
        "ran": Backend(None),
        "absent": Backend("no_such_package_of_this_name"),
        "deeper": Backend("no_such_package_of_this_name.deeper"),
        "off": Backend("json", enabled=False),
        "unfit": Backend("json", available=False),
        "declined": Backend("json"),
    }
    registry._get_sorted_backends()
    registry._logged = {"common:chunk:ran", "common:chunk:declined:fail"}
    logger.info("[FLA Backend] common.chunk -> declined rejected: needs K=128")
    assert dispatch.found() == {
        "common/ran": "ran",
        "common/absent": "not installed",
        "common/deeper": "not installed",
        "common/off": "switched off",
        "common/unfit": "not usable here",
        "common/declined": "declined: needs K=128",
    }


def test_a_package_without_a_registry_hands_nothing_on() -> None:
    dispatch = Dispatch()
    dispatch.take()
    assert (dispatch.known, dispatch.found()) == (False, {})


RUN = KernelRun(name="bwd", count=2, microseconds=1.0)
TRACED = FastPathTrace(symbol="chunk", package="fla", kernels=(RUN,), forward=True, backward=True)


@pytest.mark.parametrize(
    ("path", "code", "status"),
    [
        (TRACED, "kernel-ran", Status.PASS),
        (replace(TRACED, forward=False, kernels=()), "kernel-did-not-run", Status.FAIL),
        (replace(TRACED, forward=False, fallbacks=("aten::conv1d (3x)",)), "kernel-did-not-run", Status.FAIL),
        (replace(TRACED, fallbacks=("aten::conv1d (3x)",)), "fallback-ran", Status.WARN),
        (replace(TRACED, known=False, forward=False, kernels=()), "kernel-names-unknown", Status.UNKNOWN),
        (replace(TRACED, package="torch", fallbacks=("aten::math (1x)",)), "fallback-ran", Status.WARN),
    ],
)
def test_what_a_training_step_ran(path: FastPathTrace, code: str, status: Status) -> None:
    verdict = Verdict(level=Level.GPU, fingerprint=PRINTS, trace=StepTrace(fast_paths=(path,)))
    (found,) = findings(verdict)
    assert (found.code, found.status, found.fast_path) == (code, status, "chunk")
    assert all(text in found.reason for text in path.fallbacks)


def test_torch_attention_without_its_names_is_no_finding() -> None:
    quiet = replace(TRACED, package="torch", forward=False, kernels=())
    assert findings(Verdict(level=Level.GPU, fingerprint=PRINTS, trace=StepTrace(fast_paths=(quiet,)))) == ()


def test_the_quick_look_asks_about_the_shortest_inputs_and_leaves_the_autotuner_alone() -> None:
    long = Case(name="training", lengths=(4096,), shape={"h": 4}, force=True)
    asked = replace(REQUEST, cases=(long, replace(REQUEST.cases[0], force=True))).quick()
    (case,) = asked["cases"]
    assert (case["name"], case["force"], case["pin"]) == ("odd", False, None)
    assert asked["package"] == "fla"
    assert replace(REQUEST, op="").quick() == {}
