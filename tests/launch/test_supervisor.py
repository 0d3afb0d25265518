"""The supervisor on real processes: every ending has the right code, nothing hangs, nothing is left behind.

What it runs here are small programs that behave as torchrun and its workers can; real torchrun is in
`test_real_torchrun.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernelguard.guard.ticket import AdmissionNote, Deadlines, Document, Model, Ticket, dumps
from kernelguard.launch import outcome, processes, supervisor

SUPERVISOR = Path(supervisor.__file__)
LONG_S = 30.0
"""Longer than anything here may take: a test that waits for this has found a hang."""


class Run:
    """One run directory, and the supervisor on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ticket = Ticket(
            lock=Document("k.lock", "sha256:1"),
            verdict=Document("v.json", "sha256:2", "interpreted"),
            admission=AdmissionNote(admitted=True),
            run_dir=str(folder),
            level="interpreted",
            model=Model("", "float32"),
            deadlines=Deadlines(rendezvous_s=1, fingerprint_s=1, probe_s=1, verdict_s=1, collective_s=1),
        )
        self.process: subprocess.Popen[str] | None = None

    def start(self, program: str, *options: str, environ: dict[str, str] | None = None) -> subprocess.Popen[str]:
        (self.folder / "ticket.json").write_text(dumps(self.ticket))
        script = self.folder / "program.py"
        script.write_text(PREAMBLE + textwrap.dedent(program))
        command = [sys.executable, str(SUPERVISOR), "--ticket", str(self.folder / "ticket.json"), *options]
        self.process = subprocess.Popen(
            [*command, "--", sys.executable, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "RUN": str(self.folder), **(environ or {})},
        )
        return self.process

    def end(self) -> tuple[int, str, str]:
        assert self.process is not None
        out, err = self.process.communicate(timeout=LONG_S)
        return self.process.returncode, out, err

    def run(self, program: str, *options: str, environ: dict[str, str] | None = None) -> tuple[int, str, str]:
        self.start(program, *options, environ=environ)
        return self.end()

    def wait_for(self, name: str, count: int = 1) -> list[Path]:
        end = time.monotonic() + LONG_S
        while time.monotonic() < end:
            found = sorted(self.folder.glob(name))
            if len(found) >= count:
                return found
            time.sleep(0.02)
        raise AssertionError(f"{name} never came")

    def pids(self) -> list[int]:
        """Of everything that the program said it started."""
        return [int(p.name.partition("-")[2]) for p in self.folder.glob("pid-*")]


PREAMBLE = '''
import json, os, signal, subprocess, sys, time
from pathlib import Path
RUN = Path(os.environ["RUN"])

def mark(name=""):
    (RUN / f"pid-{os.getpid()}").touch()
    if name:
        (RUN / name).touch()

def tell(code, summary="said so", **more):
    text = json.dumps({"schema": 1, "code": code, "summary": summary, "nodes_at_fault": [], **more})
    (RUN / ".part").write_text(text)
    (RUN / ".part").rename(RUN / "outcome.json")

def rank(number, body):
    """A process of its own session with a rank, as torchrun starts its workers."""
    environ = {**os.environ, "RANK": str(number), "LOCAL_RANK": str(number)}
    source = open(__file__).read().split("\\n# PROGRAM\\n")[0] + "\\n"
    source = f"__file__ = {__file__!r}\\n" + source + body
    return subprocess.Popen([sys.executable, "-c", source], env=environ, start_new_session=True)

def failed(code, number=1, host="node-b"):
    lines = ["Root Cause (first observed failure):", "[0]:", f"  host      : {host}"]
    lines += [f"  rank      : {number} (local_rank: 1)", f"  exitcode  : {code} (pid: 9)"]
    print(*lines, sep="\\n", file=sys.stderr, flush=True)
    sys.exit(1)
# PROGRAM
'''


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.kill()
    left = [pid for pid in made.pids() if Path(f"/proc/{pid}").exists()]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if made.process is not None:
        # Reads and closes the pipes, which only what was left could still hold.
        made.process.communicate(timeout=LONG_S)
    assert left == [], "a process was left behind"


def test_a_job_that_ends_well(run: Run) -> None:
    code, out, err = run.run("mark(); tell(0); print('to stdout'); print('to stderr', file=sys.stderr)")
    assert code == 0
    assert out == "to stdout\n"
    assert "to stderr" in err


@pytest.mark.parametrize("code", [78, 75, 3])
def test_the_ranks_own_code_wins_over_torchruns(run: Run, code: int) -> None:
    got, _, err = run.run(f"tell({code}, 'rank 1: another fla'); sys.exit(1)")
    assert got == code
    assert f"exit {code}: rank 1: another fla" in err


