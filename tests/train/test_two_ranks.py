"""Two real processes with gloo: equal to one, stopped together, failing together, killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_run
import tiny
import torch

from kernelguard_train.config import Config
from kernelguard_train.errors import Interrupted
from kernelguard_train.ranks import Ranks

HERE = Path(__file__).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", "127.0.0.1:0"]  # fmt: skip
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(HERE.parents[1] / "train"), "OMP_NUM_THREADS": "1"}
LIMIT = 400
"""Seconds after which a run counts as hanging."""


def finished(command: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a command; one that hangs is ended, its ranks included."""
    with subprocess.Popen(
        command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            for child in _children(process.pid):
                os.kill(child, signal.SIGKILL)
            process.kill()
            raise
    return process.returncode, errors


def configured(model_folder: Path, output: Path, *overrides: str) -> Config:
    return tiny.configured(
        model_folder, f"train.output={output}", "batch.tokens=128", "batch.per_step=4", "train.steps=4", *overrides
    )


@pytest.fixture(scope="module")
def one(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, alone: Ranks) -> Config:
    """The same run by one process, uninterrupted."""
    config = configured(model_folder, tmp_path_factory.mktemp("one"))
    tiny.run(config, alone)
    return config


@pytest.fixture(scope="module")
def folder(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, alone: Ranks) -> Path:
    """Where two ranks left what they found; see `two_ranks.py`."""
    folder = tmp_path_factory.mktemp("two")
    test_run.stopped_at(configured(model_folder, folder / "from_one"), alone, 1)
    command = [*TORCHRUN, str(HERE / "two_ranks.py"), str(model_folder), str(folder)]
    code, errors = finished(command)
    assert code == 0, errors[-3000:]
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def curve(output: Path) -> list[float]:
    """Loss and gradient norm of every step. The norm matters: AdamW and clipping hide gradients of a wrong scale."""
    lines = [json.loads(line) for line in (output / "steps.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in ("loss", "norm")]


@pytest.mark.parametrize("name", ["together", "hsdp", "kept", "pairs", "from_one"])
def test_two_ranks_equal_one(folder: Path, one: Config, name: str) -> None:
    assert curve(folder / name) == pytest.approx(curve(Path(one.train.output)), rel=1e-4)
    expected = test_run.weights(one)
    theirs = test_run.weights(replace(one, train=replace(one.train, output=str(folder / name))))
    assert expected.keys() == theirs.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(theirs[key], tensor, rtol=1e-3, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("architecture", ["llama", "qwen3_next", "bamba"])
def test_two_ranks_equal_one_on_every_architecture(
    folder: Path, tmp_path: Path, alone: Ranks, architecture: str
) -> None:
    """Tied embeddings, experts, and a Mamba-2 hybrid."""
    tiny.run(tiny.synthetic(tmp_path, architecture, tmp_path / "one"), alone)
    assert curve(folder / architecture) == pytest.approx(curve(tmp_path / "one"), rel=1e-4)


def test_no_rank_holds_the_whole_model(found: list[dict[str, Any]]) -> None:
    assert sum(rank["own_numbers"] for rank in found) == found[0]["all_numbers"]
    assert max(rank["own_numbers"] for rank in found) < 0.55 * found[0]["all_numbers"]


def test_each_rank_reads_its_own_rows(found: list[dict[str, Any]]) -> None:
    assert [rank["loaded_wrong"] for rank in found] == [[], []]
    assert found[0]["loaded"] > 40


def test_one_process_goes_on_from_two(folder: Path, one: Config, found: list[dict[str, Any]], alone: Ranks) -> None:
    for rank in found:
        assert rank["stopped"].startswith("Interrupted: asked to stop: saved at step 3")
    config = replace(one, train=replace(one.train, output=str(folder / "stopped")))
    tiny.run(config, alone)
    assert curve(folder / "stopped") == pytest.approx(curve(Path(one.train.output)), rel=1e-4)


def test_a_bad_number_on_one_rank_is_skipped_by_both(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "poisoned" / "steps.jsonl").read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [0, 1, 1, 1]
    assert all(line["loss"] == line["loss"] for line in lines[2:]), "later losses are numbers on all ranks"


@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("bad_row", "DataError: bad.jsonl:241: not JSON"),
        ("indivisible", "ConfigError: batch.per_step = 3 cannot be shared by 2 ranks; use 2 or 4"),
        ("mesh", "ConfigError: parallel.shard = 3 does not divide the 2 ranks"),
        ("shortened", "DataError: the ranks are at different places in the data (1 of 2 have none left)"),
        ("moved", "DataError: the ranks are at different places in the data (0 of 2 have none left)"),
        ("full", "CheckpointError: a checkpoint could not be written to"),
    ],
)
def test_all_ranks_end_with_the_same_kind_of_error(found: list[dict[str, Any]], what: str, expected: str) -> None:
    assert all(rank[what].startswith(expected) for rank in found), found


def test_a_full_disk_is_named_and_leaves_nothing_half_written(folder: Path, found: list[dict[str, Any]]) -> None:
    assert any("File too large" in rank["full"] or "unexpected pos" in rank["full"] for rank in found), found
    left = list((folder / "full" / "checkpoints").iterdir())
    assert [path for path in left if path.name.startswith("step-")] == []


def test_a_killed_rank_ends_the_run_and_costs_at_most_one_interval(
    model_folder: Path, tmp_path: Path, one: Config, alone: Ranks
) -> None:
    config = configured(model_folder, tmp_path, "checkpoint.every=1")
    overrides = [f"train.output={tmp_path}", "checkpoint.every=1"]
    text = tmp_path / "config.toml"
    from kernelguard_train import configfile

    text.write_text(configfile.dump(config))
    command = [*TORCHRUN, "-m", "kernelguard_train", str(text), *overrides]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    checkpoints = tmp_path / "checkpoints"
    until = time.monotonic() + LIMIT
    while not list(checkpoints.glob("step-*")) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    victim = max(_children(process.pid))
    os.kill(victim, signal.SIGKILL)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode != 0, errors[-2000:]
    done = len(curve(tmp_path)) // 2
    assert done < 4, "the premise: it was killed before the end"
    newest = max(int(path.name.removeprefix("step-")) for path in checkpoints.glob("step-*"))
    assert newest >= done - 1
    tiny.run(config, alone)
    expected = curve(Path(one.train.output))[2 * newest :]
    assert curve(tmp_path)[-len(expected) :] == pytest.approx(expected, rel=1e-4)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_an_error_is_printed_once_and_the_exit_code_is_not_zero(tmp_path: Path, model_folder: Path) -> None:
    mistaken = [f"model.path={model_folder}", "model.init=random", "data.path=./nothing.jsonl", "data.workers=0"]
    command = [*TORCHRUN, "-m", "kernelguard_train", *mistaken, "train.device=cpu", f"train.output={tmp_path}"]
    code, errors = finished(command)
    assert code != 0
    assert errors.count("error: data.path: nothing at ./nothing.jsonl") == 1
    assert "kernelguard_train/cli.py" not in errors, "a person's mistake is answered without a traceback"


def test_interrupted_is_not_a_failure_of_the_model() -> None:
    assert Interrupted.exit_code == 128 + signal.SIGTERM
