"""Where a file that was named with -o goes: beside its old self and renamed, through links, into devices and pipes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from command import ROOT, Command
from observed import transformers_base

RUN = ROOT / "tests/data/runs/demo-train"
SCRIPT = Path(sys.executable).with_name("kernelguard")
PAGE = ["report", str(RUN), "-o"]
ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a device")


def refused(done: Command, *said: str) -> None:
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    assert done.err.startswith("error: ")
    assert "fix: " in done.err
    for words in said:
        assert words in done.err


def test_a_link_stays_and_its_target_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target = tmp_path / "there/page.html"
    target.write_text("the old page")
    target.chmod(0o640)
    link = tmp_path / "link.html"
    link.symlink_to("there/page.html")
    assert Command(*PAGE, link).code == 0
    assert link.is_symlink()
    assert target.read_text().startswith("<!doctype html>")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["page.html"]


def test_a_link_to_nothing_yet_is_written_through(tmp_path: Path) -> None:
    link = tmp_path / "link.html"
    link.symlink_to("new.html")
    assert Command(*PAGE, link).code == 0
    assert link.is_symlink()
    assert (tmp_path / "new.html").stat().st_size > 1000


@ROOT_ALONE
@pytest.mark.parametrize("number", [3, 7], ids=["null", "full"])
def test_a_device_is_written_to_and_stays(tmp_path: Path, number: int) -> None:
    device = tmp_path / "device"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(1, number))
        device.open("wb").close()
    except PermissionError:
        pytest.skip("this machine lets nobody make or open a device")
    done = Command(*PAGE, device)
    assert stat.S_ISCHR(device.stat().st_mode)
    if number == 3:
        assert done.code == 0, done.err
    else:
        refused(done, f"cannot write {device}: No space left on device")
    assert [p.name for p in tmp_path.iterdir()] == ["device"]


def test_a_pipe_gets_the_page_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    assert Command(*PAGE, pipe).code == 0
    reader.join(10)
    assert read
    assert read[0].startswith("<!doctype html>")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("name", ["-", "/dev/fd/1", "/proc/self/fd/1", "../link"])
def test_stdout_gets_the_page_alone(tmp_path: Path, name: str) -> None:
    """Also where stdout is a file, which opening it by its name would cut off.

    Not with /dev/stdout itself: where this goes wrong, the machine's own link is replaced.
    """
    (tmp_path / "link").symlink_to("/proc/self/fd/1")
    tmp_path = tmp_path / "work"
    tmp_path.mkdir()
    done = Command("profile", RUN, "-o", name, cwd=tmp_path)
    assert done.code == 3, done.err
    assert done.out.startswith("<!doctype html>")
    assert done.out.rstrip().endswith("</html>")
    assert "Not known without a trace" in done.err
    assert "wrote" not in done.err
    file = tmp_path / "both"
    with file.open("w") as out:
        out.write("before\n")
        out.flush()
        subprocess.run([SCRIPT, "profile", RUN, "-o", name], stdout=out, check=False, cwd=tmp_path)
        out.write("after\n")
    assert file.read_text().startswith("before\n<!doctype html>")
    assert file.read_text().endswith("after\n")
    assert [p.name for p in tmp_path.iterdir()] == ["both"]


def test_the_page_and_the_object_cannot_both_be_on_stdout() -> None:
    refused(Command("profile", RUN, "--json", "-o", "-"), "-o - and --json both write to stdout")


def test_another_descriptor_goes_on_where_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "log"
    script = f"exec 3>{file}; echo before >&3; {SCRIPT} report {RUN} -o /dev/fd/3; echo after >&3"
    subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    assert file.read_text().startswith("before\n<!doctype html>")
    assert file.read_text().endswith("after\n")


@pytest.mark.parametrize(
    "arguments",
    [["report", str(RUN), "-o"], ["profile", str(RUN), "-o"], ["observe", "-o"], ["lock", "x", "-o"]],
    ids=lambda arguments: arguments[0],
)
def test_an_empty_name_is_refused(arguments: list[str], tmp_path: Path) -> None:
    refused(Command(*arguments, "", cwd=tmp_path), " .")
    assert not list(tmp_path.iterdir())


def test_a_lock_wants_a_file_because_others_lie_beside_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("-", str(tmp_path / "pipe"), str(tmp_path)):
        refused(Command("lock", "x", "--target", "h100", "-o", name), f"-o {name} is no place for a lock")


def test_an_environment_goes_to_stdout_once() -> None:
    plain, dash = Command("observe"), Command("observe", "-o", "-")
    assert (plain.code, dash.code, dash.err) == (0, 0, "")
    assert set(json.loads(plain.out)) == set(json.loads(dash.out))


@pytest.mark.observed
def test_junit_on_stdout_and_in_a_pipe(tmp_path: Path) -> None:
    tree = transformers_base("5.24.0").site / "transformers"
    arguments = ["check", ROOT / "examples/qwen3.8-27b", "--target", "h100", "--transformers", tree, "--junit"]
    done = Command(*arguments, "-")
    assert ET.fromstring(done.out).tag in {"testsuite", "testsuites"}
    assert "UNKNOWN: " in done.err
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
        piped = Command(*arguments, pipe)
        assert reader.communicate(timeout=10)[0] == done.out
    assert piped.code == 3, piped.err
    assert "UNKNOWN: " in piped.out
