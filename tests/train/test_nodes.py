"""Several nodes, as a cluster starts them: torchrun's own rendezvous, a SIGTERM to each, and the example workload."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import test_two_ranks
import tiny
import yaml

from kernelguard_train import configfile
from kernelguard_train.config import Config
from kernelguard_train.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
WORKLOAD = ROOT / "train" / "examples" / "workload.yaml"
LIMIT = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def nodes(config: Path, rendezvous: list[str], ranked: bool) -> list[subprocess.Popen[str]]:
    """Two agents with a rank each, as two machines have them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
    return [
        subprocess.Popen(
            [*command, *(["--node-rank", str(node)] if ranked else []), "-m", "kernelguard_train", str(config)],
            env=test_two_ranks.ENVIRONMENT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]


def ended(agents: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit code and stderr of each agent; one that hangs is ended."""
    try:
        return [(agent.wait(0) if agent.poll() is not None else -1, errors) for agent, errors in
                [(agent, agent.communicate(timeout=LIMIT)[1]) for agent in agents]]  # fmt: skip
    finally:
        for agent in agents:
            agent.kill()


def written(config: Config, path: Path) -> Path:
    path.write_text(configfile.dump(config))
    return path


def test_a_sigterm_to_every_node_costs_nothing_and_the_nodes_go_on(
    model_folder: Path, tmp_path: Path, alone: Ranks
) -> None:
    """First with a static rendezvous, as in the example workload, then with c10d."""
    output = tmp_path / "run"
    many = tiny.configured(
        model_folder, f"train.output={output}", "batch.tokens=128", "batch.per_step=4", "train.steps=500",
        "optim.decay=constant", "optim.warmup=0",
    )  # fmt: skip
    static = ["--rdzv-backend", "static", "--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    agents = nodes(written(many, tmp_path / "many.toml"), [*static, "--max-restarts", "0"], ranked=True)
    until = time.monotonic() + LIMIT
    log = output / "steps.jsonl"
    while not (log.exists() and log.read_text().count("\n") >= 2) and time.monotonic() < until:
        assert all(agent.poll() is None for agent in agents), ended(agents)
        time.sleep(0.05)
    for agent in agents:
        agent.send_signal(signal.SIGTERM)
    codes = ended(agents)
    assert all(code != 0 for code, _ in codes)
    done = len(tiny.logged(many))
    assert done < 500, "the premise: it was stopped before the end"
    assert [path.name for path in (output / "checkpoints").glob("step-*")] == [f"step-{done:08d}"], "not a step is lost"
    assert f"saved at step {done}; the same command goes on from there" in codes[0][1]

    few = configfile.load(tmp_path / "many.toml", [f"train.steps={done + 2}"])
    c10d = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "7"]
    codes = ended(nodes(written(few, tmp_path / "few.toml"), c10d, ranked=False))
    assert [code for code, _ in codes] == [0, 0], codes
    whole = configfile.load(tmp_path / "few.toml", [f"train.output={tmp_path / 'whole'}"])
    expected = [line["loss"] for line in tiny.run(whole, alone)]
    assert [line["loss"] for line in tiny.logged(few)] == pytest.approx(expected, rel=1e-4)


def test_the_example_workload_starts_what_it_says(tmp_path: Path) -> None:
    """Its command runs in a shell as on a node of the platform; only torchrun is one that notes how it was called."""
    workload = yaml.safe_load(WORKLOAD.read_text())
    assert workload["max_retries"] == 0
    shim = tmp_path / "torchrun"
    shim.write_text(
        f'#!{sys.executable}\nimport json, os, sys\nopen(os.environ["NOTED"], "w").write(json.dumps(sys.argv[1:]))\n'
    )
    shim.chmod(0o755)
    given = {"NUM_NODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29400"}
    environment = {
        **os.environ, **given, "CODE_SOURCE_PATH": str(ROOT), "NOTED": str(tmp_path / "noted.json"),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    subprocess.run(["bash", "-c", workload["command"]], env=environment, check=True, cwd=tmp_path)
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(json.loads((tmp_path / "noted.json").read_text()))
    assert (options.nnodes, options.node_rank, options.nproc_per_node) == ("4", 3, "8")
    assert (options.rdzv_backend, options.master_addr, options.master_port) == ("static", "10.0.0.7", 29400)
    assert options.max_restarts == 0
    assert (options.module, options.training_script) == (True, "kernelguard_train")
    path, *overrides = options.training_script_args
    config = configfile.load(ROOT / path, overrides)
    gpus = workload["compute"]["num_accelerators"]
    assert gpus == int(options.nnodes) * int(options.nproc_per_node) == config.batch.per_step
    del environment["NODE_RANK"]
    refused = subprocess.run(["bash", "-c", workload["command"]], env=environment, check=False, cwd=tmp_path)
    assert refused.returncode != 0, "without the platform's variables it does not start a run of its own making"
