"""A worker may crash, hang, print or lie; each of these is a result."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernelguard.observe.process import WorkerResult, run_worker

Run = Callable[..., WorkerResult]
_HEAD = """
import json, os, signal, subprocess, sys, time
def write(record):
    with open(sys.argv[2], "a") as handle:
        handle.write(json.dumps(record) + "\\n")
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(body: str, timeout: float = 30.0, **options: object) -> WorkerResult:
        script = tmp_path / "worker.py"
        script.write_text(_HEAD + body)
        return run_worker(sys.executable, script, {"answer": 42}, timeout=timeout, **options)  # type: ignore[arg-type]

    return run


def test_a_worker_that_ends_well(run: Run) -> None:
    result = run(
        "write({'stage': 'reading'}); write({'kind': 'a', 'request': json.load(open(sys.argv[1]))})\n"
        "write({'kind': 'b'}); write({'done': True})"
    )
    assert result.records == ({"kind": "a", "request": {"answer": 42}}, {"kind": "b"})
    assert list(result.of_kind("b")) == [{"kind": "b"}]
    assert result.finished
    assert result.died_at == ""
    assert result.ending() == ""


@pytest.mark.parametrize(
    ("body", "signal", "code", "ending"),
    [
        pytest.param("os.abort()", "SIGABRT", -6, "was killed by SIGABRT at stage 'two'", id="abort"),
        pytest.param("os.kill(os.getpid(), 9)", "SIGKILL", -9, "was killed by SIGKILL at stage 'two'", id="kill"),
        pytest.param("os._exit(0)", "", 0, "ended with exit code 0 and no result at stage 'two'", id="quiet-exit"),
        pytest.param("raise SystemExit(3)", "", 3, "ended with exit code 3 and no result at stage 'two'", id="exit"),
    ],
)
def test_a_worker_that_dies_keeps_what_it_said_before(run: Run, body: str, signal: str, code: int, ending: str) -> None:
    result = run("write({'stage': 'one'}); write({'kind': 'a'}); write({'stage': 'two'})\n" + body)
    assert result.records == ({"kind": "a"},)
    assert not result.finished
    assert not result.timed_out
    assert (result.died_at, result.signal, result.returncode) == ("two", signal, code)
    assert result.ending() == ending


def test_a_hang_ends_at_the_limit_and_takes_its_children_along(run: Run, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = run(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "write({'stage': 'sleep'}); time.sleep(600)",
        timeout=2.0,
    )
    assert result.timed_out
    assert result.returncode is None
    assert result.ending() == "did not end within its time limit at stage 'sleep'"
    assert _gone(int(pid_file.read_text()))


def test_what_a_worker_leaves_behind_is_killed_when_it_ends_well(run: Run, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = run(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); write({{'done': True}})"
    )
    assert result.finished
    assert _gone(int(pid_file.read_text()))


def test_a_grandchild_with_its_own_session_does_not_hold_the_caller_up(run: Run, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    began = time.monotonic()
    result = run(
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid)); write({{'done': True}})"
    )
    assert result.finished
    # Not a speed limit: it would otherwise wait for the whole minute.
    assert time.monotonic() - began < 50
    os.kill(int(pid_file.read_text()), 9)


def test_megabytes_of_output_are_read_and_only_the_end_is_kept(run: Run) -> None:
    result = run("print('x' * 5_000_000)\nprint('the end', file=sys.stderr); write({'done': True})")
    assert result.finished
    assert result.output.endswith("the end\n")
    assert len(result.output) <= 8192


@pytest.mark.parametrize("garbage", ['\'{"kind": "a"\'', "'[1, 2]\\n'", "'\\x00\\x01\\n'"])
def test_an_unreadable_result_is_could_not_tell(run: Run, garbage: str) -> None:
    result = run(f"write({{'kind': 'good'}})\nopen(sys.argv[2], 'a').write({garbage})\nwrite({{'done': True}})")
    assert result.records == ({"kind": "good"},)
    assert not result.finished
    assert "left an unreadable result (line 2:" in result.ending()


def test_the_environment_is_handed_on_unchanged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    body = "write({'kind': 'env', 'env': dict(os.environ), 'cwd': os.getcwd()}); write({'done': True})"
    record = run(body).records[0]
    added = {name for name, value in record["env"].items() if os.environ.get(name) != value}
    assert not added - {"LC_CTYPE", "LINES", "COLUMNS"}  # Python's and readline's own
    assert not os.environ.keys() - record["env"].keys()
    assert record["env"]["CUDA_VISIBLE_DEVICES"] == "3"
    assert record["cwd"] == os.getcwd()  # noqa: PTH109
    assert run(body, environ={"ONLY": "this"}).records[0]["env"].keys() <= {"ONLY", "LC_CTYPE"}


def test_a_memory_limit_holds(run: Run) -> None:
    body = "time.sleep(0.3)\ntry:\n    bytearray(300 * 2**20)\nexcept MemoryError:\n    write({'kind': 'limited'})\n"
    assert not list(run(body).of_kind("limited"))
    assert list(run(body, memory_bytes=200 * 2**20).of_kind("limited"))


def test_no_file_is_left_behind(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    run("os.abort()")
    assert list(folder.iterdir()) == []


def test_a_program_that_cannot_be_executed_is_an_os_error() -> None:
    with pytest.raises(FileNotFoundError):
        run_worker("/nonexistent/python", "environment", {}, timeout=5)


def _gone(pid: int) -> bool:
    """Whether a process is no more, or only a zombie that its new parent has not waited for."""
    for _ in range(200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False
