"""Collectives of real ranks before they start: right ones are measured, wrong ones, deaths and hangs end all with 3."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import group
import jsonschema
import pytest
from faults import Packages

from kernelguard import data
from kernelguard.guard import ticket as tickets
from kernelguard.guard.attestation import NAME
from observed import Interpreter

pytestmark = pytest.mark.observed
SLACK_S = 60.0
HOST = socket.gethostname()

# Runs when a worker's Python starts, in the rank whose PYTHONPATH leads here; nothing of the product knows it.
SABOTAGE = """
import os, signal, time
if b"/workers/collective.py" in open("/proc/self/cmdline", "rb").read():
    fault = os.environ.get("COLLECTIVE_FAULT", "")
    import torch.distributed as dist
    right_reduce, right_gather = dist.all_reduce, dist.all_gather_into_tensor

    def all_reduce(values, *args, **kwargs):
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(600)
        if fault == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "raises":
            raise RuntimeError("NCCL error in: x.cpp:1\\nncclSystemError: x\\nLast error:\\nno route to 10.0.0.9")
        if fault == "hangs-in-the-large-one" and values.numel() > 100_000:
            time.sleep(600)
        if fault == "wrong-in-the-large-one" and values.numel() > 100_000:
            values[77] += 1
        return right_reduce(values, *args, **kwargs)

    def all_gather_into_tensor(found, mine, *args, **kwargs):
        if fault == "wrong":
            mine[5] += 1
        return right_gather(found, mine, *args, **kwargs)

    dist.all_reduce, dist.all_gather_into_tensor = all_reduce, all_gather_into_tensor
