"""A Triton kernel of our own under Triton's interpreter: each configuration that can be picked is measured."""

from __future__ import annotations

import os
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton_env

import observed
from kernelguard.verify.probing import run_probe
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import Outcome, ProbeResult

pytestmark = [pytest.mark.observed, pytest.mark.thorough]


SHORT = Case(name="short", lengths=(5, 3), shape={"size": 33}, repeats=2)


def probe(
    folder: Path, text: str, *, force: bool = True, shards: int = 1, cases: tuple[Case, ...] = (SHORT,)
) -> ProbeResult:
    base = triton_env.triton_base()
    env = observed.make_venv(folder, sees=(base.site, observed.torch_base().site))
    (env.site / "kernels.py").write_text(text)
    request = ProbeRequest(
        symbol="swiglu",
        package="kernels",
        module="kernels",
        op="swiglu",
        dtype="float32",
        cases=tuple(replace(case, force=force) for case in cases),
    )
    return run_probe(
        str(env.python),
        request,
        timeout=120.0,
        device="cpu",
        shards=shards,
        environ={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "TRITON_CACHE_DIR": str(folder / "c")},
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProbeResult]:
    folder = tmp_path_factory.mktemp("autotuned")
    # The second case has the first one's tuning key (as many numbers), the third another.
    several = (SHORT, replace(SHORT, name="same key", lengths=(8,)), replace(SHORT, name="longer", lengths=(9,)))
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "right": (triton_env.RIGHT, {"shards": 2}),
        "one wrong": (triton_env.ONE_WRONG, {}),
        "crashes": (triton_env.CRASHES, {}),
        "not forced": (triton_env.RIGHT, {"force": False}),
        "several": (triton_env.RIGHT, {"cases": several}),
    }
    with ThreadPoolExecutor(2) as pool:
        done = {name: pool.submit(probe, folder / name, text, **options) for name, (text, options) in jobs.items()}
    return {name: job.result() for name, job in done.items()}


def states(result: ProbeResult, kernel: str) -> dict[str, str]:
    return {c.config: c.state for c in result.configurations if c.kernel == kernel}


def test_every_configuration_is_measured_in_parallel_shards(results: dict[str, ProbeResult]) -> None:
    result = results["right"]
    assert result.outcome is Outcome.RIGHT, result
    for kernel in ("swiglu_fwd_kernel", "swiglu_bwd_kernel"):
        assert set(states(result, kernel).values()) == {"right"}
        assert len(states(result, kernel)) == 6
    assert len([c for c in result.configurations if c.picked]) == 2
    assert {c.key for c in result.configurations} == {
        "264,float32,float32,float32",
        "264,float32,float32,float32,float32,float32",
    }


def test_a_wrong_configuration_is_named_although_the_picked_one_is_right(results: dict[str, ProbeResult]) -> None:
    result = results["one wrong"]
    assert [c.outcome for c in result.cases] == [Outcome.RIGHT]
    assert result.outcome is Outcome.WRONG
    assert "swiglu_bwd_kernel with BLOCK=64" in result.reason
    assert "which the autotuner may pick: gradient of b is off by 0.5" in result.reason
    wrong = {c.config for c in result.configurations if c.state == "wrong"}
    assert wrong == {"BLOCK=64 num_warps=2 num_stages=3", "BLOCK=64 num_warps=4 num_stages=3"}
    # The kernel that is not to blame is cleared, though it ran in the same rows.
    assert set(states(result, "swiglu_fwd_kernel").values()) == {"right"}


def test_a_configuration_that_kills_the_process_costs_only_itself(results: dict[str, ProbeResult]) -> None:
    result = results["crashes"]
    assert result.outcome is Outcome.CRASHED
    backward = states(result, "swiglu_bwd_kernel")
    assert backward.pop("BLOCK=32 num_warps=2 num_stages=3") == "error"
    assert set(backward.values()) == {"right"}
    assert "SIGABRT" in result.reason


def test_what_was_not_measured_is_said(results: dict[str, ProbeResult]) -> None:
    """Only the picked configuration is known: the rest is listed as such, never as right."""
    result = results["not forced"]
    assert result.outcome is Outcome.RIGHT
    assert len(result.unmeasured_configurations) == 10
    assert {c.state for c in result.configurations if c.picked} == {"right"}


def test_a_later_case_is_swept_for_what_is_new_in_it_alone(results: dict[str, ProbeResult]) -> None:
    result = results["several"]
    assert result.outcome is Outcome.RIGHT, result
    assert {c.state for c in result.configurations} == {"right"}
    measured = Counter((c.kernel, c.case) for c in result.configurations)
    assert measured == {
        ("swiglu_fwd_kernel", "short"): 6,
        ("swiglu_bwd_kernel", "short"): 6,
        ("swiglu_fwd_kernel", "longer"): 6,
        ("swiglu_bwd_kernel", "longer"): 6,
    }
    assert {c.name for c in result.cases if c.outcome is Outcome.RIGHT} == {"short", "same key", "longer"}
