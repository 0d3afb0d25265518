"""`kernelguard profile` and `report` as real processes: what they print, write, and say of bad input."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from command import ROOT, Command
from kernelguard.report.html import charts
from kernelguard.report.html.charts import ErrorRow, Lane, Layer
from kernelguard.report.profile import readable
from kernelguard.trace.profile import profile

RESULTS = ROOT / "benchmarks/results"
TRACE = RESULTS / "verify-h200-trace.json.gz"
RUN = ROOT / "tests/data/runs/demo-train"
SCHEMAS = ROOT / "src/kernelguard/schemas"


def refused(command: Command, *said: str) -> None:
    """Exit 2, one error line and a fix, and nothing on stdout."""
    assert command.code == 2, command.err
    assert command.out == ""
    assert "Traceback" not in command.err
    lines = command.err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert any(line.startswith("  fix: ") for line in lines), command.err
    for words in said:
        assert words in command.err, command.err


@pytest.mark.parametrize(
    "sources", [[TRACE], [RUN], [TRACE, RUN], [TRACE, TRACE]], ids=["trace", "run", "both", "ranks"]
)
def test_the_document_has_the_form_of_its_schema(sources: list[Path]) -> None:
    done = Command("profile", *sources, "--json")
    document = json.loads(done.out)
    jsonschema.validate(document, json.loads((SCHEMAS / "profile.schema.json").read_text()))
    assert (document["trace"] is None) == (sources == [RUN])
    assert (document["run"] is None) == (RUN not in sources)
    assert (document["ranks"] is None) == (sources != [TRACE, TRACE])
    assert done.code == (0 if document["verdict"]["known"] else 3)
    if document["trace"]:
        assert sum(row["share"] for row in document["verdict"]["shares"]) == pytest.approx(1.0)


def test_the_verdict_comes_first_at_80_columns() -> None:
    done = Command("profile", TRACE, env={"COLUMNS": "80"})
    assert done.code == 0
    assert done.out.startswith("92% utilization and yet bound by host launch")
    fixes = [line for line in done.out.splitlines() if line.lstrip().startswith("fix: ")]
    # Only what is pasted may be longer: a command broken over two lines cannot be.
    assert all(len(line) <= 80 for line in done.out.splitlines() if line not in fixes)
    for words in ("CPU total", "GPU total", "top operators on the host", "top kernels on the GPU", "cudaLaunchKernel"):
        assert words in done.out


@pytest.mark.parametrize("ending", [".json", ".json.gz"])
def test_a_report_of_a_trace_and_a_profile_of_a_report_name_the_other_command(tmp_path: Path, ending: str) -> None:
    trace = tmp_path / f"my trace{ending}"
    trace.write_bytes(TRACE.read_bytes() if ending == ".json.gz" else gzip.decompress(TRACE.read_bytes()))
    page = ["-o", tmp_path / "page.html"]
    refused(Command("report", trace, *page), f"{trace} is a profiler trace", f"  fix: kernelguard profile '{trace}'\n")
    refused(Command("report", RUN, trace, *page), f"{trace} is a profiler trace")
    document = tmp_path / "p.json"
    document.write_text(Command("profile", trace, "--json").out)
    refused(Command("profile", document), "is a profile of kernelguard", f"  fix: kernelguard report {document}\n")
    for name, kind in (("check-h200.json", "check"), ("verify-h200-isolation.json", "verdict")):
        refused(Command("profile", RESULTS / name), f"is a {kind} of kernelguard", "  fix: kernelguard report ")
    damaged = tmp_path / "cut.json.gz"
    damaged.write_bytes(TRACE.read_bytes()[:20])
    refused(Command("report", damaged), "is not JSON")


def test_traces_of_one_rank_are_two_runs() -> None:
    """Both say rank 0: taken for two ranks, the second would vanish without a word."""
    naive, packed = RESULTS / "trace-naive-h200.json.gz", RESULTS / "trace-packed-h200.json.gz"
    refused(
        Command("profile", naive, packed),
        f"{naive} and {packed} are both of rank 0",
        f"fix: kernelguard profile {naive} --json > a.json; kernelguard profile {packed} --json > b.json; "
        "kernelguard report a.json b.json",
    )


def test_traces_that_name_no_rank_are_taken_for_ranks_and_it_is_said() -> None:
    other = RESULTS / "trace-flash-qla-h200.json.gz"
    done = Command("profile", TRACE, other)
    assert done.code == 0
    said = " ".join(done.out.split())
    for words in (
        "ranks 2 traces; a step takes",
        "none of the traces names its rank: they are taken for the ranks of one run, in the order given",
        "are these traces of several runs?",
    ):
        assert words in said, done.out
    notes = json.loads(Command("profile", TRACE, other, "--json").out)["trace"]["notes"]
    assert notes[0].startswith("none of the traces names its rank")
    assert "rank" not in " ".join(json.loads(Command("profile", TRACE, "--json").out)["trace"]["notes"])


def test_a_trace_of_the_host_alone_says_so_and_shows_no_gpu_of_zeros(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 0, "dur": 90, "args": {}}
    (tmp_path / "host.json").write_text(json.dumps({"traceEvents": [event]}))
    done = Command("profile", tmp_path / "host.json")
    assert done.code == 3
    assert done.out.startswith("Not known what bounds it: the trace holds no GPU activity")
    assert "aten::mm" in done.out
    for words in ("where the step goes", "GPU busy", "launches"):
        assert words not in done.out


def test_the_readme_shows_what_is_printed() -> None:
    said = (
        (ROOT / "README.md")
        .read_text()
        .split("$ kernelguard profile benchmarks/results/verify-h200-trace.json.gz\n")[1]
    )
    shown = said.split("```")[0]
    assert len(shown) > 100
    done = Command("profile", "benchmarks/results/verify-h200-trace.json.gz", cwd=ROOT, env={"COLUMNS": "80"})
    assert done.out.startswith(shown)


def test_the_page_on_other_readers_has_the_numbers_that_were_read() -> None:
    """HolisticTraceAnalysis's as they were written down, kernelguard's read again."""
    told = json.loads((RESULTS / "trace-readers.json").read_text())
    idle = profile(TRACE).idle
    ours = told["kernelguard"]
    assert (ours["idle_us"], ours["between_us"]) == pytest.approx((idle.total, idle.device), abs=0.01)
    assert ours["host_us"] == pytest.approx(idle.total - idle.device, abs=0.01)
    page = (ROOT / "docs" / "profile.md").read_text().split("## Beside other readers")[1]
    rows = [line for line in page.splitlines() if " µs" in line and line.startswith("| ")]
    shown = [[int(n.replace(",", "")) for n in re.findall(r"([\d,]+) µs", row)] for row in rows]
    theirs = told["HolisticTraceAnalysis"]
    assert shown == [[round(ours[key]), round(theirs[key])] for key in ours]
    assert f"HolisticTraceAnalysis {told['versions']['HolisticTraceAnalysis']}" in page


def test_two_profiles_show_what_changed(tmp_path: Path) -> None:
    """The naive run beside the fused one, without their traces."""
    slow = json.loads(Command("profile", TRACE, "--json").out)
    fast = json.loads(json.dumps(slow))
    fast["verdict"]["bound_by"] = "GEMM"
    fast["trace"]["step_us"] /= 4
    (tmp_path / "a.json").write_text(json.dumps(slow))
    (tmp_path / "b.json").write_text(json.dumps(fast))
    page = tmp_path / "page.html"
    assert Command("report", tmp_path / "a.json", tmp_path / "b.json", "-o", page).code == 0
    text = page.read_text()
    for words in ("<h1>B is 4.00 times as fast as A</h1>", "2 things changed", "bound by", "GEMM", "0.25 times"):
        assert words in text


def test_the_page_can_be_made_again_from_its_document(tmp_path: Path) -> None:
    """A profile's JSON is enough for `report`, so that it can be made where the trace is not."""
    document = tmp_path / "profile.json"
    document.write_text(Command("profile", TRACE, "--json").out)
    done = Command("report", document, "-o", tmp_path / "page.html")
    assert done.code == 0, done.err
    assert "utilization and yet bound by host launch" in (tmp_path / "page.html").read_text()


