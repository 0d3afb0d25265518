"""What the ranks' collectives say about the group: whose answer counts first, who is named, and what is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kernelguard.guard.children import ChildResult
from kernelguard.guard.collective_verdict import Finding, judge_collectives, last_said, read_finding
from kernelguard.guard.collectives import _own_address
from kernelguard.guard.outcome import Outcome, RankState, describe, from_document, to_document
from kernelguard.guard.ranks import Place

NCCL = """NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled system error, NCCL 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
socketStartConnect: Connect to 10.0.0.9<41234> failed : Connection refused
Exception raised from create at NCCLUtils.cpp:94 (most recent call first):
frame #0: c10::Error::Error"""
CHECKS = ("all-reduce", "all-gather", "reduce-scatter", "large all-reduce")


def go(world: int) -> Outcome:
    ranks = tuple(RankState(rank=rank, host=f"node-{rank // 2}", state="ok") for rank in range(world))
    return Outcome(code=0, summary="all are as verified", ranks=ranks, seconds=9.0, timings={"meet": 4.0})


def right(rank: int, *, seconds: float = 0.001, backend: str = "nccl") -> Finding:
    return Finding(rank=rank, state="right", backend=backend, bytes=256 * 2**20, seconds=seconds, took_s=5.0 + rank)


def judged(*findings: Finding, world: int = 0) -> Outcome:
    return judge_collectives(go(world or len(findings)), {f.rank: f for f in findings}, seconds=15.0)


def ran(*records: dict[str, Any], **changes: Any) -> ChildResult:
    """A worker that found everything right and left, but for what is changed."""
    found = [{"kind": "group", "backend": "gloo"}]
    found += [{"kind": "check", "step": step, "wrong": "", "parts": []} for step in CHECKS]
    found.append({"kind": "bandwidth", "bytes": 1000, "seconds": 0.5})
    return ChildResult(records=tuple(records or found), **{"finished": True, "returncode": 0, **changes})


def test_right_collectives_start_the_group_and_are_measured() -> None:
    outcome = judged(right(0), right(1, seconds=0.002), right(2), right(3))
    assert outcome.code == 0
    assert outcome.seconds == 15.0
    assert outcome.timings == {"meet": 4.0, "collectives": 8.0}
    assert outcome.collectives == {
        "world_size": 4,
        "backend": "nccl",
        "bytes": 268435456,
        "seconds": 0.002,
        "bus_gb_per_s": {"slowest": 201.327, "fastest": 402.653},
    }
    (note,) = outcome.noted
    assert note.startswith(
        "an all-reduce of 256 MiB over 4 ranks has a bus bandwidth of 201.3 GB/s in the slowest rank"
    )
    said = describe(outcome)
    assert "after 15.0 s (of the slowest rank: meet 4.0, collectives 8.0; all-reduce at 201 GB/s)" in said
    assert from_document(json.loads(json.dumps(to_document(outcome)))) == outcome


@pytest.mark.parametrize("seconds", [0.001, 100.0])
def test_a_slow_link_refuses_nothing(seconds: float) -> None:
    outcome = judged(right(0), right(1, seconds=seconds))
    assert outcome.code == 0
    assert [state.state for state in outcome.ranks] == ["ok", "ok"]


def test_on_a_cpu_the_figure_is_no_note() -> None:
    assert judged(right(0, backend="gloo"), right(1, backend="gloo")).noted == ()


