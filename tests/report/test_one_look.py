"""All commands share one look: a header, a line for each answer, reason and fix under it, one line that says it all."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
from rich.console import Console

import configs
from command import ROOT, Command
from image.locks import small_lock
from kernelguard.image.values import ImageFacts, Layer, Outcome
from kernelguard.judge.values import Status, worst
from kernelguard.lock.values import Role
from kernelguard.report.image import print_outcome
from kernelguard.report.lines import filled
from kernelguard.report.lock import print_lock
from kernelguard.report.terminal import print_fix
from kernelguard.report.verdict import print_verdict, verdict_header
from kernelguard.verify.files import load_verdict
from kernelguard.verify.findings import findings
from observed import transformers_base

WORDS = ("PASS", "WARN", "FAIL", "UNKNOWN")
LAST = re.compile(rf"(?P<word>{'|'.join(WORDS)}): (?P<said>.+); exit (?P<code>\d+)")
ANSWER = re.compile(r"(pass|warn|FAIL|unknown) {2,}\S")
RESULTS = ROOT / "benchmarks" / "results"
RUN = ROOT / "tests" / "data" / "runs" / "demo-train"
VERDICTS = [p for p in sorted(RESULTS.glob("verify-*.json")) if "probes" in json.loads(p.read_text())]
NAMED = re.compile(r"(?:trace|folder) {9,}\S+$")
PASTED = re.compile(
    r" {9}(?:fix: | {5})(?:(?:or|then) )?(?:kernelguard|pip|export|unset|python|docker|with|for|\w+\()\b.*"
)
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture(scope="module")
def situations(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[list[str | Path], int]]:
    """Commands that answer differently, by name, and the exit code of each."""
    folder = tmp_path_factory.mktemp("situations")
    tree = transformers_base("5.24.0").site / "transformers"
    linear, dense = folder / "linear", folder / "dense"
    configs.write(linear, configs.QWEN3_5)
    configs.write(dense, configs.LLAMA)
    (folder / "Dockerfile").write_text("FROM nvidia/cuda:13.0.0-base-ubuntu22.04\nRUN pip install torch || true\n")
    read = ["--transformers", tree]
    return {
        "pass": (["check", dense, "--target", "h100", *read], 0),
        "unknown": (["check", linear, "--target", "h100", *read], 3),
        "fail": (["check", linear, "--target", "h100,torch=2.11.0,triton=3.6.0", *read], 1),
        "lint": (["lint", folder / "Dockerfile", "--driver", "550"], 1),
    }


def holds_the_look(text: str, width: int) -> None:
    lines = text.splitlines()
    assert all(line == line.rstrip() for line in lines), "blanks at the end, which a log would keep"
    header = text.partition("\n\n")[0]
    # What is copied is not broken: the paths of the header, and a command.
    loose = {*header.splitlines(), *(line for line in lines if NAMED.match(line) or PASTED.match(line))}
    assert [line for line in lines if len(line) > width and line not in loose] == []
    assert not COLOUR.search(text)


@pytest.mark.observed
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["pass", "unknown", "fail", "lint"])
def test_the_last_line_says_it_all(
    situations: Mapping[str, tuple[list[str | Path], int]], name: str, width: int
) -> None:
    arguments, code = situations[name]
    done = Command(*arguments, env={"COLUMNS": str(width)})
    assert done.code == code, done.err
    holds_the_look(done.out, width)
    if arguments[0] == "check":
        header, answers = (part.splitlines() for part in done.out.split("\n\n")[:2])
        labels = [line.split()[0] for line in header]
        assert [n for n in labels if n != "layers"] == ["model", "transformers", "environment", "torch", "gpu"]
        assert ANSWER.match(answers[0]) or "needs no fused kernel" in answers[0]
    last = LAST.fullmatch(" ".join(done.out.rpartition("\n\n")[2].split()))
    assert last is not None, done.out
    assert int(last["code"]) == code
    assert last["word"] == {0: "PASS", 1: "FAIL", 3: "UNKNOWN"}[code]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    ("sources", "code"),
    [
        ([RESULTS / "verify-h200-trace.json.gz"], 0),
        ([RESULTS / "trace-naive-h200.json.gz"], 0),
        ([RESULTS / "trace-packed-h200.json.gz"], 0),
        ([RUN], 3),
        ([RESULTS / "trace-packed-h200.json.gz", RUN], 0),
    ],
    ids=["verify", "naive", "packed", "run", "both"],
)
def test_a_profile_begins_with_what_bounds_it_and_ends_with_its_code(
    sources: list[Path], code: int, width: int
) -> None:
    """The verdict is the first thing that is read; what was read, and with what, stands under it."""
    done = Command("profile", *sources, env={"COLUMNS": str(width)})
    assert done.code == code, done.err
    holds_the_look(done.out, width)
    first = done.out.partition("\n\n")[0]
    assert re.match(r"(\d+% utilization and yet b|B)ound by |Not known ", first)
    for source in sources:
        assert re.search(rf"(?m)^(?:trace|folder) +{re.escape(str(source))}$", done.out)
    assert ("gpu             NVIDIA H200, CUDA driver 13.0" in done.out) == (sources != [RUN])
    last = LAST.fullmatch(" ".join(done.out.rpartition("\n\n")[2].split()))
    assert last is not None, done.out
    assert (last["word"], int(last["code"])) == ({0: "PASS", 3: "UNKNOWN"}[code], code)
    assert re.fullmatch(r"(bound by .+|not known what bounds it); [\d,.]+ ms a step; \d fix(es)?", last["said"])


def test_prose_is_broken_between_words_and_a_command_nowhere() -> None:
    command = "pip install --force-reinstall --no-deps 'fla-core==0.6.0' 'flash-linear-attention==0.6.0'"
    prose = "remove use_mamba_kernels from the configuration; uninstall mamba-ssm where its kernels must not run"
    both = f"leave use_kernels off while training, or {command}"
    python = "DataLoader(..., num_workers=4, prefetch_factor=4, pin_memory=True, persistent_workers=True)"
    commented = "nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE   # there; then its data and sample lengths"
    asked = f"kernelguard profile {'a' * 70} --json > a.json; kernelguard report a.json b.json"
    for whole in (command, python, commented, asked):
        assert filled(whole, 66) == [whole]
    assert filled(both, 66) == ["leave use_kernels off while training,", f"or {command}"]
    told = printed(lambda console: print_fix(console, prose)).splitlines()
    assert told[0].startswith("         fix: remove use_mamba_kernels ")
    assert told[1].startswith("              ")
    assert all(len(line) <= 80 for line in told)
    assert " ".join(" ".join(told).split()) == f"fix: {prose}"


def test_an_error_fits_the_terminal_and_is_one_line_in_a_log(tmp_path: Path) -> None:
    arguments = ["verify", "x", "--image", "y", "--warm-cache", tmp_path]
    wide, narrow = Command(*arguments), Command(*arguments, env={"COLUMNS": "80"})
    assert (wide.code, narrow.code) == (2, 2)
    assert len(wide.err.splitlines()) == 2
    assert max(len(line) for line in narrow.err.splitlines()) <= 80
    assert narrow.err.split() == wide.err.split()
    assert [line[:7] for line in narrow.err.splitlines()] == ["error: ", " " * 7, "  fix: ", " " * 7]


def seen(arguments: Iterable[str | Path], **variables: str) -> str:
    """What a person at a terminal of 80 columns sees."""
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "CI"}}
    command = [str(Path(sys.executable).parent / "kernelguard"), *map(str, arguments)]
    environ = {**kept, "TERM": "xterm-256color", **variables}
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=subprocess.DEVNULL, env=environ) as process:
        os.close(terminal)
        text = b""
        while True:
            try:
                piece = os.read(main, 65536)
            except OSError:  # a terminal whose other end is closed
                break
            if not piece:
                break
            text += piece
        process.wait()
    os.close(main)
    return text.decode().replace("\r\n", "\n")


@pytest.mark.observed
def test_nothing_is_said_by_colour_alone(situations: Mapping[str, tuple[list[str | Path], int]]) -> None:
    arguments, _ = situations["fail"]
    plain = Command(*arguments, env={"COLUMNS": "80"}).out
    coloured = seen(arguments)
    assert COLOUR.search(coloured)
    assert COLOUR.sub("", coloured) == plain
    # Names of the terminal's own colours (39: its usual one), so that they read on dark and on light.
    shown = {int(n) for codes in COLOUR.findall(coloured) for n in re.findall(r"\d+", codes)}
    assert shown <= {0, 1, 2, 31, 32, 33, 35, 36, 39}
    assert COLOUR.sub("", seen(arguments, NO_COLOR="1")) == plain
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", seen(arguments, NO_COLOR="1"))
    assert seen(arguments, TERM="dumb") == plain


def printed(how: Callable[[Console], None]) -> str:
    """What a function prints at 80 columns."""
    text = io.StringIO()
    how(Console(file=text, width=80, highlight=False, emoji=False, markup=False))
    return text.getvalue()


@pytest.mark.parametrize("path", VERDICTS, ids=lambda p: p.stem)
def test_a_verdict_says_each_kernel_once_and_ends_with_its_code(path: Path) -> None:
    verdict = load_verdict(path)
    found = findings(verdict)
    status = worst(f.status for f in found)
    text = printed(lambda console: print_verdict(console, verdict, found, status=status, strict=False))
    holds_the_look(text, 80)
    for symbol in {probe.symbol for probe in verdict.probes}:
        assert len(re.findall(rf"(?m)^(?:pass|warn|FAIL|unknown) +{symbol}\b", text)) == 1, text
    for finding in found:
        assert " ".join(finding.reason.split()) in " ".join(text.split())
    last = LAST.fullmatch(" ".join(text.rpartition("\n\n")[2].split()))
    assert last is not None, text
    assert last["word"].lower() == status
    assert last["code"] == {Status.FAIL: "1", Status.UNKNOWN: "3"}.get(status, "0")


def test_the_last_line_counts_what_was_not_measured_because_it_is_not_bound() -> None:
    verdict = load_verdict(RESULTS / "verify-h200-fla060-triton371.json")
    paths = [Status.FAIL, Status.FAIL]
    text = printed(lambda c: print_verdict(c, verdict, (), status=Status.FAIL, strict=False, paths=paths))
    assert ", 2 fast paths (2 FAIL), 10 measured kernels" in " ".join(text.rpartition("\n\n")[2].split())


def test_the_header_of_a_verdict_names_what_it_was_measured_on() -> None:
    verdict = load_verdict(RESULTS / "verify-h200-fla060-triton371.json")
    rows = dict(verdict_header(verdict, "train:v1"))
    assert rows["image"] == "train:v1"
    assert rows["gpu"] == f"NVIDIA H200 (sm_90), driver {verdict.fingerprint.driver}"
    assert rows["torch"].endswith(f"triton {verdict.fingerprint.triton}")


def test_a_lock_has_the_header_of_a_check(tmp_path: Path) -> None:
    lock = small_lock()
    text = printed(lambda console: print_lock(console, lock, tmp_path / "kernelguard.lock"))
    holds_the_look(text, 80)
    labels = [line.split()[0] for line in text.partition("\n\n")[0].splitlines()]
    assert labels == ["lock", "model", "transformers", "torch", "gpu"]
    last = LAST.fullmatch(" ".join(text.rpartition("\n\n")[2].split()))
    assert last is not None, text
    assert (last["word"], last["code"]) == ("PASS", "0")
    for pin in lock.pins:
        if pin.role is Role.KERNEL:
            assert re.search(rf"(?m)^{pin.name} +{pin.version}$", text)


def test_an_image_says_what_it_is_and_what_comes_next() -> None:
    facts = ImageFacts(
        id="sha256:1", tags=(), content="sha256:2", labels={}, layers=(), size=1, user="", environment=()
    )
    outcome = Outcome(
        image="train:v1-candidate",
        facts=facts,
        claims=None,
        verdict=Path("v.json"),
        exit_code=0,
        text="train:v1-candidate: candidate, level import",
        fix="kernelguard verify kernelguard.lock --image train:v1-candidate -o verdict.json",
        layers=(Layer(size=2_000_000, made_by="COPY x"), Layer(size=1_000_000, made_by="RUN y")),
    )
    text = printed(lambda console: print_outcome(console, outcome))
    holds_the_look(text, 80)
    for words in ("image        train:v1-candidate", "content      sha256:2", "3.0 MB  in all", "next "):
        assert words in text
    assert text.endswith("PASS: train:v1-candidate: candidate, level import; exit 0\n")
    unchanged = dataclasses.replace(outcome, unchanged=True)
    assert printed(lambda console: print_outcome(console, unchanged)) == f"PASS: {outcome.text}; exit 0\n"
