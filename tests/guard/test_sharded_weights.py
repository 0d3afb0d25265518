"""A fused loss and a weight that fully_shard has split: two real ranks, and every way to read that weight."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import group
import pytest

pytestmark = pytest.mark.observed
HERE = "[8, 8] of lm_head.weight [16, 8]"
RIGHT = (
    "in-the-root",
    "in-the-root-after-the-call",
    "through-the-head",
    "beside-a-compiled-function",
    "gathered-before",
    "gathered-inside",
    "unsharded-before",
)
ALONE = f"was given only this rank's {HERE}: it computes without the rest"
RAISED = f"was given {HERE}, as fully_shard left it, and raised RuntimeError"
WRONG = {
    "raises": ("FusedLoss", RAISED),
    "raises-under-another-name": ("FusedLoss", RAISED),
    "raises-after-the-call": ("FusedLoss", RAISED),
    "takes-its-part-before": ("FusedLoss", ALONE),
    "takes-its-part-after-the-call": ("FusedLoss", ALONE),
    "takes-its-part-inside": ("ThatTakesItsPart", ALONE),
    "plain-operators": ("the model's call mixes a sharded weight with plain tensors", HERE),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("shards")
    env = group.make_interpreter(folder / "env", None, {})
    argv = [str(env.python), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    argv += [str(group.free_port()), str(Path(__file__).with_name("shard_checks.py")), str(folder)]
    # Of all that lies in modules something answers a look with a warning: torch.distributed.reduce_op does.
    quiet = "error::FutureWarning:kernelguard.guard.shards"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": quiet}
    done = subprocess.run(argv, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1))
    return first, second


def test_every_case_is_looked_at(answers: tuple[dict[str, Any], ...]) -> None:
    assert set(answers[0]) == {*RIGHT, *WRONG}


@pytest.mark.parametrize("name", RIGHT)
def test_a_weight_that_is_whole_is_no_finding(name: str, answers: tuple[dict[str, Any], ...]) -> None:
    for rank in answers:
        assert rank[name] == {"findings": [], "ended": "trained", "left": False}


@pytest.mark.parametrize("name", WRONG)
def test_a_part_of_a_weight_ends_the_run(name: str, answers: tuple[dict[str, Any], ...]) -> None:
    """Public failure G05: it raises in DTensor's dispatch, or trains on a part of the vocabulary and says nothing."""
    for rank in answers:
        ((row, status, what),) = rank[name]["findings"]
        assert (row, status, rank[name]["ended"], rank[name]["left"]) == ("sharded-weight", "fail", "78", False)
        for words in WRONG[name]:
            assert words in what