@pytest.mark.parametrize(("own", "expected"), [(17, 17), (-9, 137), (-15, 143), (1, 1)])
def test_the_trainers_own_code_is_not_lost(run: Run, own: int, expected: int) -> None:
    code, _, err = run.run(f"tell(0); failed({own})")
    assert code == expected
    assert "rank 1 on node-b" in err


def test_torchruns_own_code_where_it_names_no_rank(run: Run) -> None:
    assert run.run("tell(0); sys.exit(5)")[0] == 5


def test_a_rank_that_died_before_a_verdict_is_named(run: Run) -> None:
    code, _, err = run.run("failed(-11)")
    assert code == 75
    assert "rank 1 on node-b was killed by signal 11 before there was a verdict" in err
    left = json.loads((run.folder / "outcome.json").read_text())
    assert left["code"] == 75
    assert left["nodes_at_fault"] == ["node-b"]


def test_a_rank_that_failed_before_a_verdict_keeps_its_code(run: Run) -> None:
    code, _, err = run.run("failed(2)")
    assert code == 2
    assert "before there was a verdict" in err


@pytest.mark.parametrize("code", [78, 75, 3])
def test_an_agreed_code_is_kept_where_no_file_can_be_read(run: Run, code: int) -> None:
    assert run.run(f"failed({code})")[0] == code


def test_the_outcome_is_taken_from_stderr_where_the_disk_is_read_only(run: Run) -> None:
    told = '{"schema": 1, "code": 78, "summary": "two flas"}'
    program = f"""
    print("[rank1]: KERNELGUARD-OUTCOME " + '{told}', file=sys.stderr, flush=True)
    sys.exit(1)
    """
    code, _, err = run.run(program)
    assert code == 78
    assert "two flas" in err


@pytest.mark.parametrize("text", ["", "{", "[]", '{"code": "78"}', '{"code": 77}', '{"code": true}', "\\xff\\xfe"])
def test_garbage_is_could_not_tell(run: Run, text: str) -> None:
    code, _, err = run.run(
        f"(RUN / 'outcome.json').write_bytes({text!r}.encode('latin-1')); time.sleep(1); sys.exit(1)"
    )
    assert code == 3
    assert "outcome" in err


def test_noise_on_stdout_and_stderr_changes_nothing(run: Run) -> None:
    program = """
    noise = b"\\x00\\xff KERNELGUARD {]" * 100_000
    os.write(1, noise); os.write(2, noise + b"\\n"); os.write(2, b"no line end" * 400_000)
    tell(78, "through the noise"); sys.exit(1)
    """
    process = run.start(program)
    assert process.stdout is not None
    assert process.stderr is not None
    # Both are read as bytes: what ranks write need not be text.
    out, err = process.stdout.buffer, process.stderr.buffer  # type: ignore[attr-defined]
    reader = threading.Thread(target=out.read)
    reader.start()
    said = err.read()
    reader.join(LONG_S)
    run.process = None
    for pipe in (process.stdout, process.stderr):
        pipe.close()
    assert process.wait(LONG_S) == 78
    assert b"no line end" in said
    assert b"through the noise" in said


def test_an_outcome_of_an_earlier_run_is_forgotten(run: Run) -> None:
    (run.folder / "outcome.json").write_text('{"schema": 1, "code": 78, "summary": "old"}')
    assert run.run("tell(0)")[0] == 0


def test_an_earlier_outcome_that_cannot_be_removed_is_not_believed(run: Run) -> None:
    file = outcome.OutcomeFile(run.folder / "outcome.json")
    file.path.write_text('{"schema": 1, "code": 78, "summary": "old"}')
    file.expect_new()
    assert file.read() is None
    (run.folder / "new").write_text('{"schema": 1, "code": 0, "summary": "new"}')
    (run.folder / "new").rename(file.path)
    assert file.read() == outcome.Outcome(0, "new")


HANGING = """
mark()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [rank(n, "mark(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)") for n in (0, 1)]
{then}
time.sleep(600)
"""


def supervised(run: Run, program: str, **waits: float) -> tuple[int, str]:
    """With other waits than the fixed ones: the same code, in an interpreter that sets them first."""
    settings = "".join(f"s.{name} = {value}\n" for name, value in waits.items())
    runner = run.folder / "supervise.py"
    here = f"import sys\nsys.path.insert(0, {str(SUPERVISOR.parents[2])!r})\n"
    start = f"from kernelguard.launch import supervisor as s\n{settings}sys.exit(s.main(sys.argv[1:]))\n"
    runner.write_text(here + start)
    (run.folder / "ticket.json").write_text(dumps(run.ticket))
    script = run.folder / "program.py"
    script.write_text(PREAMBLE + textwrap.dedent(program))
    command = [sys.executable, str(runner), "--ticket", str(run.folder / "ticket.json")]
    run.process = subprocess.Popen(
        [*command, "--", sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "RUN": str(run.folder)},
    )
    code, _, err = run.end()
    return code, err