"""


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return group.light(tmp_path_factory.mktemp("interpreter") / "env", Packages().working())


@pytest.fixture(scope="module")
def base(env: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> tickets.Ticket:
    limits = replace(group.QUICK, collective_s=60.0)
    return group.make_ticket(env, tmp_path_factory.mktemp("base"), deadlines=limits)


def sabotaged(
    env: Interpreter, base: tickets.Ticket, folder: Path, fault: str, *, rank: int = 1, limit_s: float = 25.0
) -> group.Group:
    """Two ranks, one of them with this fault in its collectives."""
    front = group.write(folder / "front", {"sitecustomize.py": SABOTAGE})
    variables = {rank: {"PYTHONPATH": str(front), "COLLECTIVE_FAULT": fault}}
    limits = replace(group.QUICK, collective_s=limit_s)
    ticket = replace(base, run_dir=str(folder / "run"), deadlines=limits)
    ended = group.run_group(env, ticket, folder, variables=variables)
    assert ended.codes == {0: 3, 1: 3}, ended.err
    assert not any(rank.out for rank in ended.ranks.values()), "a script ran"
    assert ended.seconds < limits.total_s + SLACK_S
    assert group.processes_in(folder) == []
    assert ended.outcome["nodes_at_fault"] == []
    assert ended.outcome["collectives"] == {}
    return ended


def test_ranks_that_reach_each_other_start_and_the_bandwidth_is_kept(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    ended = group.run_group(env, replace(base, run_dir=str(tmp_path / "run")), tmp_path)
    assert ended.codes == {0: 0, 1: 0}, ended.err
    found = ended.outcome["collectives"]
    assert (found["world_size"], found["backend"], found["bytes"]) == (2, "gloo", 4 * 2**20)
    rates = found["bus_gb_per_s"]
    assert 0 < rates["slowest"] <= rates["fastest"]
    assert rates["slowest"] == pytest.approx(found["bytes"] / found["seconds"] / 1e9, rel=0.01)
    assert ended.outcome["timings"]["collectives"] > 0
    assert f"; all-reduce at {rates['slowest']:.3g} GB/s)" in ended.err
    attested = json.loads((tmp_path / "run" / NAME).read_text())
    jsonschema.validate(attested, json.loads(data.schema("attestation").read_text()))
    assert attested["collectives"] == found
    assert attested["preflight_seconds"]["collectives"] == ended.outcome["timings"]["collectives"]
    # What a CPU does says nothing about a link.
    assert ended.outcome["noted"] == []


def test_one_rank_alone_has_no_collectives(env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    ended = group.run_group(env, replace(base, run_dir=str(tmp_path / "run")), tmp_path, world=1)
    assert ended.codes == {0: 0}, ended.err
    assert ended.outcome["collectives"] == {}
    assert "collectives" not in ended.outcome["timings"]


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_dies_inside_a_collective(
    rank: int, env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    ended = sabotaged(env, base, tmp_path, "dies", rank=rank)
    first = ended.outcome["causes"][0]
    assert first == f"rank {rank} on {HOST} was killed by SIGKILL at stage 'all-reduce'"
    assert f"rank {rank}" in ended.outcome["summary"]


HANGS = {
    "stops": f"rank 1 on {HOST} did not end within",
    # It says so itself, or, on a machine with other work, is ended before it can.
    "hangs-in-the-large-one": f"rank 1 on {HOST} did not ",
}


@pytest.mark.thorough
@pytest.mark.parametrize("fault", HANGS)
def test_a_rank_that_hangs_ends_all_of_them_in_time(
    fault: str, env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    ended = sabotaged(env, base, tmp_path, fault)
    assert ended.outcome["causes"][0].startswith(HANGS[fault]), json.dumps(ended.outcome, indent=1)
    assert fault == "stops" or "'large all-reduce" in ended.outcome["causes"][0]
    assert ended.outcome["ranks"][1]["state"] == "unknown"


@pytest.mark.thorough
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_killed_beside_its_collectives(
    rank: int, env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    """Its preflight and its worker go with it; rank 0 takes the store along."""
    front = group.write(tmp_path / "front", {"sitecustomize.py": SABOTAGE})
    variables = {rank: {"PYTHONPATH": str(front), "COLLECTIVE_FAULT": "hangs"}}
    limits = replace(group.QUICK, collective_s=25.0)

    def kill(processes: dict[int, subprocess.Popen[str]]) -> None:
        # Both have read the first outcome: before that, a store that goes is a node's fault.
        for process in processes.values():
            group.wait_for_child(process.pid, "station.py", "/workers/collective.py")
        processes[rank].kill()

    ticket = replace(base, run_dir=str(tmp_path / "run"), deadlines=limits)
    ended = group.run_group(env, ticket, tmp_path, variables=variables, during=kill)
    assert ended.codes == {rank: -signal.SIGKILL, 1 - rank: 3}, ended.err
    told = " ".join([ended.outcome["summary"], *ended.outcome["causes"]])
    assert (
        ("rank 1 on" in told and "did not report in time" in told) if rank else "rank 0, which serves it, has" in told
    )
    assert ended.seconds < limits.total_s + SLACK_S
    assert group.processes_in(tmp_path) == []


@pytest.mark.thorough
def test_what_nccl_said_last_is_told(env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    ended = sabotaged(env, base, tmp_path, "raises")
    assert ended.outcome["causes"][0] == f"rank 1 on {HOST} failed at all-reduce: RuntimeError: no route to 10.0.0.9"


@pytest.mark.thorough
@pytest.mark.parametrize("fault", ["wrong", "wrong-in-the-large-one"])
def test_wrong_numbers_start_nothing(fault: str, env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    ended = sabotaged(env, base, tmp_path, fault, limit_s=60.0)
    causes = ended.outcome["causes"]
    assert causes[0].startswith(f"rank 0 on {HOST} got wrong numbers: "), causes
    if fault == "wrong":
        assert (
            "all-gather: 1 of 8198 numbers are wrong, one is 4105 and should be 4104, in the part of rank 1"
            in (causes[0])
        )
    else:
        assert "large all-reduce: 1 of 1048576 numbers are wrong, one is 2 and should be 1" in causes[0]
    assert "cannot be told from here" in causes[-1]


@pytest.mark.thorough
def test_a_fault_of_one_rank_alone_is_named_without_a_collective(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    front = group.write(tmp_path / "front", {**Packages.another_fla(), "sitecustomize.py": SABOTAGE})
    variables = {1: {"PYTHONPATH": str(front), "COLLECTIVE_FAULT": "hangs"}}
    ended = group.run_group(env, replace(base, run_dir=str(tmp_path / "run")), tmp_path, variables=variables)
    assert ended.codes == {0: 78, 1: 78}, ended.err
    assert "collectives" not in ended.outcome["timings"]
