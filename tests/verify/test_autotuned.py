"""A Triton kernel of our own under Triton's interpreter: each configuration that can be picked is measured."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import triton_env

import observed
from kernelguard.verify.probing import run_probe
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import Outcome, ProbeResult

pytestmark = [pytest.mark.observed, pytest.mark.thorough]


def probe(folder: Path, text: str, *, force: bool = True, shards: int = 1) -> ProbeResult:
    base = triton_env.triton_base()
    env = observed.make_venv(folder, sees=(base.site, observed.torch_base().site))
    (env.site / "kernels.py").write_text(text)
    case = Case(name="short", lengths=(5, 3), shape={"size": 33}, force=force, repeats=2)
    request = ProbeRequest(
        symbol="swiglu", package="kernels", module="kernels", op="swiglu", dtype="float32", cases=(case,)
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
    jobs = {
        "right": (triton_env.RIGHT, True, 2),
        "one wrong": (triton_env.ONE_WRONG, True, 1),
        "crashes": (triton_env.CRASHES, True, 1),
        "not forced": (triton_env.RIGHT, False, 1),
    }
    with ThreadPoolExecutor(2) as pool:
        done = {
            name: pool.submit(probe, folder / name, text, force=force, shards=shards)
            for name, (text, force, shards) in jobs.items()
        }
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
