"""Real ranks, real faults: the code they all end with, which rank and what cause is named, and that nobody waits."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import group
import pytest
from faults import FAULTS, Packages

from crafted import without
from kernelguard.guard import ticket as tickets
from kernelguard.guard.attestation import NAME
from observed import Interpreter

pytestmark = pytest.mark.observed
# Beyond its deadline a rank may take this long to start Python and to end.
SLACK_S = 60.0


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    return group.light(tmp_path_factory.mktemp("interpreter") / "env", Packages().working())


@pytest.fixture(scope="module")
def base(env: Interpreter, tmp_path_factory: pytest.TempPathFactory) -> tickets.Ticket:
    return group.make_ticket(env, tmp_path_factory.mktemp("base"))


def test_equal_ranks_start_and_the_script_finds_a_process_in_which_nothing_was_imported(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    ticket = replace(base, run_dir=str(tmp_path / "run"), probes=(group.CONVOLUTION,))
    ended = group.run_group(env, ticket, tmp_path)
    assert ended.codes == {0: 0, 1: 0}, ended.err
    assert [rank.out for rank in ended.ranks.values()] == [
        "trained 0 False ['--steps', '1']\n",
        "trained 1 False ['--steps', '1']\n",
    ]
    assert ended.outcome["code"] == 0
    assert [row["state"] for row in ended.outcome["ranks"]] == ["ok", "ok"]
    assert ended.err.count("kernelguard: go") == 1
    taken = json.loads((tmp_path / "run" / NAME).read_text())["preflight_seconds"]
    assert set(taken) == {"total", "meet", "fingerprint", "probes"}, "it has no seconds for collectives"
    assert f"after {taken['total']:.1f} s (of the slowest rank: " in ended.err
    told = json.loads((tmp_path / "run/ranks/1.json").read_text())
    assert told["passed"] == ["Triton cache", "probe of causal_conv1d_fn"]
    assert told["fields"]["causal_conv1d_fn in modeling_tiny"] == "package causal_conv1d.causal_conv1d_fn"


GROUPS = {
    "installed": ("broken-conv1d", "another-fla", "another-transformers", "a-checkout-before-it"),
    "at-import": ("a-package-that-raises-where-it-should-hide", "crash-at-import", "another-switch"),
    "node": ("dies-in-the-probe", "wrong-numbers"),
    "cannot-tell": ("hangs-in-the-probe", "garbage-in-the-result"),
}
"""Faults that end in one code, each in a rank of its own: rank 0 has none."""


@pytest.mark.thorough
@pytest.mark.parametrize("name", GROUPS)
def test_each_fault_is_named_at_its_rank(name: str, env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    faults = dict(enumerate((FAULTS[fault] for fault in GROUPS[name]), start=1))
    variables = {rank: dict(fault.variables or {}) for rank, fault in faults.items()}
    for rank, fault in faults.items():
        if fault.packages is not None:
            variables[rank]["PYTHONPATH"] = str(group.write(tmp_path / f"front{rank}", fault.packages()))
    limits = min((fault.limits for fault in faults.values()), key=lambda chosen: chosen.total_s)
    probes = (group.CONVOLUTION,) if any(fault.probe for fault in faults.values()) else ()
    ticket = replace(base, run_dir=str(tmp_path / "run"), probes=probes, deadlines=limits)
    ended = group.run_group(env, ticket, tmp_path, world=len(faults) + 1, variables=variables)
    code = faults[1].code
    assert ended.codes == dict.fromkeys(range(len(faults) + 1), code), ended.err
    outcome = ended.outcome
    for rank, fault in faults.items():
        mine = " ".join(cause for cause in outcome["causes"] if cause.startswith(f"rank {rank}"))
        assert [word for word in fault.said if word not in mine] == [], json.dumps(outcome, indent=1)
    assert [row["state"] for row in outcome["ranks"]] == ["ok", *(fault.state for fault in faults.values())]
    assert outcome["nodes_at_fault"] == ([socket.gethostname()] if code == 75 else [])
    assert ended.seconds < limits.total_s + SLACK_S
    assert not any(rank.out for rank in ended.ranks.values()), "a script ran"


@pytest.mark.thorough
def test_a_rank_without_the_package(env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    bare = group.light(tmp_path / "bare", without(Packages().working(), "fla", "flash"))
    ticket = replace(base, run_dir=str(tmp_path / "run"))
    ended = group.run_group({0: env, 1: bare}, ticket, tmp_path)
    assert ended.codes == {0: 78, 1: 78}, ended.err
    told = " ".join(ended.outcome["causes"])
    assert "rank 1: version of fla-core is absent, 0.6.0 was verified" in told
    assert "fla is not installed here" in told
    table = {row["field"]: row["values"] for row in ended.outcome["differing"]}
    assert table["version of fla-core"] == {"0.6.0": [0], "absent": [1]}
    # Only what differs is shown.
    assert "version of causal-conv1d" not in table


@pytest.mark.thorough
@pytest.mark.parametrize("absent", [1, 0])
def test_a_rank_that_never_starts(absent: int, env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    limits = replace(group.QUICK, rendezvous_s=25.0, fingerprint_s=30.0, probe_s=5.0)
    ticket = replace(base, run_dir=str(tmp_path / "run"), deadlines=limits)
    ended = group.run_group(env, ticket, tmp_path, world=2, starting=[1 - absent])
    assert set(ended.codes.values()) == {75}, ended.err
    told = " ".join([ended.outcome["summary"], *ended.outcome["causes"]])
    assert (f"rank {absent}" if absent else "127.0.0.1") in told
    assert ended.seconds < limits.total_s + SLACK_S
    if absent:
        assert [row["state"] for row in ended.outcome["ranks"]] == ["ok", "missing"]
        assert ended.outcome["nodes_at_fault"] == ["node 1"]


@pytest.mark.thorough
@pytest.mark.parametrize("victim", ["rank", "preflight"])
def test_a_rank_that_dies_in_between(victim: str, env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    limits = replace(group.QUICK, rendezvous_s=25.0, fingerprint_s=30.0, probe_s=30.0)
    ticket = replace(base, run_dir=str(tmp_path / "run"), deadlines=limits, probes=(group.CONVOLUTION,))

    def kill(processes: dict[int, subprocess.Popen[str]]) -> None:
        station = group.wait_for_child(processes[1].pid, "station.py", "/workers/probe.py")
        os.kill(processes[1].pid if victim == "rank" else station, signal.SIGKILL)

    # It arrives, and dies while its probe hangs.
    ended = group.run_group(env, ticket, tmp_path, variables={1: {"FAULT": "hang"}}, during=kill)
    assert ended.codes[0] == 75, ended.err
    assert ended.codes[1] == (-signal.SIGKILL if victim == "rank" else 75)
    assert "rank 1" in ended.outcome["summary"]
    # On a busy machine it is killed before it has come.
    states = [row["state"] for row in ended.outcome["ranks"]]
    assert states in (["ok", "silent"], ["ok", "missing"], ["fault"])
    assert set(ended.outcome["nodes_at_fault"]) <= {socket.gethostname(), "node 1"}
    assert ended.outcome["nodes_at_fault"]
    assert ended.seconds < limits.total_s + SLACK_S
    # Nothing of it goes on: a probe would still hold the GPU.
    assert group.processes_in(tmp_path) == []


@pytest.mark.thorough
def test_the_rendezvous_port_is_taken(env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    limits = replace(group.QUICK, rendezvous_s=20.0)
    ticket = replace(base, run_dir=str(tmp_path / "run"), deadlines=limits)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        # It accepts, and never says a word.
        taken.listen()
        port = taken.getsockname()[1]
        ended = group.run_group(env, ticket, tmp_path, port=port)
    assert ended.codes == {0: 75, 1: 75}, ended.err
    assert f"port {port} on {socket.gethostname()} is taken by another program" in ended.ranks[0].err
    assert "does not answer as a store does" in ended.ranks[1].err
    assert ended.seconds < limits.total_s + SLACK_S


@pytest.mark.thorough
def test_a_disk_that_cannot_be_written_changes_no_verdict(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    # Not even root can make a folder there.
    ticket = replace(base, run_dir="/proc/kernelguard/run")
    front = group.write(tmp_path / "front", Packages.another_fla())
    bad = group.run_group(env, ticket, tmp_path / "bad", variables={1: {"PYTHONPATH": str(front)}})
    assert bad.codes == {0: 78, 1: 78}, bad.err
    for rank in bad.ranks.values():
        lines = [line for line in rank.err.splitlines() if line.startswith(tickets.OUTCOME_LINE)]
        assert [json.loads(line[len(tickets.OUTCOME_LINE) :])["code"] for line in lines] == [78]
        assert "/proc/kernelguard/run/outcome.json cannot be written" in rank.err


@pytest.mark.thorough
def test_a_signal_ends_the_rank_and_all_its_children(env: Interpreter, base: tickets.Ticket, tmp_path: Path) -> None:
    ticket = replace(base, run_dir=str(tmp_path / "run"), probes=(group.CONVOLUTION,))

    def stop(processes: dict[int, subprocess.Popen[str]]) -> None:
        group.wait_for_child(processes[0].pid, "station.py", "/workers/probe.py")
        processes[0].send_signal(signal.SIGTERM)

    ended = group.run_group(env, ticket, tmp_path, world=1, variables={0: {"FAULT": "hang"}}, during=stop)
    assert ended.codes == {0: -signal.SIGTERM}
    assert group.processes_in(tmp_path) == []


@pytest.mark.thorough
def test_torchrun_starts_the_ranks_and_its_own_store_is_used(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    """Two ranks that train together afterwards, through the same address."""
    (tmp_path / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        # Both write to one pipe, and print writes each of its arguments by itself where nothing is buffered.
        "print(f'sum {int(x)}')\n"
        "dist.destroy_process_group()\n"
    )
    ticket = replace(base, run_dir=str(tmp_path / "run"))
    (tmp_path / "ticket.json").write_text(tickets.dumps(ticket))
    argv = [str(env.python), "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    argv += [str(group.free_port()), "-m", "kernelguard.guard", "--", "train.py"]
    variables = {**os.environ, tickets.VARIABLE: str(tmp_path / "ticket.json"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 2") == 2
    assert json.loads((tmp_path / "run/outcome.json").read_text())["code"] == 0


@pytest.mark.thorough
def test_without_torchrun_the_training_meets_at_the_same_address(
    env: Interpreter, base: tickets.Ticket, tmp_path: Path
) -> None:
    """Rank 0 serves the guard's store and then the training's, at one port: nobody may join the wrong one."""
    script = (
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.ones(1)\n"
        "dist.all_reduce(x)\n"
        "print('sum', int(x))\n"
        "dist.destroy_process_group()\n"
    )
    ticket = replace(base, run_dir=str(tmp_path / "run"))
    ended = group.run_group(env, ticket, tmp_path, script=script)
    assert ended.codes == {0: 0, 1: 0}, ended.err
    assert [rank.out for rank in ended.ranks.values()] == ["sum 2\n"] * 2