WRONG = Finding(rank=1, state="wrong", text="all-reduce: 1 of 9 numbers are wrong")
LATE = Finding(rank=0, state="late", text="20 s", step="join", behind=(1,))
CASES: dict[str, tuple[tuple[Finding, ...], int, str, list[str]]] = {
    "wrong numbers": (
        (right(0), WRONG),
        2,
        "rank 1 on node-0 got wrong numbers: all-reduce: 1 of 9 numbers are wrong",
        ["ok", "unknown"],
    ),
    "wrong numbers before everything else": (
        (Finding(rank=0, state="failed", text="join: x", first=True), WRONG),
        3,
        "rank 1 on node-0 got wrong numbers",
        ["unknown", "unknown", "silent"],
    ),
    "a rank that never reported, before those that failed because of it": (
        (Finding(rank=0, state="failed", text="all-reduce: RuntimeError: closed", first=True),),
        2,
        "rank 1 on node-0 did not report in time: it died or hangs",
        ["unknown", "silent"],
    ),
    "a worker that was killed": (
        (replace(LATE, step="all-reduce begun"), Finding(rank=1, state="ended", text="was killed by SIGKILL")),
        2,
        "rank 1 on node-0 was killed by SIGKILL",
        ["ok", "unknown"],
    ),
    "a rank that does not come": (
        (LATE, Finding(rank=1, state="late", text="20 s", step="import torch"), replace(LATE, rank=2)),
        3,
        "rank 1 on node-0 was still at 'import torch' after 20 s",
        ["ok", "unknown", "ok"],
    ),
    "a rank that came and got no further": (
        (replace(LATE, behind=(3,)), replace(LATE, rank=1, behind=(3,)), replace(LATE, rank=2, behind=(3,)),
         Finding(rank=3, state="late", text="20 s", step="join")),
        4,
        "rank 3 on node-1 did not get as far as 'join' in 20 s, where ranks 0-2 waited for it",
        ["ok", "ok", "ok", "unknown"],
    ),
    "the reason of a rank that failed, and not that others waited for it": (
        (LATE, Finding(rank=1, state="failed", text="join: RuntimeError: no route", first=True)),
        2,
        "rank 1 on node-0 failed at join: RuntimeError: no route",
        ["ok", "unknown"],
    ),
    "nobody is missing and nobody gets through": (
        (replace(LATE, behind=()), replace(LATE, rank=1, behind=())),
        2,
        "all came to 'join', and ranks 0-1 did not get through it in 20 s",
        ["unknown", "unknown"],
    ),
    "the first that failed, before those that failed after it": (
        (Finding(rank=0, state="failed", text="join: RuntimeError: connection closed"),
         Finding(rank=1, state="failed", text="device: RuntimeError: no CUDA GPUs are available", first=True)),
        2,
        "rank 1 on node-0 failed at device: RuntimeError: no CUDA GPUs are available",
        ["unknown", "unknown"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_right_could_not_be_told(name: str) -> None:
    findings, world, first, states = CASES[name]
    outcome = judged(*findings, world=world)
    assert outcome.code == 3
    assert outcome.nodes_at_fault == ()
    assert outcome.causes[0].startswith(first)
    assert first in outcome.summary
    assert [state.state for state in outcome.ranks] == states
    assert outcome.collectives == {}


def test_a_worker_that_finished_is_right() -> None:
    found = read_finding(1, ran(), took_s=4.0004)
    assert found == Finding(rank=1, state="right", backend="gloo", bytes=1000, seconds=0.5, took_s=4.0)
    assert Finding.from_document(json.loads(json.dumps(found.to_document())), rank=1) == found


RESULTS: dict[str, tuple[ChildResult, str, str]] = {
    "no result": (ran({"kind": "group", "backend": "gloo"}), "ended", "did not measure all-reduce, all-gather"),
    "no bandwidth": (ran(*ran().records[:-1]), "ended", "did not measure the bandwidth"),
    "killed": (ran(finished=False, returncode=-9, died_at="join"), "ended", "was killed by SIGKILL at stage 'join'"),
    "hung": (ran(finished=False, returncode=None, limit_s=20, died_at="join"), "ended", "did not end within 20 s"),
    "garbage": (ran(finished=False, unreadable="line 3: not an object"), "ended", "no result that can be read"),
    "wrong": (
        ran({"kind": "check", "step": "all-gather", "wrong": "1 of 8 numbers are wrong", "parts": [0, 1]}),
        "wrong",
        "all-gather: 1 of 8 numbers are wrong, in the part of ranks 0-1",
    ),
    "late": (ran({"kind": "late", "behind": [0], "limit_s": 19.7}, finished=False, died_at="join"), "late", "20 s"),
    "failed": (
        ran({"kind": "error", "where": "join", "type": "RuntimeError", "text": "x\ny", "first": True}),
        "failed",
        "join: RuntimeError: x",
    ),
    "ended by torch": (
        ran(
            finished=False, returncode=-6, died_at="all-reduce begun", output=f"x\n  what():  [Rank 1] watchdog: {NCCL}"
        ),
        "failed",
        "all-reduce begun: socketStartConnect: Connect to 10.0.0.9<41234> failed : Connection refused",
    ),
    "nonsense": (ran({"kind": "check"}), "ended", "makes no sense"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_a_worker_says(name: str) -> None:
    result, state, words = RESULTS[name]
    found = read_finding(0, result)
    assert (found.state, words in found.text) == (state, True), found


@pytest.mark.parametrize(
    "changes", [{"behind": None}, {"behind": ["x"]}, {"seconds": 0.0}, {"took_s": "x"}, {"more": 1}, {"state": "fine"}]
)
def test_a_report_that_makes_no_sense_is_never_a_pass(changes: dict[str, Any]) -> None:
    found = Finding.from_document({**right(0).to_document(), **changes}, rank=0)
    assert found.state == "ended"
    assert "makes no sense" in found.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NCCL, "socketStartConnect: Connect to 10.0.0.9<41234> failed : Connection refused"),
        ("Connection closed by peer [127.0.0.1]:1\nmore", "Connection closed by peer [127.0.0.1]:1"),
        ("", "(no message)"),
    ],
)
def test_the_line_that_says_most(text: str, said: str) -> None:
    assert last_said(text) == said


@pytest.mark.parametrize(
    ("address", "agent", "own"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("localhost", True, "localhost"),
        ("head-node.invalid", True, "head-node.invalid"),
        ("10.9.8.7", False, "10.9.8.7"),
    ],
)
def test_where_the_others_find_rank_0(address: str, agent: bool, own: str) -> None:
    place = Place(rank=0, world=2, local_rank=0, node=0, host="h", address=address, port=29500, agent_store=agent)
    assert _own_address(place) == own
