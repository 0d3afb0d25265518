"""The whole launch for real: lock and verdict of the tool itself, torchrun, the guard in two gloo ranks, their end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import launch_world
import pytest

from command import Command
from kernelguard.guard.attestation import NAME

pytestmark = [pytest.mark.thorough, pytest.mark.observed]
faults = launch_world.faults
LONG_S = 300.0
SECRET = "hf_abcdefghijklmnopqrstuvwxyz012345"
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist

out = Path(sys.argv[1])
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
dist.init_process_group("gloo")
rank = dist.get_rank()
(out / f"started-{rank}").write_text(repr(sys.argv))
while "wait" in sys.argv and not stop:
    time.sleep(0.1)
if stop:
    (out / f"saved-{rank}").touch()
dist.barrier()
dist.destroy_process_group()
sys.exit(17 if "fail" in sys.argv else 0)
"""


@pytest.fixture(scope="module")
def world() -> launch_world.World:
    return launch_world.base()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def launched(
    world: launch_world.World,
    script: Path,
    *words: str,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
    level: str = "interpreted",
) -> tuple[Command, Path]:
    run_dir = script.parent / "run"
    fixed = ("--processes", "2", "--run-dir", str(run_dir), *options, "--", str(script), str(script.parent), *words)
    return world.launch(*fixed, env=env, level=level), run_dir


def ranks_with(folder: Path, python: Path, variables: dict[int, dict[str, str]]) -> dict[str, str]:
    """What makes torchrun start each rank with variables of its own, as nodes that were set up differently have."""
    words = {rank: " ".join(f"{name}={value}" for name, value in own.items()) for rank, own in variables.items()}
    cases = "\n".join(f"{rank}) export {text};;" for rank, text in words.items())
    wrapper = folder / "python-of-a-rank"
    wrapper.write_text(f'#!/bin/bash\ncase "${{LOCAL_RANK:-}}" in\n{cases}\nesac\nexec "{python}" "$@"\n')
    wrapper.chmod(0o755)
    return {"PYTHON_EXEC": str(wrapper)}


def causes(outcome: dict[str, Any], rank: int) -> str:
    return " ".join(cause for cause in outcome["causes"] if cause.startswith(f"rank {rank}"))


def test_two_equal_ranks_train_save_when_told_to_stop_and_leave_an_attestation(
    world: launch_world.World, script: Path
) -> None:
    run_dir = script.parent / "run"
    arguments = ["--python", world.python, "--test-only-accept-level", "interpreted", "--processes", "2"]
    command = [Path(sys.executable).parent / "kernelguard", "launch", world.lock, *arguments, "--run-dir", run_dir]
    secrets = {"HF_TOKEN": SECRET, "WANDB_API_KEY": "0123456789-k3y"}
    process = subprocess.Popen(
        [
            *map(str, command),
            "--",
            str(script),
            str(script.parent),
            "wait",
            "fail",
            "--hub-token",
            "s3cret-word",
            "it's",
        ],
        cwd=world.folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **secrets},
    )
    end = time.monotonic() + LONG_S
    while len(list(script.parent.glob("started-*"))) < 2 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LONG_S)
    assert {p.name for p in script.parent.glob("saved-*")} == {"saved-0", "saved-1"}, err
    assert process.returncode == 17, "the trainer's own code is kept"
    assert "passed on to ranks: 0, 1" in err
    assert '"it\'s"' in (script.parent / "started-0").read_text()
    assert json.loads((run_dir / "outcome.json").read_text())["code"] == 0
    passed = json.loads((run_dir / "ranks" / "1.json").read_text())["passed"]
    assert {"probe of causal_conv1d_fn", "probe of chunk_gated_delta_rule"} <= set(passed)
    attestation = json.loads((run_dir / NAME).read_text())
    assert attestation["admission"]["overrides"] == ["test-only-accept-level interpreted"]
    assert attestation["verdict"]["level"] == "interpreted"
    assert attestation["fields"]["version of fla-core"] == "0.6.0"
    assert attestation["preflight_seconds"]["total"] > attestation["preflight_seconds"]["probes"] > 0
    assert attestation["collectives"]["backend"] == "gloo"
    assert attestation["collectives"]["world_size"] == 2
    written = [p for p in run_dir.rglob("*") if p.is_file() and "site" not in p.relative_to(run_dir).parts]
    assert len(written) >= 4
    for path in written:
        text = path.read_text()
        for word in (SECRET, "k3y", "s3cret-word"):
            assert word not in text, path


