"""What is printed where it cannot be: a full disk, a reader that went away, an encoding of a few letters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from command import ROOT, Command

TRACE = ROOT / "benchmarks/results/trace-naive-h200.json.gz"
RUN = ROOT / "tests/data/runs/demo-train"
SCRIPT = Path(sys.executable).with_name("kernelguard")
ASCII = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
COMMANDS = {
    "profile": ["profile", str(RUN)],
    "profile-json": ["profile", str(TRACE), "--json"],
    "profile-page": ["profile", str(RUN), "-o", "-"],
    "report-page": ["report", str(RUN), "-o", "/dev/fd/1"],
    "matrix": ["matrix", "list"],
    "bytes": ["matrix", "show", "rules"],
    "help": ["--help"],
    "help-of-one": ["check", "--help"],
    "version": ["--version"],
    "explain": ["explain", "fla-hopper-dqkwg"],
    "diff": ["diff", *2 * [str(ROOT / "benchmarks/results/check-h200.json")], "--json"],
}


def full(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """One run whose stdout is a disk without space."""
    with Path("/dev/full").open("w") as out:
        environ = {**os.environ, **variables}
        command = [str(SCRIPT), *arguments]
        return subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, env=environ)


@pytest.mark.parametrize("buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_behind_stdout_is_one_line(name: str, buffered: bool) -> None:
    done = full(COMMANDS[name], **({} if buffered else {"PYTHONUNBUFFERED": "1"}))
    assert (done.returncode, done.stderr) == (2, "error: cannot write to stdout: No space left on device\n")


def test_a_stdout_that_is_open_for_reading_alone_is_told() -> None:
    with Path("/dev/null").open() as out:
        done = subprocess.run([SCRIPT, "matrix", "list"], stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "error: cannot write to stdout: Bad file descriptor\n")


def test_what_shows_only_when_stdout_is_flushed_at_exit() -> None:
    """Text that a library left in the buffer."""
    code = "import sys; from kernelguard.cli import app, main; app.command('x')(lambda: sys.stdout.write('x')); main()"
    with Path("/dev/full").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", code, "x"], stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "error: cannot write to stdout: No space left on device\n")


def test_talk_that_finds_no_space_takes_nothing_from_the_answer(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as err:
        command = [SCRIPT, "report", RUN, "-o", tmp_path / "page.html"]
        assert subprocess.run(command, stderr=err, check=False).returncode == 0
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize("name", ["profile", "profile-json", "profile-page", "bytes", "help"])
def test_a_reader_that_went_away_is_no_full_disk(name: str) -> None:
    argv = [SCRIPT, *COMMANDS[name]]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (141, "")


def test_a_stdout_that_takes_little_at_once_gets_all() -> None:
    """A pipe that somebody made non-blocking, and a reader that is slower than we are."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    process = subprocess.Popen([SCRIPT, "profile", TRACE, "-o", "-"], stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    with os.fdopen(read, "rb") as out:
        text = out.read()
    assert process.wait() == 0
    assert len(text) > 65536
    assert text.rstrip().endswith(b"</html>")


def ascii_alone(arguments: list[str], variables: Mapping[str, str] = ASCII) -> subprocess.CompletedProcess[bytes]:
    environ = {**os.environ, **variables}
    return subprocess.run([SCRIPT, *arguments], capture_output=True, check=False, env=environ)


@pytest.mark.parametrize("arguments", [["profile", str(TRACE)], *COMMANDS.values()], ids=["trace", *COMMANDS])
def test_an_encoding_without_these_letters_is_no_bug(arguments: list[str]) -> None:
    done = ascii_alone(arguments)
    assert done.returncode in {0, 1, 3}, done.stderr
    assert b"Traceback" not in done.stderr
    (done.stdout if "-o" not in arguments else b"").decode("ascii")
    done.stderr.decode("ascii")


def test_units_are_spelt_in_letters_and_columns_stay() -> None:
    plain = ascii_alone(["profile", str(TRACE)]).stdout.decode("ascii")
    assert "us each" in plain
    assert "?" not in plain
    usual = Command("profile", TRACE).out
    assert [len(line) for line in plain.splitlines()] == [len(line) for line in usual.splitlines()]


def test_an_encoding_that_was_chosen_with_its_errors_is_kept() -> None:
    done = ascii_alone(["profile", str(TRACE)], {**ASCII, "PYTHONIOENCODING": "ascii:xmlcharrefreplace"})
    assert b"&#181;s" in done.stdout


def test_a_file_name_that_is_no_text_is_printed_and_kept(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/\xff.json.gz"
    Path(os.fsdecode(name)).write_bytes(TRACE.read_bytes())
    page = tmp_path / "page.html"
    done = subprocess.run([SCRIPT, "profile", name, "-o", page], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert "\\udcff.json.gz" in page.read_text()
    gone = subprocess.run([SCRIPT, "profile", name + b"x"], capture_output=True, check=False)
    assert gone.returncode == 2
    assert name in gone.stderr
