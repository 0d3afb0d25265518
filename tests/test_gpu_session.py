"""A plan of measurements runs in order, on its own GPUs and cores, within its budget, and its results come back."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "benchmarks" / "gpu_session.py"


def called(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def run(folder: Path, plan: str, *options: str, seconds: float = 30.0) -> tuple[dict[str, Any], Path]:
    """The last state, and the folder that the archive was unpacked into."""
    path, work, out = folder / "plan.toml", folder / "work", folder / "out"
    path.write_text(plan)
    started = called("start", path, "--work", work, *options)
    assert started.returncode == 0, started.stderr
    waited = called("wait", "--work", work, "--out", out, "--seconds", str(seconds))
    assert waited.returncode == 0, waited.stdout + waited.stderr
    with tarfile.open(out / "session.tar.gz") as tar:
        tar.extractall(folder / "back", filter="data")
    state: dict[str, Any] = json.loads((folder / "back" / "state.json").read_text())
    return state, folder / "back" / "out"


def outcomes(state: dict[str, Any]) -> dict[str, str]:
    return {name: row["outcome"] for name, row in state["jobs"].items()}


def test_jobs_wait_for_others_and_for_gpus_of_their_own(tmp_path: Path) -> None:
    plan = """
[environment]
SITE = "$WORK/site"
[[job]]
name = "one"
gpus = 1
command = 'echo "$CUDA_VISIBLE_DEVICES" > $OUT/gpu; date +%s%N > $OUT/from; sleep 0.7; date +%s%N > $OUT/to'
[[job]]
name = "two"
gpus = 1
command = 'echo "$CUDA_VISIBLE_DEVICES" > $OUT/gpu; date +%s%N > $OUT/from; sleep 0.7; date +%s%N > $OUT/to'
[[job]]
name = "both"
gpus = 2
command = 'echo "$CUDA_VISIBLE_DEVICES" > $OUT/gpu; date +%s%N > $OUT/from'
[[job]]
name = "broken"
command = 'echo here; false | cat'
[[job]]
name = "despite"
after = ["broken"]
command = 'echo $SITE > $OUT/site; nproc > $OUT/cores'
[[job]]
name = "because"
needs = ["broken"]
command = 'true'
[[job]]
name = "too much"
gpus = 3
command = 'true'
"""
    state, out = run(tmp_path, plan, "--gpus", "2")
    assert state["over"]
    assert outcomes(state) == {
        "one": "done", "two": "done", "both": "done", "broken": "exit code 1", "despite": "done",
        "because": "left out: broken did not end well", "too much": "left out: it wants 3 GPUs of 2",
    }  # fmt: skip
    gpus = {name: (out / name / "gpu").read_text().strip() for name in ("one", "two", "both")}
    assert {gpus["one"], gpus["two"]} == {"0", "1"}
    assert set(gpus["both"].split(",")) == {"0", "1"}
    moments = {path: int((out / path).read_text()) for path in ("one/to", "two/to", "both/from")}
    assert moments["both/from"] >= max(moments["one/to"], moments["two/to"])
    assert (out / "broken" / "log.txt").read_text() == "here\n"
    assert (out / "despite" / "site").read_text().strip() == str(tmp_path / "work" / "site")
    assert (out / "despite" / "cores").read_text().strip() == "1", "it has the cores that it asked for"


def test_a_limit_ends_a_job_with_all_that_it_started_and_the_budget_leaves_jobs_out(tmp_path: Path) -> None:
    plan = """
