"""What the two-GPU launch benchmark concludes: losses after a resume, and which process a rank is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import ROOT

FOLDER = ROOT / "benchmarks" / "two_gpus"


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    sys.path.insert(0, str(FOLDER))
    try:
        import launch

        yield launch
    finally:
        sys.path.remove(str(FOLDER))


KILLED = {1: 13.0, 2: 12.5, 3: 12.0, 4: 11.5}
WENT_ON = {4: 11.5, 5: 11.0, 6: 10.5}
TOKENS = 2**13


def test_a_run_that_went_on_as_if_nothing_had_happened_passes(bench: Any) -> None:
    found = bench.compare_losses(KILLED, WENT_ON, {step: loss * 1.0005 for step, loss in WENT_ON.items()}, 3, TOKENS)
    assert found["passed"]
    assert found["can_show_a_fault"]
    assert found["to_killed"] == {"steps": [4], "difference": 0.0, "tolerance": 2.0**-11}
    assert found["one_to_several"]["steps"] == [4, 5, 6]
    assert found["one_to_several"]["difference"] == pytest.approx(0.0005)
    assert found["one_to_several"]["tolerance"] == pytest.approx(2.0**-11 + 2.0**-9 * 0.5 / 11.5)


@pytest.mark.parametrize(
    ("several", "one"),
    [
        ({4: 11.6, 5: 11.0, 6: 10.5}, WENT_ON),
        (WENT_ON, {4: 11.5, 5: 11.1, 6: 10.5}),
        (WENT_ON, {4: 11.51, 5: 11.0, 6: 10.5}),
        ({1: 13.0, 2: 12.5, 3: 12.0, 4: 11.5}, WENT_ON),
        ({5: 11.0, 6: 10.5}, WENT_ON),
        ({}, {}),
    ],
    ids=[
        "another-loss",
        "one-rank-differs",
        "its-first-step-differs",
        "began-anew",
        "left-a-step-out",
        "no-step",
    ],
)
def test_a_run_that_did_not_fails(bench: Any, several: dict[int, float], one: dict[int, float]) -> None:
    assert not bench.compare_losses(KILLED, several, one, 3, TOKENS)["passed"]


def test_losses_that_hardly_change_are_said_to_show_nothing(bench: Any) -> None:
    flat = dict.fromkeys(WENT_ON, 11.5)
    found = bench.compare_losses({**KILLED, 3: 11.51}, flat, flat, 3, TOKENS)
    assert found["passed"]
    assert not found["can_show_a_fault"]


def test_without_the_loss_of_the_saved_step_nothing_is_shown(bench: Any) -> None:
    found = bench.compare_losses({4: 11.5}, WENT_ON, WENT_ON, 3, TOKENS)
    assert not found["passed"]
    assert not found["can_show_a_fault"]


def test_a_rank_is_found_below_the_launcher(bench: Any) -> None:
    inner = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    outer = f"""
import os, subprocess, sys
ranks = [subprocess.Popen([sys.executable, "-c", {inner!r}], env=os.environ | {{"LOCAL_RANK": str(n)}}) for n in (0, 1)]
print(*(rank.pid for rank in ranks), flush=True)
for rank in ranks: rank.wait()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={name: text for name, text in os.environ.items() if name != "LOCAL_RANK"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert bench.process_of_rank(process.pid, 1) == pids[1], "the rank itself, not what it started"
        with pytest.raises(LookupError, match=r"no process below \d+ is rank 2"):
            bench.process_of_rank(process.pid, 2)
    finally:
        process.communicate("\n")


def test_steps_done_twice_count_the_second_time(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(
        '{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.5}\n{"step": 2, "loss": 2.4}\n{"step": 3, "lo'
    )
    assert bench.losses(tmp_path) == {1: 3.0, 2: 2.4}


def test_tokens_of_a_step_are_what_it_added(bench: Any, tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 3.0, "tokens": 100 * n + (n == 2)} for n in (1, 2, 3)]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "tok')
    assert bench.trained_tokens(tmp_path) == 101
    assert bench.trained_tokens(tmp_path / "nothing") == 0