def test_a_page_loads_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    Command("profile", TRACE, "-o", page)
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|#)""", text)
    assert not re.findall(r"@import|url\(|fetch\(|XMLHttpRequest", text)
    assert "default-src 'none'" in text


BAD: list[tuple[str, bytes, str]] = [
    ("empty.json", b"", "it is empty"),
    ("cut.json", b'{"traceEvents": [{"ph": "X", "cat": "ker', "it was cut off"),
    ("cut.json.gz", gzip.compress(b'{"traceEvents": []}' * 99, mtime=0)[:40], "damaged gzip file, or it was cut off"),
    ("none.json", b'{"traceEvents": []}', "no operator and no kernel"),
    ("page.html", b"<html>", "is not JSON of a trace"),
    ("sqlite.nsys-rep", b"SQLite format 3\x00", "is not JSON of a trace"),
]


@pytest.mark.parametrize(("name", "content", "said"), BAD, ids=[row[0] for row in BAD])
def test_a_bad_trace_is_one_clear_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    refused(Command("profile", tmp_path / name, "-o", tmp_path / "out.html"), name, said)
    assert not (tmp_path / "out.html").exists()


def test_folders_and_files_that_are_not_there(tmp_path: Path) -> None:
    refused(Command("profile", tmp_path / "absent.json"), "absent.json")
    refused(Command("profile", tmp_path), "holds neither a trace")
    refused(Command("report", tmp_path), "holds nothing that a report can show")
    refused(Command("report", tmp_path / "absent.json"), "absent.json")
    refused(Command("report", TRACE, TRACE, TRACE), "at most two")
    (tmp_path / "steps.jsonl").write_text("{}\n[]\nnot json\n")
    refused(Command("profile", tmp_path), "no finished step")


