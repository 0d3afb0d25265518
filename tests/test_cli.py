"""The command line as a real process: bad input gives one clear line with the fix and the documented code."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest

import configs
import crafted
from command import ROOT, Command
from observed import Interpreter, environment, make_venv, transformers_base

pytestmark = pytest.mark.observed


@pytest.fixture(scope="module")
def tree() -> Path:
    return transformers_base("5.24.0").site / "transformers"


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    """An interpreter with neither torch nor transformers."""
    return make_venv(tmp_path_factory.mktemp("empty") / "env")


def refused(command: Command, code: int, *said: str) -> None:
    """Exit code, no traceback, one error line that says what it must, and a fix."""
    assert command.code == code, command.err
    assert "Traceback" not in command.err
    assert command.out == ""
    lines = command.err.strip().splitlines()
    assert lines[0].startswith("error: "), command.err
    for word in said:
        assert word in command.err
    assert any(line.strip().startswith("fix: ") for line in lines), command.err


def model_file(text: str | bytes) -> Callable[[Path], Path]:
    def make(tmp: Path) -> Path:
        path = tmp / "config.json"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return make


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda tmp: tmp / "nothing" / "config.json", "nothing"),
        (lambda tmp: tmp, "config.json"),
        (model_file("{"), "JSON"),
        (model_file("not json at all"), "JSON"),
        (model_file(""), "empty"),
        (model_file("[1, 2]"), "list"),
        (model_file('{"hidden_size": 4}'), "model_type"),
        (model_file('{"model_type": 7}'), "model_type"),
        (model_file('{"model_type": "qwen3_55"}'), "qwen3_5"),
        (model_file(b"\x80\x02}q\x00." * 40), "config.json"),
        (model_file(b" " * 100_000_000), "MB"),
        (model_file("[" * 100_000), "config.json"),
    ],
    ids=[
        "missing",
        "folder",
        "cut-off",
        "text",
        "empty",
        "list",
        "no-type",
        "type-number",
        "unknown-type",
        "binary",
        "100MB",
        "deep",
    ],
)
def test_unusable_model(tmp_path: Path, tree: Path, make: Callable[[Path], Path], said: str) -> None:
    command = Command("check", make(tmp_path), "--target", "h100", "--transformers", tree)
    refused(command, 2, said)


def test_hub_id_offline(tree: Path, tmp_path: Path) -> None:
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    command = Command("check", "some-org/some-model", "--target", "h100", "--transformers", tree, env=env)
    refused(command, 3, "some-org/some-model")


def test_a_transformers_that_lacks_the_type_names_the_release_that_has_it(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    old = transformers_base("4.57.6").site / "transformers"
    refused(Command("check", model, "--target", "h100", "--transformers", old), 2, "qwen3_5_text", "4.57.6", "5.2.0")


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda tmp: tmp / "no-such-python", 2),
        (lambda tmp: tmp, 2),
        (lambda _: Path("/bin/ls"), 2),
        (lambda tmp: executable(tmp / "text", "this is no program\n"), 2),
        (lambda tmp: executable(tmp / "other", "\x7fELF\x02\x01\x01" + "\x00" * 57), 2),
        (lambda tmp: executable(tmp / "hangs", "#!/bin/sh\nsleep 1000\n"), 3),
    ],
    ids=["missing", "folder", "not-python", "text", "other-platform", "hangs"],
)
def test_unusable_interpreter(tmp_path: Path, make: Callable[[Path], Path], code: int) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    refused(Command("check", model, "--python", make(tmp_path), "--timeout", "3"), code)


def test_interpreter_without_transformers(tmp_path: Path, empty: Interpreter) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    refused(Command("check", model, "--python", empty.python), 3, "transformers", str(empty.python))


def test_interpreter_without_torch(tmp_path: Path) -> None:
    env = make_venv(tmp_path / "env", sees=(transformers_base("5.24.0").site,))
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    refused(Command("check", model, "--python", env.python), 3, "torch")


@pytest.mark.parametrize(
    ("target", "said"),
    [("h101", "h100"), ("h100,color=red", "color"), ("gpu=h100,torch=banana", "banana"), ("", "target")],
)
def test_nonsense_target(tree: Path, target: str, said: str) -> None:
    model = ROOT / "examples" / "qwen3.8-27b"
    refused(Command("check", model, "--target", target, "--transformers", tree), 2, said)


@pytest.mark.parametrize(
    ("text", "said"),
    [('{"schema": 999}', "999"), ("{}", "schema"), ("nonsense", "JSON"), ('{"schema": 1, "live": "yes"}', "live")],
)
def test_unusable_environment_file(tmp_path: Path, tree: Path, text: str, said: str) -> None:
    path = tmp_path / "environment.json"
    path.write_text(text)
    model = ROOT / "examples" / "qwen3.8-27b"
    refused(Command("check", model, "--environment", path, "--transformers", tree), 2, said)


def test_unusable_intent_file(tmp_path: Path, tree: Path) -> None:
    path = tmp_path / "intent.toml"
    path.write_text("pakced = true\n")
    model = ROOT / "examples" / "qwen3.8-27b"
    refused(Command("check", model, "--target", "h100", "--intent", path, "--transformers", tree), 2, "packed")


def test_unknown_rule() -> None:
    refused(Command("explain", "fla-hopper-dqkwh"), 2, "fla-hopper-dqkwg")


def test_unknown_matrix() -> None:
    refused(Command("matrix", "show", "rulez"), 2, "rules")


def test_two_things_to_check(empty: Interpreter) -> None:
    model = ROOT / "examples" / "qwen3.8-27b"
    refused(Command("check", model, "--target", "h100", "--python", empty.python), 2, "--target", "--python")


def test_wrong_usage() -> None:
    for arguments in (["check"], ["check", "x", "--level", "best"], ["no-such-command"], []):
        command = Command(*arguments)
        assert command.code == 2
        assert "Traceback" not in command.err


def test_it_is_a_module_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kernelguard", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == Command("--version").out


@pytest.mark.parametrize("arguments", [("matrix", "show", "rules"), ("matrix", "list"), ("--help",)])
def test_a_reader_that_goes_away_gets_no_answer(arguments: tuple[str, ...]) -> None:
    """Neither "the claims hold" nor "a definite no": nobody has read what holds."""
    argv = [str(Path(sys.executable).with_name("kernelguard")), *arguments]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), said) == (141, "")


def test_json_is_as_its_schema_says(tree: Path) -> None:
    schema = json.loads((ROOT / "src/kernelguard/schemas/report.schema.json").read_text())
    model = ROOT / "examples" / "qwen3.8-27b"
    command = Command("check", model, "--target", "h100", "--transformers", tree, "--json")
    assert command.code == 3, command.err
    jsonschema.validate(json.loads(command.out), schema)


def test_static_answer_for_the_example(tree: Path) -> None:
    model = ROOT / "examples" / "qwen3.8-27b"
    report = json.loads(Command("check", model, "--target", "h100", "--transformers", tree, "--json").out)
    paths = {p["symbol"]: p for p in report["fast_paths"]}
    assert set(paths) == {"causal_conv1d_fn", "chunk_gated_delta_rule"}
    assert {s: p["status"] for s, p in paths.items()} == {
        "causal_conv1d_fn": "unknown",  # its wheel is reported by its publisher, and nobody has looked
        "chunk_gated_delta_rule": "pass",
    }
    assert {p["layers"] for p in paths.values()} == {48}
    assert report["model"]["layers"] == {"linear_attention": 48, "full_attention": 16}


def test_text_report_reads_at_80_columns_without_colour(tree: Path) -> None:
    model = ROOT / "examples" / "qwen3.8-27b"
    command = Command("check", model, "--target", "h100", "--transformers", tree, env={"COLUMNS": "80"})
    assert "\x1b" not in command.out
    lines = command.out.splitlines()
    # A fix is never wrapped, because it is there to be pasted.
    assert all(len(line) <= 80 for line in lines if "fix:" not in line)
    assert re.match(r"UNKNOWN: qwen3_5, 2 fast paths \(1 unknown, 1 pass\); level resolve; exit 3", lines[-1])


def test_colour_is_forced_and_refused_as_the_environment_says(tree: Path) -> None:
    arguments = ["check", ROOT / "examples" / "qwen3.8-27b", "--target", "h100", "--transformers", tree]
    assert "\x1b" in Command(*arguments, env={"FORCE_COLOR": "1"}).out
    assert "\x1b" not in Command(*arguments, env={"NO_COLOR": "1"}).out


def test_junit(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.24.0", crafted.without(crafted.everything(), "fla", "flash"))
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    out = tmp_path / "check.xml"
    command = Command("check", model, "--python", env.python, "--junit", out)
    assert command.code == 1, command.err
    suite = ET.parse(out).getroot()
    cases = {case.get("name"): case for case in suite}
    failed = cases["qwen3_5_text.chunk_gated_delta_rule"].find("failure")
    assert failed is not None
    assert "pip install" in (failed.text or "")
    assert cases["qwen3_5_text.causal_conv1d_fn"].find("failure") is None
    assert suite.get("failures") == "1"
    assert int(suite.get("errors") or 0) >= 1


def test_junit_that_cannot_be_written_loses_nothing(tmp_path: Path, tree: Path) -> None:
    model = ROOT / "examples" / "qwen3.8-27b"
    out = tmp_path / "no-such-folder" / "check.xml"
    refused(Command("check", model, "--target", "h100", "--transformers", tree, "--junit", out), 2, str(out))


def test_captured_environment_gives_the_answers_of_its_machine(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.24.0", crafted.without(crafted.everything(), "fla", "flash"))
    captured = tmp_path / "environment.json"
    assert Command("observe", "--python", env.python, "-o", captured).code == 0
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    tree = transformers_base("5.24.0").site / "transformers"
    command = Command("check", model, "--environment", captured, "--transformers", tree, "--json")
    assert command.code == 1, command.err
    paths = {p["symbol"]: p["codes"] for p in json.loads(command.out)["fast_paths"]}
    assert "not-installed" in paths["chunk_gated_delta_rule"]
    assert "not-executed" in paths["causal_conv1d_fn"]


def test_the_default_interpreter_is_the_active_environment_and_is_named(tmp_path: Path, empty: Interpreter) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    command = Command("check", model, env={"VIRTUAL_ENV": str(empty.prefix)})
    refused(command, 3, str(empty.python))
    path = f"{empty.prefix / 'bin'}:{os.environ['PATH']}"
    refused(Command("check", model, env={"PATH": path}), 3, str(empty.python))


def test_the_unrelated_distribution_is_warned_of(tmp_path: Path) -> None:
    files = crafted.everything() | crafted.metadata("kernelguard", "0.3.1", "kernelguard_other")
    env = environment(tmp_path / "env", "5.24.0", files)
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    command = Command("check", model, "--python", env.python, "--level", "import", "--json")
    warned = [f for f in json.loads(command.out)["findings"] if f["status"] == "warn"]
    assert any("kernelguard" in f["reason"] for f in warned)
    assert command.code == 0
    assert Command("check", model, "--python", env.python, "--level", "import", "--strict").code == 1


def test_a_target_is_read_with_the_transformers_of_the_active_environment(tmp_path: Path) -> None:
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    arguments = ["check", model, "--target", "h100", "--json"]
    active = {"VIRTUAL_ENV": str(transformers_base("5.24.0").prefix)}
    here = json.loads(Command(*arguments, env=active).out)["transformers"]
    assert (here["version"], here["origin"]) == ("5.24.0", "interpreter")
    # What comes first on the interpreter's path is what it imports, whatever lies in its site-packages.
    first = {**active, "PYTHONPATH": str(transformers_base("5.17.0").site)}
    assert json.loads(Command(*arguments, env=first).out)["transformers"]["version"] == "5.17.0"
