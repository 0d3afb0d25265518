"""Every liar of the field is seen, and a kernel that fails is never confused with a question that has no answer."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from many import probe_many
from ops import LIARS

import observed
from kernelguard.verify.probing import run_probe
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import UNTOLD, Outcome, ProbeResult

pytestmark = pytest.mark.observed

CASES = (
    Case(name="short", lengths=(63, 1, 37), shape={"size": 16}),
    Case(name="long", lengths=(257,), shape={"size": 16}, repeats=1),
)
# symbol: outcome, what the reason names
EXPECTED = {
    "swiglu": (Outcome.RIGHT, ""),
    "zero_gradient": (Outcome.WRONG, "gradient of a is off by 1, .*and is zero everywhere"),
    "identity_gradient": (Outcome.WRONG, "gradient of a is off"),
    "one_wrong_input": (Outcome.WRONG, "^short: gradient of b is off by 0.1"),
    "too_few_gradients": (Outcome.WRONG, "^short: gradient of b is missing$"),
    "no_gradient_at_all": (Outcome.WRONG, "gradient of a is missing; gradient of b is missing"),
    "one_wrong_row": (Outcome.WRONG, "^short: gradient of b is off"),
    "nan_above_a_length": (Outcome.WRONG, "^long: gradient of a is not finite"),
    "wrong_output": (Outcome.WRONG, "output is off by 0.05"),
    "wrong_shape": (Outcome.WRONG, "output has shape"),
    "trembles": (Outcome.RIGHT, ""),
    "wrong_now_and_then": (Outcome.WRONG, "^short: output is off by 1,"),
    "segfault": (Outcome.CRASHED, "SIGSEGV at stage 'short: forward'"),
    "abort_in_backward": (Outcome.CRASHED, "SIGABRT at stage 'short: backward'"),
    "hang": (Outcome.HUNG, "did not end within its time limit at stage 'short: forward'"),
    "out_of_memory": (Outcome.OUT_OF_MEMORY, "RuntimeError in forward"),
    "memory_above_the_limit": (Outcome.OUT_OF_MEMORY, "in forward"),
    "killed": (Outcome.OUT_OF_MEMORY, "SIGKILL"),
    "leaves": (Outcome.UNREADABLE, "ended with exit code 0 and no result"),
    "garbage": (Outcome.UNREADABLE, "unreadable result"),
    "raises": (Outcome.RAISED, "ValueError in forward: head_dim 256 is not supported"),
    "raises_in_backward": (Outcome.RAISED, "RuntimeError in backward: Triton >= 3.4.0"),
    "loads_from_a_host_that_is_away": (Outcome.UNREACHABLE, "ValueError in forward: the publisher cannot be verified"),
    "not_implemented": (Outcome.RAISED, "it has no backward, and this run trains"),
    "absent": (Outcome.RAISED, "module liars has no absent"),
}


# These need a process of their own: they end it, or hang.
WILD = ("segfault", "abort_in_backward", "hang", "memory_above_the_limit", "killed", "leaves", "garbage", "swiglu")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProbeResult]:
    env = observed.environment(tmp_path_factory.mktemp("liars"), None, {"liars.py": LIARS})

    requests = {
        symbol: ProbeRequest(symbol=symbol, package="liars", module="liars", op="swiglu", cases=CASES)
        for symbol in EXPECTED
    }

    def probe(symbol: str) -> ProbeResult:
        return run_probe(
            str(env.python),
            requests[symbol],
            timeout=30.0 if symbol == "hang" else 120.0,
            device="cpu",
            environ={**os.environ, "OMP_NUM_THREADS": "1"},
            memory_bytes=10 << 30,
        )

    tame = {s: r for s, r in requests.items() if s not in WILD}
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(WILD, pool.map(probe, WILD), strict=True))
    return found | probe_many(env.python, tame, env.prefix)


@pytest.mark.parametrize("symbol", EXPECTED)
def test_each_is_told_apart(symbol: str, results: dict[str, ProbeResult]) -> None:
    outcome, words = EXPECTED[symbol]
    result = results[symbol]
    assert result.outcome is outcome, result
    assert re.search(words, result.reason), result.reason


def test_failed_is_never_could_not_tell(results: dict[str, ProbeResult]) -> None:
    """A kernel that is wrong, raises or crashes is a no; one that could not be run to its end is not."""
    untold = {s for s, r in results.items() if r.outcome in UNTOLD}
    away = "loads_from_a_host_that_is_away"
    assert untold == {"hang", "out_of_memory", "memory_above_the_limit", "killed", "leaves", "garbage", away}


def test_only_the_wrong_tensor_is_named(results: dict[str, ProbeResult]) -> None:
    tensors = {(t.role, t.name): t for t in results["one_wrong_input"].cases[0].tensors}
    assert {k: t.state for k, t in tensors.items()} == {
        ("output", "output"): "right",
        ("gradient", "a"): "right",
        ("gradient", "b"): "wrong",
    }
    wrong = tensors["gradient", "b"]
    assert wrong.error is not None
    assert wrong.plain is not None
    assert wrong.error > 10 * wrong.plain > 0.0


def test_a_wrong_row_is_seen_that_a_norm_over_everything_misses(results: dict[str, ProbeResult]) -> None:
    wrong = next(t for t in results["one_wrong_row"].cases[1].tensors if t.name == "b")
    assert wrong.worst is not None
    assert wrong.worst_allowed is not None
    assert wrong.worst > wrong.worst_allowed


def test_determinism_is_reported_and_is_not_a_failure(results: dict[str, ProbeResult]) -> None:
    assert results["swiglu"].deterministic is True
    assert results["trembles"].deterministic is False
    assert results["segfault"].deterministic is None
    assert "output output" in results["trembles"].cases[0].differing


def test_a_later_case_still_runs_when_an_earlier_one_raises(results: dict[str, ProbeResult]) -> None:
    assert [c.outcome for c in results["raises"].cases] == [Outcome.RAISED, Outcome.RAISED]
    assert [c.outcome for c in results["nan_above_a_length"].cases] == [Outcome.RIGHT, Outcome.WRONG]


def test_no_driver_is_could_not_tell(tmp_path: Path) -> None:
    env = observed.environment(tmp_path / "env", None, {"liars.py": LIARS})
    request = ProbeRequest(symbol="swiglu", package="liars", module="liars", op="swiglu", cases=CASES)
    result = run_probe(str(env.python), request, timeout=60.0, device="cuda")
    assert result.outcome is Outcome.NO_DRIVER
    assert "CUDA" in result.reason