[[job]]
name = "long"
limit = 6
command = 'sleep 300 & echo $! > $OUT/child; echo partial > $OUT/result; wait'
[[job]]
name = "late"
after = ["long"]
least = 500
command = 'true'
"""
    state, out = run(tmp_path, plan, "--budget", "60")
    found = outcomes(state)
    assert found["long"] == "ended at its limit"
    assert found["late"].startswith("left out: 5")
    assert (out / "long" / "result").read_text() == "partial\n", "what was written before is kept"
    child = int((out / "long" / "child").read_text())
    until = time.monotonic() + 10
    while alive(child) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(child)


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_waiting_can_be_given_up_and_taken_up_again(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[[job]]\nname = 'a'\ncommand = 'echo x > $OUT/x; sleep 3'\n")
    assert called("start", plan, "--work", tmp_path / "work").returncode == 0
    began = time.monotonic()
    first = called("wait", "--work", tmp_path / "work", "--out", tmp_path / "out", "--seconds", "1")
    assert time.monotonic() - began < 3
    assert first.returncode == 3
    with tarfile.open(tmp_path / "out" / "session.tar.gz") as tar:
        assert "out/a/x" in tar.getnames()
    second = called("wait", "--work", tmp_path / "work", "--out", tmp_path / "out", "--seconds", "30")
    assert second.returncode == 0
    assert "a: done" in second.stdout


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ("[[job]]\nname = 'a'\n", "job a: command is missing"),
        ("[[job]]\nname = 'a'\ncommand = 'x'\nafter = ['b']\n", "job a: waits for b, which is no job above it"),
        ("[[job]]\nname = 'a'\ncommand = 'x'\n[[job]]\nname = 'a'\ncommand = 'x'\n", "two jobs have this name"),
        ("[[job]]\nname = 'a'\ncommand = 'x'\ngpu = 1\n", "job a: unknown key gpu"),
        ("[jobs]\n", "jobs: unknown table"),
        ("", "no [[job]]"),
        ("[[job]\n", "plan.toml"),
    ],
)
def test_a_plan_that_cannot_be_run_says_what_is_wrong(plan: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    for verb in (["check", path], ["start", path, "--work", tmp_path / "work"]):
        done = called(*verb)
        assert done.returncode == 2
        assert says in done.stderr
    assert not (tmp_path / "work").exists()


def test_plans_are_joined_and_only_gives_the_order(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("""
[environment]
SAID = "$WORK/said"
[[job]]
name = "late"
needs = ["first"]
cores = 1000
command = 'echo late >> $SAID'
[[job]]
name = "early"
needs = ["first"]
cores = 1000
command = 'echo early >> $SAID'
""")
    plan = """
[environment]
SAID = "$WORK/said"
[[job]]
name = "first"
command = 'echo first >> $SAID'
[[job]]
name = "other"
command = 'echo other >> $SAID'
"""
    path = tmp_path / "plan.toml"
    path.write_text(plan)
    started = called("start", path, tmp_path / "more.toml", "--work", tmp_path / "w", "--only", "first,early,late")
    assert started.returncode == 0, started.stderr
    assert called("wait", "--work", tmp_path / "w", "--out", tmp_path / "out", "--seconds", "30").returncode == 0
    assert (tmp_path / "w" / "said").read_text().split() == ["first", "early", "late"]
    (tmp_path / "more.toml").write_text('[environment]\nSAID = "elsewhere"\n[[job]]\nname = "b"\ncommand = "true"\n')
    clash = called("check", path, tmp_path / "more.toml")
    assert clash.returncode == 2
    assert "more.toml: SAID: another value than in" in clash.stderr


@pytest.mark.parametrize("plan", sorted((ROOT / "benchmarks").glob("*.toml")), ids=lambda path: path.name)
def test_the_plans_here_can_be_run_and_name_files_that_are_there(plan: Path) -> None:
    first = [] if plan.name == "h200.toml" else [plan.with_name("h200.toml")]
    assert called("check", *first, plan).returncode == 0
    for job in tomllib.loads(plan.read_text())["job"]:
        done = subprocess.run(["bash", "-n", "-c", job["command"]], capture_output=True, text=True, check=False)
        assert not done.stderr, (job["name"], done.stderr)
    for word in plan.read_text().split():
        named = word.strip("\"'")
        if named.startswith(("benchmarks/", "train/examples/", "examples/")):
            assert (ROOT / named).exists(), named
