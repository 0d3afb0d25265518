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

import launch_world
import pytest

from command import Command
from kernelguard.guard.attestation import NAME

pytestmark = [pytest.mark.thorough, pytest.mark.observed]
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
) -> tuple[Command, Path]:
    run_dir = script.parent / "run"
    fixed = ("--processes", "2", "--run-dir", str(run_dir), *options, "--", str(script), str(script.parent), *words)
    return world.launch(*fixed, env=env), run_dir


def test_two_equal_ranks_train_and_the_attestation_says_on_what(world: launch_world.World, script: Path) -> None:
    environ = {"HF_TOKEN": SECRET, "WANDB_API_KEY": "0123456789-k3y"}
    done, run_dir = launched(world, script, "--hub-token", "s3cret-word", "it's", env=environ)
    assert done.code == 0, done.err
    assert {p.name for p in script.parent.glob("started-*")} == {"started-0", "started-1"}
    assert '"it\'s"' in (script.parent / "started-0").read_text()
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert outcome["code"] == 0
    attestation = json.loads((run_dir / NAME).read_text())
    assert attestation["admission"]["overrides"] == ["test-only-accept-level import"]
    assert attestation["fields"]["version of fla-core"] == "0.6.0"
    written = [p for p in run_dir.rglob("*") if p.is_file() and "site" not in p.relative_to(run_dir).parts]
    assert len(written) >= 4
    for path in written:
        text = path.read_text()
        for word in (SECRET, "k3y", "s3cret-word"):
            assert word not in text, path


def test_one_rank_with_another_fla_ends_all_with_78(world: launch_world.World, script: Path) -> None:
    other = script.parent / "other"
    env = launch_world.make_interpreter(script.parent / "env")
    other.mkdir()
    for name in ("fla", "fla_core-0.6.0.dist-info"):
        (env.site / name).rename(other / name)
    metadata = other / "fla_core-0.6.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.6.0", "0.5.9"))
    wrapper = script.parent / "python-of-a-rank"
    wrapper.write_text(
        f'#!/bin/bash\nif [ "${{LOCAL_RANK:-}}" = 1 ]; then export PYTHONPATH="{other}:$PYTHONPATH"; fi\n'
        f'exec "{world.python}" "$@"\n'
    )
    wrapper.chmod(0o755)
    began = time.monotonic()
    done, run_dir = launched(world, script, env={"PYTHON_EXEC": str(wrapper)})
    assert done.code == 78, done.err
    assert time.monotonic() - began < LONG_S
    outcome = json.loads((run_dir / "outcome.json").read_text())
    assert {row["field"]: row["values"].get("0.5.9") for row in outcome["differing"]}["version of fla-core"] == [1]
    assert not list(script.parent.glob("started-*")), "no training script was started"


def test_a_sigterm_lets_both_ranks_save_and_the_trainers_code_is_kept(world: launch_world.World, script: Path) -> None:
    run_dir = script.parent / "run"
    arguments = ["--python", world.python, "--test-only-accept-level", "import", "--processes", "2"]
    command = [Path(sys.executable).parent / "kernelguard", "launch", world.lock, *arguments, "--run-dir", run_dir]
    process = subprocess.Popen(
        [*map(str, command), "--", str(script), str(script.parent), "wait", "fail"],
        cwd=world.folder,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    end = time.monotonic() + LONG_S
    while len(list(script.parent.glob("started-*"))) < 2 and time.monotonic() < end and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=LONG_S)
    assert {p.name for p in script.parent.glob("saved-*")} == {"saved-0", "saved-1"}, err
    assert process.returncode == 17
    assert "passed on to ranks: 0, 1" in err


def test_a_port_that_is_taken_ends_the_launch(world: launch_world.World, script: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = f"master-port={taken.getsockname()[1]}"
        began = time.monotonic()
        done, _ = launched(world, script, options=("-o", port, "-o", "master-addr=127.0.0.1", "--rendezvous", "20"))
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
    assert "nothing was started" in done.err
    assert not (script.parent / "run").exists()