def test_ranks_with_another_fla_and_a_broken_convolution_end_all_with_78(
    world: launch_world.World, script: Path
) -> None:
    other = script.parent / "other"
    env = launch_world.make_interpreter(script.parent / "env")
    other.mkdir()
    for name in ("fla", "fla_core-0.6.0.dist-info"):
        (env.site / name).rename(other / name)
    metadata = other / "fla_core-0.6.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.6.0", "0.5.9"))
    broken = faults.group.write(script.parent / "broken", faults.Packages.broken_conv1d())
    front = {1: {"PYTHONPATH": f"{other}:$PYTHONPATH"}, 2: {"PYTHONPATH": f"{broken}:$PYTHONPATH"}}
    began = time.monotonic()
    environ = ranks_with(script.parent, world.python, front)
    done, run_dir = launched(world, script, options=("--processes", "3"), env=environ)
    assert done.code == 78, done.err
    assert time.monotonic() - began < LONG_S
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert "version of fla-core is 0.5.9" in causes(outcome, 1)
    assert "ImportError: undefined symbol: _ZN3c104cuda9SetDeviceEi" in causes(outcome, 2)
    assert {row["field"]: row["values"].get("0.5.9") for row in outcome["differing"]}["version of fla-core"] == [1]
    assert [row["state"] for row in outcome["ranks"]] == ["ok", "differs", "fault"]
    assert not list(script.parent.glob("started-*")), "no training script was started"


def test_ranks_that_die_and_hang_in_the_probe_are_told_apart(world: launch_world.World, script: Path) -> None:
    environ = ranks_with(script.parent, world.python, {1: {"FAULT": "segv"}, 2: {"FAULT": "hang"}})
    began = time.monotonic()
    done, run_dir = launched(world, script, options=("--processes", "3", "--probes", "60"), env=environ)
    assert done.code == 75, done.err
    assert time.monotonic() - began < LONG_S
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert "probe of causal_conv1d_fn" in causes(outcome, 1)
    assert "SIGSEGV" in causes(outcome, 1)
    assert "could not tell: probe of causal_conv1d_fn: did not end within" in causes(outcome, 2)
    assert [row["state"] for row in outcome["ranks"]] == ["ok", "fault", "unknown"]
    assert outcome["nodes_at_fault"] == [socket.gethostname()]
    assert not list(script.parent.glob("started-*"))


def test_a_port_that_is_taken_ends_the_launch(world: launch_world.World, script: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"master-port={taken.getsockname()[1]}"
        began = time.monotonic()
        # Without probes, which nobody would get to.
        options = ("-o", port, "-o", "master-addr=127.0.0.1", "--rendezvous", "20")
        done, _ = launched(world, script, options=options, level="import")
    assert done.code not in {0, 2}
    assert time.monotonic() - began < LONG_S
    assert not list(script.parent.glob("started-*"))
    assert "kernelguard: exit" in done.err


def test_a_changed_kernel_and_a_missing_gpu_verdict_are_refused(world: launch_world.World, script: Path) -> None:
    env = launch_world.make_interpreter(script.parent / "env")
    init = env.site / "causal_conv1d" / "__init__.py"
    init.write_text(init.read_text() + "\n# one line more\n")
    arguments = ["--python", env.python, "--run-dir", script.parent / "run", "--", script, script.parent]
    done = Command("launch", world.lock, *arguments, cwd=world.folder, env={"OMP_NUM_THREADS": "1"})
    assert done.code == 1
    for code in ("launch-file-changed", "launch-level", "launch-lock"):
        assert code in done.out
    assert "nothing was started" in done.out
    assert not (script.parent / "run").exists()
