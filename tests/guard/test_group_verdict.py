"""One outcome out of what all ranks reported: which code wins, who is at fault, and what the table shows."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kernelguard.guard import ticket as tickets
from kernelguard.guard.checks import judge_isolation, judge_probe
from kernelguard.guard.children import ChildResult, run_worker, scratch
from kernelguard.guard.fingerprint import Report, file_system, record_digest, triton_cache
from kernelguard.guard.outcome import Outcome, describe, from_document, publish, ranks_text, to_document, write_json
from kernelguard.guard.preflight import preflight
from kernelguard.guard.ranks import PlaceError, read_place, visible_device
from kernelguard.guard.verdict import Arrival, judge
from kernelguard.lock import record

CONV = "causal_conv1d_fn in modeling_tiny"
KERNEL = "package causal_conv1d.causal_conv1d_fn"


def report(rank: int, **changes: Any) -> Report:
    """A rank as it should be, on a node for every two ranks."""
    found = Report(rank=rank, host=f"node-{rank // 2}", node=rank // 2)
    found.fields = {"python": "3.12.3", "version of fla-core": "0.6.0", CONV: KERNEL, **changes.pop("fields", {})}
    hardware = {"GPU": "H200", "capability": "9.0", "driver": "580.65.06"}
    found.hardware = {**hardware, **changes.pop("hardware", {})}
    found.passed = ["CUDA", "probe of conv"]
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def verdict(reports: list[Report], ticket: tickets.Ticket | None = None, *, world: int = 0, came: Any = ()) -> Outcome:
    arrivals = {r.rank: Arrival(host=r.host, node=r.node) for r in reports}
    arrivals.update({rank: Arrival(host=f"node-{rank // 2}", node=rank // 2) for rank in came})
    by_rank = {r.rank: r for r in reports}
    return judge(world or len(reports), arrivals, by_rank, ticket, waited_s=90.0, seconds=1.0, local_world=2)


def ticket(**expected: Any) -> tickets.Ticket:
    return tickets.Ticket(
        lock=tickets.Document("l", "d"),
        verdict=tickets.Document("v", "d"),
        admission=tickets.AdmissionNote(admitted=True),
        run_dir="",
        level="gpu",
        model=tickets.Model(config="", dtype="bfloat16"),
        expected=tickets.Expected(**expected),
        fast_paths=(
            tickets.ExpectedPath(
                symbol="causal_conv1d_fn",
                bound_to="causal_conv1d.causal_conv1d_fn",
                mechanism="package",
                module="transformers.models.tiny.modeling_tiny",
            ),
        ),
    )


def test_equal_ranks_may_start() -> None:
    found = verdict([report(rank) for rank in range(4)])
    assert (found.code, found.differing, found.causes, found.noted) == (0, (), (), ())
    assert verdict([report(rank) for rank in range(4)], ticket(python="3.12.3")).code == 0


OTHER_FLA = {"version of fla-core": "0.5.1"}
SLOW = {CONV: "torch transformers.models.tiny.modeling_tiny.causal_conv1d_fn"}
WRONG = {"probe of conv": "gradient of x is wrong"}


@pytest.mark.parametrize(
    ("changes", "code", "nodes", "word"),
    [
        ({3: {"fields": OTHER_FLA}}, 78, (), "rank 3: version of fla-core is 0.5.1, 0.6.0 elsewhere"),
        ({1: {"fields": SLOW, "causes": {CONV: "ImportError: libcudart"}}}, 78, (), "ImportError: libcudart"),
        ({2: {"hardware": {"GPU": "A100", "capability": "8.0"}}}, 75, ("node-1",), "rank 2: GPU is A100"),
        ({1: {"faults": WRONG, "passed": ["CUDA"]}}, 75, ("node-0",), "rank 1 on node-0: probe of conv"),
        # With other software it is no node's fault.
        ({1: {"faults": WRONG, "passed": [], "fields": OTHER_FLA}}, 78, (), "probe of conv"),
        ({r: {"faults": WRONG, "passed": []} for r in range(4)}, 78, (), "gradient of x is wrong"),
        ({1: {"unknown": ["probe of conv: it hangs"]}}, 3, (), "rank 1: could not tell: probe of conv"),
        # A definite no says more than "could not tell", and what stays says more than what goes with a node.
        ({1: {"unknown": ["?"]}, 2: {"faults": WRONG, "passed": []}}, 75, ("node-1",), ""),
        ({1: {"faults": WRONG, "passed": []}, 3: {"fields": OTHER_FLA}}, 78, (), ""),
    ],
    ids=[
        "version", "binding", "gpu", "wrong", "wrong-and-other", "wrong-everywhere", "unknown", "node-beats-unknown",
        "configuration-beats-node",
    ],
)  # fmt: skip
def test_which_code(changes: dict[int, dict[str, Any]], code: int, nodes: tuple[str, ...], word: str) -> None:
    found = verdict([report(rank, **changes.get(rank, {})) for rank in range(4)])
    assert (found.code, found.nodes_at_fault) == (code, nodes), describe(found)
    assert any(word in cause for cause in found.causes), found.causes


def test_ranks_that_are_not_there_are_named() -> None:
    found = verdict([report(0), report(1), report(2)], world=6, came=[3])
    assert found.code == 75
    assert [state.state for state in found.ranks] == ["ok", "ok", "ok", "silent", "missing", "missing"]
    assert found.nodes_at_fault == ("node-1", "node 2")
    assert "rank 3 on node-1 came, and did not report in time: it died or hangs" in found.causes
    assert "rank 4 (node 2) did not come within 90 s" in found.causes


@pytest.mark.parametrize(
    ("expected", "fields", "hardware", "code"),
    [
        ({"python": "3.11.1"}, {}, {}, 78),
        ({"transformers": "5.24.0"}, {"version of transformers": "5.17.0"}, {}, 78),
        ({"capability": (9, 0)}, {}, {}, 0),
        # The same in all ranks: another node of this kind changes nothing.
        ({"capability": (10, 0)}, {}, {}, 78),
        ({"driver": "580.10", "driver_floor": "570.1"}, {}, {}, 0),
        # Of an older branch than the verdict's, and above the floor.
        ({"driver": "590.1", "driver_floor": "570.1"}, {}, {}, 78),
        ({"driver_floor": "590.10"}, {}, {}, 78),
        ({"distributions": {"fla-core": tickets.ExpectedDistribution(version="0.6.0")}}, {}, {}, 0),
        ({"distributions": {"fla-core": tickets.ExpectedDistribution(version="0.6.1")}}, {}, {}, 78),
        ({}, {CONV: "package fla.modules.causal_conv1d"}, {}, 78),
    ],
)
def test_all_ranks_are_held_against_what_was_verified(
    expected: dict[str, Any], fields: dict[str, str], hardware: dict[str, str], code: int
) -> None:
    reports = [report(rank, fields=fields, hardware=hardware) for rank in range(2)]
    assert verdict(reports, ticket(**expected)).code == code


def test_an_old_driver_on_one_node_is_that_nodes_fault() -> None:
    reports = [report(0), report(1), report(2, hardware={"driver": "535.1"}), report(3, hardware={"driver": "535.1"})]
    found = verdict(reports, ticket(driver_floor="580"))
    assert (found.code, found.nodes_at_fault) == (75, ("node-1",))
    assert "ranks 2-3: driver is 535.1, at least 580 is needed" in found.causes
    # Above the floor it is said, and refuses nothing.
    found = verdict([report(0), report(1), report(2, hardware={"driver": "590.1"}), report(3)], ticket())
    assert found.code == 0
    assert any(note.startswith("driver differs: 580.65.06 on ranks 0-1, 3") for note in found.noted)


def test_the_outcome_goes_through_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = verdict([report(0), report(1, fields=OTHER_FLA)], ticket())
    publish(found, str(tmp_path / "run"), speak=False)
    assert from_document(json.loads((tmp_path / "run" / "outcome.json").read_text())) == found
    assert capsys.readouterr().err == ""
    publish(found, "/proc/nowhere", speak=False)
    line = next(x for x in capsys.readouterr().err.splitlines() if x.startswith(tickets.OUTCOME_LINE))
    assert from_document(json.loads(line[len(tickets.OUTCOME_LINE) :])) == found
    for garbage in ({}, {"schema": 1}, {**to_document(found), "code": 5}, {**to_document(found), "ranks": 7}):
        with pytest.raises(ValueError, match="no outcome"):
            from_document(garbage)


def test_no_secret_is_written(tmp_path: Path) -> None:
    token = "hf_" + "a" * 30
    assert write_json(tmp_path / "x.json", {"cause": f"401 for https://user:{token}@hub"}) == ""
    assert token not in (tmp_path / "x.json").read_text()


def test_ranks_in_words() -> None:
    assert [ranks_text(r) for r in ((3,), (0, 1, 2), (0, 2, 3, 7))] == ["rank 3", "ranks 0-2", "ranks 0, 2-3, 7"]


TORCHRUN = {
    "RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1",
    "MASTER_ADDR": "a", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip


def test_the_place_of_a_rank() -> None:
    place = read_place(TORCHRUN)
    assert (place.rank, place.world, place.node, place.local_rank, place.hosts_store) == (9, 16, 1, 1, False)
    assert read_place({}).world == 1
    assert read_place({**TORCHRUN, "RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": ""}).hosts_store
    # A restart must not read what its last attempt left.
    assert read_place({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).attempt != place.attempt


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"RANK": "x"}, "RANK='x' is no number"),
        ({"RANK": "16"}, "is no rank of a group"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": "70000"}, "is no port"),
    ],
)
def test_a_place_that_makes_no_sense(change: dict[str, str], word: str) -> None:
    with pytest.raises(PlaceError, match=word):
        read_place({**TORCHRUN, **change})


def test_an_unusable_start_is_an_outcome(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert preflight({"RANK": "0", "WORLD_SIZE": "2"}).code == 78
    assert preflight({"RANK": "first", "WORLD_SIZE": "2"}).code == 78
    (tmp_path / "ticket.json").write_text("{}")
    assert preflight({tickets.VARIABLE: str(tmp_path / "ticket.json")}).code == 78
    assert preflight({tickets.VARIABLE: str(tmp_path / "gone.json")}).code == 78
    said = capfd.readouterr().err
    assert "MASTER_ADDR is not set" in said
    assert "is no ticket" in said
    assert "cannot be read" in said


def test_the_device_of_a_rank() -> None:
    assert visible_device({}, 3) == "3"
    assert visible_device({"CUDA_VISIBLE_DEVICES": "4,5,6"}, 1) == "5"
    # Slurm may give each task its own GPU, as the only one.
    assert visible_device({"CUDA_VISIBLE_DEVICES": "GPU-abc"}, 3) == "GPU-abc"


def case(state: str = "right", name: str = "packed") -> dict[str, Any]:
    tensor = {"state": state, "role": "gradient", "name": "x", "error": 0.5, "allowed": 0.01}
    return {"kind": "case", "case": name, "tensors": [tensor]}


ASKED = {"symbol": "conv", "cases": [{"name": "packed"}]}
ERROR = {"kind": "error", "where": "forward", "type": "RuntimeError", "text": "CUDA error", "sort": "raised"}


@pytest.mark.parametrize(
    ("result", "state", "word"),
    [
        (ChildResult(records=(case(),), finished=True, returncode=0), "right", ""),
        (ChildResult(records=(case("wrong"),), finished=True, returncode=0), "fault", "gradient of x is wrong"),
        (ChildResult(records=(), finished=True, returncode=0), "unknown", "did not measure packed"),
        (ChildResult(returncode=None, died_at="packed: forward", limit_s=9), "unknown", "did not end within 9 s"),
        (ChildResult(returncode=-11, died_at="packed: forward"), "fault", "SIGSEGV at stage 'packed: forward'"),
        (ChildResult(records=(case(),), unreadable="line 4: garbage", returncode=0), "unknown", "no result that can"),
        (ChildResult(records=(ERROR,), finished=True, returncode=0), "fault", "forward: RuntimeError: CUDA error"),
        (ChildResult(records=({**ERROR, "sort": "memory"},), finished=True, returncode=0), "unknown", "CUDA error"),
        (ChildResult(records=({**ERROR, "where": "reference"},), finished=True, returncode=0), "unknown", "reference"),
        (
            ChildResult(records=({"kind": "case", "case": "packed"},), finished=True, returncode=0),
            "unknown",
            "no sense",
        ),
        (ChildResult(returncode=1, output="Traceback\nKeyError: 7\n"), "unknown", "KeyError: 7"),
    ],
)
def test_what_a_probe_says(result: ChildResult, state: str, word: str) -> None:
    found, text = judge_probe(ASKED, result)
    assert (found, word in text) == (state, True), text


def test_what_the_isolation_check_says() -> None:
    asked = {"checks": [{"signals": ["seq_idx"]}]}
    logits = {"leak_logit": 0.0, "allowed_logit": 0.0}
    clean = {"kind": "signals", "number": 0, "leak_gradient": 0.0, **logits, "layers": []}
    leak = {**clean, "leak_gradient": 0.1, "layers": [{"layer": "layers.0", "leak": 0.1}]}
    assert judge_isolation(asked, ChildResult(records=(clean,), finished=True, returncode=0)) == ("right", "")
    state, text = judge_isolation(asked, ChildResult(records=(leak,), finished=True, returncode=0))
    assert (state, "layers.0" in text) == ("fault", True)
    assert judge_isolation(asked, ChildResult(finished=True, returncode=0))[0] == "unknown"
    rounded = {**clean, "leak_logit": 0.03, "allowed_logit": 0.06}
    assert judge_isolation(asked, ChildResult(records=(rounded,), finished=True, returncode=0)) == ("right", "")
    silent = {**clean, "leak_logit": 0.3, "allowed_logit": 0.06}
    assert judge_isolation(asked, ChildResult(records=(silent,), finished=True, returncode=0))[0] == "fault"


def test_the_digest_of_a_record_is_the_locks() -> None:
    rows = [("fla/__init__.py", "ab"), ("fla-0.6.dist-info/RECORD", ""), ("fla/x.pyc", "cd"), ("a.so", "ef")]
    assert record_digest([list(row) for row in rows]) == record.record_digest(rows)


def test_a_worker_that_is_not_there_is_a_result() -> None:
    result = run_worker("nothing_of_this_name", {}, timeout=30.0)
    assert not result.finished
    assert "exit code 1" in result.ending()


def test_scratch_is_gone_afterwards() -> None:
    with scratch() as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "file").write_text("x")
    assert not folder.exists()


def test_children_die_with_the_rank() -> None:
    """A rank that is killed leaves no probe behind that holds the GPU."""
    code = (
        "import subprocess, sys, time\n"
        "from kernelguard.guard.children import leashed\n"
        "child = subprocess.Popen([*leashed(sys.argv[1])], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    sleeper = Path(__file__).with_name("sleeper.py")
    rank = subprocess.Popen([sys.executable, "-c", code, str(sleeper)], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    pid = int(rank.stdout.readline())
    end = time.monotonic() + 20.0
    while b"sleeper" not in Path(f"/proc/{pid}/cmdline").read_bytes() and time.monotonic() < end:
        time.sleep(0.02)
    # It holds the leash once it is the script.
    while not _sleeps(pid) and time.monotonic() < end:
        time.sleep(0.02)
    rank.kill()
    rank.communicate()
    while _alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not _alive(pid)


def _sleeps(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() == "sleeper"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
nas:/home /home nfs4 rw 0 0
tmpfs /home/me/scratch\\040disk tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({"HOME": "/home/me"}, "nfs4"),
        # Only the folder that is really used counts.
        ({"HOME": "/home/me", "TRITON_CACHE_DIR": "/tmp/triton"}, "ext4"),
        ({"HOME": "/home/me", "TRITON_HOME": "/home/me/scratch disk"}, "tmpfs"),
        ({"HOME": "/homestead"}, "ext4"),
    ],
)
def test_where_compiled_kernels_really_lie(environ: dict[str, str], kind: str) -> None:
    assert file_system(triton_cache(environ), MOUNTS) == kind


def test_a_compile_cache_that_all_nodes_share_is_nobodys_node() -> None:
    """Public failure G03: also where another node happens to have a local one."""
    shared = {"Triton cache": "/home/me/.triton/cache lies on nfs4, which all nodes write"}
    found = verdict([report(0, faults=shared), report(1, faults=shared), report(2, passed=["Triton cache"]), report(3)])
    assert (found.code, found.nodes_at_fault) == (78, ())