FAST: dict[str, Any] = {"_START_MARGIN_S": 1.0, "_END_GRACE_S": 0.5, "_KILL_GRACE_S": 0.5}


def test_ranks_that_never_tell_are_ended_and_named(run: Run) -> None:
    (run.folder / "ranks").mkdir()
    program = HANGING.format(then="(RUN / 'ranks' / '0.json').write_text('{}')")
    code, err = supervised(run, program, **FAST)
    assert code == 75
    assert "rank 1 said nothing" in err
    assert json.loads((run.folder / "outcome.json").read_text())["code"] == 75


def test_a_torchrun_that_starts_no_rank_is_ended(run: Run) -> None:
    code, err = supervised(run, "mark(); signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)", **FAST)
    assert code == 3
    assert "no rank was started" in err


def test_a_node_that_never_came_is_named(run: Run) -> None:
    file = outcome.OutcomeFile(run.folder / "outcome.json")
    outcome.report_node(run.folder, 0, "here")
    outcome.report_node(run.folder, 2, "there")
    assert file.missing_nodes(4) == [1, 3]


def test_a_group_that_does_not_end_after_its_verdict_is_ended(run: Run) -> None:
    code, err = supervised(run, HANGING.format(then="time.sleep(1.5); tell(78, 'rank 1 differs')"), **FAST)
    assert code == 78
    assert "rank 1 differs" in err


def test_a_restart_of_what_must_not_be_restarted_is_ended(run: Run) -> None:
    program = """
    mark()
    first = rank(0, "mark(); tell(78, 'wrong'); time.sleep(1)")
    first.wait()
    rank(0, "mark(); time.sleep(600)")
    time.sleep(600)
    """
    code, _ = supervised(run, program, **(FAST | {"_END_GRACE_S": 50.0}))
    assert code == 78


def test_a_restart_after_a_crash_is_a_new_attempt(run: Run) -> None:
    program = """
    mark()
    first = rank(0, "mark(); tell(0); time.sleep(2)")
    first.wait()
    rank(0, "mark(); time.sleep(1.5); tell(78, 'the second attempt found another fla')").wait()
    sys.exit(1)
    """
    code, err = supervised(run, program, **(FAST | {"_START_MARGIN_S": 30.0}))
    assert code == 78
    assert "second attempt" in err


def test_an_earlier_attempts_outcome_says_nothing_about_a_restart(run: Run) -> None:
    program = """
    mark()
    rank(0, "mark(); tell(0); time.sleep(2)").wait()
    rank(0, "mark(); time.sleep(1.5)").wait()
    failed(-11)
    """
    code, err = supervised(run, program, **(FAST | {"_START_MARGIN_S": 30.0}))
    assert code == 75
    assert "before there was a verdict" in err