def changed(path: Path, tmp: Path, **changes: Any) -> Path:
    document = {**json.loads(path.read_text()), **changes}
    new = tmp / path.name
    new.write_text(json.dumps(document))
    return new


def test_a_newer_schema_is_told_with_the_way_to_read_it(tmp_path: Path) -> None:
    for name in ("check-h200.json", "verify-h200-isolation.json"):
        bad = changed(RESULTS / name, tmp_path, schema=99)
        refused(Command("report", bad), "schema 99", "reads up to schema 1", "pip install --upgrade")
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"schema": 7, "kind": "profile"}))
    refused(Command("report", profile), "schema 7")


def test_a_damaged_report_names_what_is_wrong(tmp_path: Path) -> None:
    refused(Command("report", changed(RESULTS / "check-h200.json", tmp_path, status="maybe")), "'maybe'")
    refused(Command("report", changed(RESULTS / "check-h200.json", tmp_path, kind="lunch")), "kind 'lunch'")
    (tmp_path / "list.json").write_text("[1]")
    refused(Command("report", tmp_path / "list.json"), "holds a list")
    (tmp_path / "half.json").write_text('{"schema": 1, ')
    refused(Command("report", tmp_path / "half.json"), "not JSON")


@pytest.mark.parametrize("full", ["disk", "limit"])
@pytest.mark.parametrize("command", [["profile", str(TRACE)], ["report", str(RESULTS / "check-h200.json")]])
def test_no_space_to_write_leaves_the_old_page_whole(tmp_path: Path, command: list[str], full: str) -> None:
    """On a file system of 16 kB that is really full, and under a limit on the size of files."""
    folder = tmp_path / "full"
    folder.mkdir()
    page = folder / "page.html"
    before = {"disk": f"mount -t tmpfs -o size=16k none {folder}", "limit": "true"}[full]
    after = {"disk": "true", "limit": "ulimit -f 1"}[full]
    executable = Path(sys.executable).parent / "kernelguard"
    script = (
        f"set -e; {before}; printf 'the old page' > {page}; {after}; code=0; "
        f"{executable} {' '.join(command)} -o {page} >/dev/null || code=$?; ls -A {folder}; cat {page}; exit $code"
    )
    # A mount namespace of its own, in which anybody may mount, and which goes away with the process.
    done = subprocess.run(["unshare", "-rm", "bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "cannot write" in done.stderr
    assert {"disk": "No space left", "limit": "File too large"}[full] in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "page.html\nthe old page"


@pytest.mark.parametrize(
    ("command", "said"), [("profile", "is not JSON of a trace"), ("report", "is larger than any report")]
)
def test_two_gigabytes_of_nothing_are_refused_in_little_memory(tmp_path: Path, command: str, said: str) -> None:
    file = tmp_path / "huge.json"
    with file.open("wb") as out:
        out.truncate(2 * 2**30)
    code = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True); sys.exit(done.returncode)"
    )
    executable = str(Path(sys.executable).parent / "kernelguard")
    options = [command, str(file), "-o", str(tmp_path / "page.html")]
    done = subprocess.run(
        [sys.executable, "-c", code, executable, *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert int(done.stdout) < 200_000, "kB"


def test_two_runs_show_what_changed(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    rows = [json.loads(line) for line in (RUN / "steps.jsonl").read_text().splitlines()]
    halved = [{**row, "step_s": row["step_s"] * 2, "tokens_per_s": row["tokens_per_s"] / 2} for row in rows]
    (slow / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in halved))
    page = tmp_path / "page.html"
    assert Command("report", RUN, slow, "-o", page).code == 0
    text = page.read_text()
    for words in ("<h1>B takes 2.00 times as long as A</h1>", "2.00 times", "0.50 times"):
        assert words in text
    assert Command("report", RUN, RUN, "-o", page).code == 0
    assert "Nothing that both tell has changed" in page.read_text()


def test_two_checks_say_that_the_answer_changed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    Command("report", RESULTS / "check-h200.json", RESULTS / "check-h200-stock-triton.json", "-o", page)
    text = page.read_text()
    assert "<h1>4 things changed, and with them the answer</h1>" in text
    # A minus before a number would be read as one.
    assert not re.search(r"content:\s*.[\u2212+-]", text)


def test_a_folder_is_shown_with_what_it_holds_and_what_it_does_not(tmp_path: Path) -> None:
    (tmp_path / "check.json").write_bytes((RESULTS / "check-h200.json").read_bytes())
    (tmp_path / "verdict.json").write_bytes((RESULTS / "verify-h200-isolation.json").read_bytes())
    (tmp_path / "other.json").write_text("{}")
    page = tmp_path / "page.html"
    assert Command("report", tmp_path, "-o", page).code == 0
    text = page.read_text()
    for words in (
        "The model, layer by layer",
        "Do packed samples stay apart?",
        "Files that are not shown",
        "other.json",
    ):
        assert words in text


def test_the_record_of_a_build_shows_image_and_check(tmp_path: Path) -> None:
    """What `build` keeps beside an image is its verdict, with the image and the check made inside it."""
    verdict = json.loads((RESULTS / "verify-h200-isolation.json").read_text())
    check = json.loads((RESULTS / "check-h200.json").read_text())
    image = {"name": "train:verified", "content_sha256": "sha256:00ff", "lock": "sha256:11ee"}
    file = tmp_path / "verdict.json"
    file.write_text(json.dumps({**verdict, "image": image, "check": check}))
    page = tmp_path / "page.html"
    assert Command("report", file, "-o", page).code == 0
    text = page.read_text()
    for words in ("The image", "train:verified", "sha256:11ee", "The model, layer by layer", "Do packed samples stay"):
        assert words in text


def test_a_verdict_that_is_not_whole_is_no_pass(tmp_path: Path) -> None:
    """Where configurations were not measured the headline must not say that all is right."""
    document = json.loads((RESULTS / "verify-h200-fla060-triton371.json").read_text())
    headlines = []
    for numbers in ("pass", "unknown"):
        for probe in document["probes"]:
            probe["numbers"] = "pass"
        document["probes"][0]["numbers"] = numbers
        (tmp_path / "v.json").write_text(json.dumps(document))
        Command("report", tmp_path / "v.json", "-o", tmp_path / "page.html")
        headlines += re.findall(r"<h1>(.*?)</h1>", (tmp_path / "page.html").read_text())
    assert headlines == [
        "The kernels compute the right thing, with something to know",
        "Right in what was measured, and not everything was",
    ]


def test_a_wrong_kernel_is_the_headline(tmp_path: Path) -> None:
    document = json.loads((RESULTS / "verify-h200-fla060-triton371.json").read_text())
    document["probes"][1]["outcome"] = "wrong"
    file = tmp_path / "v.json"
    file.write_text(json.dumps(document))
    Command("report", file, "-o", tmp_path / "p.html")
    assert (
        f"<h1>No: {document['probes'][1]['symbol']} computes the wrong thing</h1>" in (tmp_path / "p.html").read_text()
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("void at::native::reduce_kernel<4, at::native::ReduceOp<float> >(Op)", "reduce_kernel<4, ReduceOp<float> >"),
        ("chunk_fwd_kernel_o", "chunk_fwd_kernel_o"),
        ("void (anonymous namespace)::softmax_warp<float, 7>(float*)", "softmax_warp<float, 7>"),
    ],
)  # fmt: skip
def test_kernel_names_lose_what_all_share(name: str, said: str) -> None:
    assert readable(name) == said


def test_a_timeline_is_filled_as_far_as_its_slices() -> None:
    lane = Lane(title="GPU", layers=(("gemm", (0.25, 0.0)), ("memory", (0.5, 0.0))))
    first, second = re.findall(r'd="M[\d.]+ ([\d.]+)H', charts.timeline([lane], 1000, "l"))
    # A lane is 54 high and begins at 8; the second colour stands on the first.
    assert float(first) == 8 + 54 * 0.75
    assert float(second) == pytest.approx(8 + 54 * 0.25)


def test_an_error_beyond_its_limit_lies_right_of_the_bar() -> None:
    row = ErrorRow(label="gradient q", error=0.5, plain=0.01, allowed=0.05, right=False)
    svg = charts.errors([row], "x")
    bar = re.search(r'<rect x="250" y="[^"]+" width="([\d.]+)"', svg)
    square = re.search(r'<rect x="([\d.]+)" y="[^"]+" width="10"', svg)
    assert bar is not None
    assert square is not None
    assert float(square[1]) > 250 + float(bar[1])
    assert "1000%" in svg
    assert "<circle" not in svg


def test_a_stack_has_every_layer_once() -> None:
    layers = [Layer(kind="a", css="pass"), Layer(kind="b", css="fail")] * 32
    svg = charts.stack(layers, "x")
    assert svg.count('class="layer-pass"') == svg.count('class="layer-fail"') == 32


def test_texts_in_drawings_are_escaped() -> None:
    row = ErrorRow(label="<b>", error=1.0, plain=None, allowed=None, right=True)
    assert "<b>" not in charts.errors([row], '"<i>')
    assert "<i>" not in charts.stack([Layer(kind="<i>", css="pass")], "<i>")