CATCHING = """
mark()
tell(0)
catching = "got = lambda n, f: (RUN / f'got-{signal.Signals(n).name}-' + os.environ['RANK']).touch()"
body = '''
def got(number, frame):
    (RUN / ("got-" + signal.Signals(number).name + "-" + os.environ["RANK"])).touch()
    if number in (signal.SIGTERM, signal.SIGINT):
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, got)
mark("ready-" + os.environ["RANK"])
while True:
    time.sleep(0.05)
'''
children = [rank(n, body) for n in (0, 1)]
deaf = rank(2, 'mark("ready-2")\\nwhile not list(RUN.glob("got-SIG[TI]*")): time.sleep(0.05)')
sys.exit(max(c.wait() for c in (*children, deaf)))
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_reaches_the_ranks_and_they_may_save(run: Run, name: str) -> None:
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); "
    program = CATCHING.replace("rank(2, 'mark(", f"rank(2, '{ignoring}mark(")
    process = run.start(program)
    run.wait_for("ready-*", 3)
    process.send_signal(getattr(signal, name))
    code, _, err = run.end()
    assert code == 0
    assert {p.name for p in run.folder.glob("got-*")} == {f"got-{name}-0", f"got-{name}-1"}
    assert f"{name} passed on to ranks: 0, 1, 2" in err


def test_a_signal_that_only_asks_spares_ranks_without_a_handler(run: Run) -> None:
    process = run.start(CATCHING)
    run.wait_for("ready-*", 3)
    process.send_signal(signal.SIGUSR1)
    run.wait_for("got-SIGUSR1-*", 2)
    process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert "SIGUSR1 passed on to ranks: 0, 1\n" in err
    # Rank 2 was still there for the SIGTERM, of which it died.
    assert code == 0 or "SIGTERM passed on to ranks: 0, 1, 2" in err


def test_a_second_signal_ends_at_once(run: Run) -> None:
    process = run.start(HANGING.format(then="tell(0)\nmark('ready')"))
    run.wait_for("ready")
    run.wait_for("pid-*", 3)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 137
    assert "ending at once" in err


def test_ranks_that_do_not_stop_are_ended_in_time(run: Run) -> None:
    process = run.start(HANGING.format(then="tell(0)\nmark('ready')"), "--stop-within", "1")
    run.wait_for("ready")
    process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 137
    assert "did not end within 1 s" in err


def test_what_ranks_leave_behind_is_ended(run: Run) -> None:
    program = """
    tell(0)
    body = 'mark(); subprocess.Popen([sys.executable, "-c", SLEEP], start_new_session=True); time.sleep(0.5)'
    sleep = "import os, time; open(os.environ['RUN'] + '/pid-' + str(os.getpid()), 'w'); time.sleep(600)"
    rank(0, f"SLEEP = {sleep!r}\\n" + body).wait()
    """
    code, _, _ = run.run(program)
    assert code == 0
    assert len(run.pids()) == 2
    # The fixture asserts that both are gone.


def test_when_the_supervisor_is_killed_torchrun_is_told(run: Run) -> None:
    process = run.start("mark('ready'); time.sleep(600)")
    run.wait_for("ready")
    process.kill()
    process.wait(LONG_S)
    end = time.monotonic() + LONG_S
    while any(Path(f"/proc/{pid}").exists() for pid in run.pids()) and time.monotonic() < end:
        time.sleep(0.02)


def test_a_command_that_is_not_there(run: Run) -> None:
    (run.folder / "ticket.json").write_text(dumps(run.ticket))
    command = [sys.executable, str(SUPERVISOR), "--ticket", str(run.folder / "ticket.json"), "--", "/no/such/python"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "/no/such/python cannot be started" in done.stderr


@pytest.mark.parametrize("text", ["{", '{"schema": 1}'])
def test_an_unusable_ticket_starts_nothing(run: Run, text: str) -> None:
    ticket = run.folder / "ticket.json"
    ticket.write_text(text)
    command = [sys.executable, str(SUPERVISOR), "--ticket", str(ticket), "--", sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert str(ticket) in done.stderr


def test_ranks_get_the_ticket_and_the_guard_of_this_kernelguard(run: Run, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    ticket = replace(run.ticket, variables={"TRITON_INTERPRET": "1"})
    plain = supervisor.rank_environment({"PYTHONPATH": "/mine"}, Path("/t"), site, ticket)
    assert plain == {"PYTHONPATH": "/mine", "TRITON_INTERPRET": "1", "KERNELGUARD_TICKET": "/t"}
    (site / supervisor.STAGED).touch()
    staged = supervisor.rank_environment({"PYTHONPATH": "/mine"}, Path("/t"), site, ticket)
    assert staged["PYTHONPATH"] == f"{site}:/mine"
    assert supervisor.rank_environment({}, Path("/t"), site, ticket)["PYTHONPATH"] == str(site)


def test_settling_gives_the_runs_code(run: Run) -> None:
    (run.folder / "ticket.json").write_text(dumps(run.ticket))
    command = [sys.executable, str(SUPERVISOR), "--ticket", str(run.folder / "ticket.json"), "--settle", "137"]
    assert subprocess.run(command, check=False).returncode == 137
    (run.folder / "outcome.json").write_text('{"schema": 1, "code": 78, "summary": "x"}')
    assert subprocess.run(command, check=False).returncode == 78
    (run.folder / "outcome.json").write_text('{"schema": 1, "code": 0, "summary": "x"}')
    assert subprocess.run(command, check=False).returncode == 137


def test_the_node_that_ended_first_and_by_itself_gives_the_code(run: Run) -> None:
    """Slurm reports the highest code of any node, which is that of a node that was killed because another ended."""
    code, _, _ = run.run("failed(17)", "--node-rank", "1", "--nnodes", "3")
    assert code == 17
    outcome.report_node(run.folder, 0, "here", code=143, stopped=True)
    outcome.report_node(run.folder, 2, "there", code=19)
    (run.folder / "nodes" / "3.json").write_text("{")
    assert outcome.first_code(run.folder) == 17
    command = [sys.executable, str(SUPERVISOR), "--ticket", str(run.folder / "ticket.json"), "--settle"]
    assert subprocess.run([*command, "143"], check=False).returncode == 17
    # What the engine says went well did.
    assert subprocess.run([*command, "0"], check=False).returncode == 0


def test_children_are_found_with_and_without_the_kernels_list() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert child.pid in processes.children(os.getpid())
        assert child.pid in processes._children_by_scan(os.getpid())
        assert processes.children(2**22 - 1) == []
    finally:
        child.kill()
        child.wait()
