"""Does a page's headline say the worst of all that stands on it, and does a comparison tell every change?"""

from __future__ import annotations

import copy
import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command import ROOT
from kernelguard.errors import InputError
from kernelguard.report.html.answers import verdict_answer, verdict_findings
from kernelguard.report.html.gather import gather
from kernelguard.report.html.profile_page import render_profile
from kernelguard.report.html.report_page import render_report
from kernelguard.report.html.run_stack import run_layers
from kernelguard.report.profile import to_document
from kernelguard.trace.profile import profile
from kernelguard.trace.runs import read_run
from kernelguard.verify.files import from_document

RESULTS = ROOT / "benchmarks/results"
RUN = ROOT / "tests/data/runs/demo-train"
Edit = Callable[[Any], None]


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def passing_check() -> Any:
    """The H200's check, asked no more than it reached."""
    check = read("check-h200.json")
    check["findings"] = [row for row in check["findings"] if row["code"] != "not-verified"]
    return check | {"status": "pass", "level": "import", "exit_code": 0}


def leaking(document: Any) -> None:
    row = next(row for row in document["isolation"] if not row["left_out"])
    row |= {"isolated": False, "leak_gradient": 2.5}


def write(folder: Path, **documents: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def page(*sources: Path) -> str:
    return html.unescape(render_report([gather(source) for source in sources]))


def headline(*sources: Path) -> str:
    return re.findall(r"<h1>(.*?)</h1>", page(*sources))[0]


def answered(document: Any) -> str:
    found = verdict_findings(document, from_document(document, source="the verdict"))
    return verdict_answer(document, found).headline


# --- the headline is the worst answer -----------------------------------------------------------------------------


def test_a_measured_leak_is_the_headline_over_a_check_that_passes(tmp_path: Path) -> None:
    verdict = read("verify-h200-isolation.json")
    folder = write(tmp_path / "run", check=passing_check(), verdict=verdict)
    assert not headline(folder).startswith("No")
    leaking(verdict)
    write(folder, verdict=verdict)
    assert headline(folder) == "No: packed samples see each other"
    assert "Yes: the model is bound to its fused kernels" in page(folder), "the other answer is told below"


def test_a_kernel_that_raised_is_the_headline_over_a_check_that_cannot_tell(tmp_path: Path) -> None:
    raised = read("verify-h200-fla060-stock-triton.json")
    folder = write(tmp_path / "run", check=read("check-h200.json"), verdict=raised)
    assert headline(folder) == "No: chunk_gated_delta_rule raises an error"


def test_a_check_that_fails_is_the_headline_over_a_verdict_that_passes(tmp_path: Path) -> None:
    check, verdict = read("check-h200-stock-triton.json"), read("verify-h200-27b.json")
    assert headline(write(tmp_path / "run", check=check, verdict=verdict)).startswith("No: this run would not be on")


def test_a_build_record_goes_the_same_way(tmp_path: Path) -> None:
    verdict = read("verify-h200-isolation.json")
    image = {"name": "train:verified", "content_sha256": "sha256:00ff", "lock": ""}
    record = copy.deepcopy(verdict) | {"image": image, "check": passing_check()}
    leaking(record)
    folder = write(tmp_path / "build", record=record)
    assert headline(folder / "record.json") == headline(folder) == "No: packed samples see each other"
    # A check beside the record takes nothing back of the one that was made inside the image.
    inner = verdict | {"image": image, "check": read("check-h200-stock-triton.json")}
    folder = write(tmp_path / "other", check=passing_check(), record=inner)
    assert headline(folder).startswith("No: this run would not be on its fused kernels")
    # What a build adds to a verdict is part of its answer.
    finding = {"code": "file-changed", "status": "fail", "reason": "r", "fast_path": None, "fix": "f", "evidence": []}
    record = verdict | {"image": image, "check": passing_check(), "findings": [finding]}
    assert headline(write(tmp_path / "lock", record=record)) == "No: the environment is not what the lock says"


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_of_two_verdicts_in_a_folder_the_worse_is_shown_and_the_other_named(
    tmp_path: Path, names: tuple[str, str]
) -> None:
    good, bad = read("verify-h200-isolation.json"), read("verify-h200-isolation.json")
    leaking(bad)
    folder = write(tmp_path / "run", **{names[0]: good, names[1]: bad})
    assert headline(folder) == "No: packed samples see each other"
    assert f"{names[0]}.json is another verdict, with the answer pass" in page(folder)


def test_a_slow_path_in_a_recorded_step_is_the_headline_over_a_check_that_passes(tmp_path: Path) -> None:
    slow = to_document(profile(RESULTS / "trace-naive-h200.json.gz"), None)
    folder = write(tmp_path / "run", check=passing_check(), profile=slow)
    assert headline(folder).startswith("No: causal_conv1d_fn and chunk_gated_delta_rule ran on the slow path")
    stack = page(folder).split("The model, layer by layer")[1].split("</svg>")[0]
    assert stack.count('class="layer-fail"') == 48


def test_a_launch_that_was_not_admitted_is_the_headline(tmp_path: Path) -> None:
    attestation = {"schema": 1, "admission": {"admitted": False, "reasons": ["no verdict"], "overrides": []}}
    folder = write(tmp_path / "run", check=passing_check(), **{"kernelguard-attestation": attestation})
    assert headline(folder) == "No: the launch was not admitted"


# --- what a verdict's headline says ---------------------------------------------------------------------------------


def outcome(word: str) -> Edit:
    def edit(document: Any) -> None:
        document["probes"][0] |= {"outcome": word, "numbers": "fail"}

    return edit


def at_level(level: str, word: str) -> Edit:
    def edit(document: Any) -> None:
        document["level"], document["trace"] = level, None
        for probe in document["probes"]:
            probe |= {"outcome": word, "numbers": "unknown"}

    return edit


def nothing(document: Any) -> None:
    document |= {"probes": [], "isolation": [], "trace": None}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (outcome("wrong"), "No: causal_conv1d_fn computes the wrong thing"),
        (outcome("raised"), "No: causal_conv1d_fn raises an error"),
        (outcome("crashed"), "No: causal_conv1d_fn crashes"),
        (outcome("hung"), "It cannot be told yet: causal_conv1d_fn did not end in time"),
        (outcome("out-of-memory"), "It cannot be told yet: causal_conv1d_fn ran out of memory"),
        (
            at_level("interpreted", "right"),
            "The kernels ran in an interpreter; what they compute on a GPU was not measured",
        ),
        (at_level("import", "loaded"), "The kernels can be imported; what they compute was not measured"),
        (nothing, "Nothing was measured"),
    ],
)
def test_each_outcome_has_its_own_headline(edit: Edit, said: str) -> None:
    document = read("verify-h200-27b.json")
    edit(document)
    assert answered(document) == said


def test_a_kernel_that_did_not_run_in_the_step_is_no_pass() -> None:
    document = read("verify-h200-27b.json")
    document["trace"]["fast_paths"][0] |= {"forward": False, "backward": False, "fallbacks": ["aten::conv1d (6x)"]}
    assert answered(document) == f"No: {document['trace']['fast_paths'][0]['symbol']} did not run in a training step"


def test_an_error_is_told_once_and_once_with_its_fix() -> None:
    text = page(RESULTS / "verify-h200-fla060-stock-triton.json")
    assert text.count("produces incorrect results for gated chunk_bwd_dqkwg") == 2


def test_a_leak_of_logits_alone_shows_what_is_allowed_and_what_to_do() -> None:
    text = page(RESULTS / "verify-h200-mamba.json")
    row = next(line for line in text.splitlines() if "as the run sends them" in line)
    assert ">3.1e-02 (0)<" in row
    assert "nothing" not in row
    assert "does not say how much rounding alone moves it" in row
    fixes = text.split("What to do")[1].split("</ol>")[0]
    assert "packed-samples-leak" in fixes
    assert "kernelguard verify bamba/config.json -o verdict.json" in fixes


def test_the_table_of_signals_can_be_read(tmp_path: Path) -> None:
    text = page(RESULTS / "verify-h200-isolation.json")
    for words in ("with position_ids alone", "without seq_idx", "Level gpu, NVIDIA H200, torch 2.11"):
        assert words in text
    document = read("verify-h200-isolation.json")
    document["level"] = "interpreted"
    text = page(write(tmp_path / "cpu", verdict=document))
    assert "without a GPU; on one it was not measured" in text


# --- what a check's headline says -----------------------------------------------------------------------------------


def packed_without_signals() -> Any:
    check = passing_check()
    for path in check["fast_paths"]:
        path |= {"status": "fail", "codes": [*path["codes"], "signal-not-sent"]}
        finding = {"code": "signal-not-sent", "status": "fail", "reason": "not sent", "fix": "send it", "evidence": []}
        check["findings"].append(finding | {"fast_path": path["symbol"]})
    return check | {"status": "fail", "exit_code": 1}


def test_a_leak_is_no_missing_kernel_and_colours_no_layer(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", check=packed_without_signals())
    assert headline(folder) == "No: packed samples would see each other"
    stack = page(folder).split("The model, layer by layer")[1]
    assert 'class="layer-fail"' not in stack.split("</svg>")[0]
    assert "packed samples leak through it" in stack


def test_a_kernel_that_is_known_to_go_wrong_is_no_missing_one(tmp_path: Path) -> None:
    check = read("check-h200-stock-triton.json")
    said = headline(write(tmp_path / "run", check=check))
    assert said == ("No: this run would not be on its fused kernels; chunk_gated_delta_rule is known to go wrong here")


# --- two of them ----------------------------------------------------------------------------------------------------


def signals(document: Any) -> None:
    document["signals"] = ["position_ids"]


def level(document: Any) -> None:
    document["level"] = "interpreted"
    for probe in document["probes"]:
        probe["numbers"] = "unknown"


def not_whole(document: Any) -> None:
    document["probes"][0]["numbers"] = "unknown"


def bound(document: Any) -> None:
    document["fast_paths"][0]["target"] = "somewhere.else"


def traced(document: Any) -> None:
    document["trace"]["fast_paths"][0]["fallbacks"] = ["aten::conv1d (6x)"]


def problem(document: Any) -> None:
    document["problems"] = ["no step could be recorded"]


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (leaking, "leaks (gradient 2.5)"),
        (signals, "<td>signals</td>"),
        (level, "<td>level</td>"),
        (not_whole, "numbers unknown"),
        (outcome("crashed"), "crashed"),
        (bound, "somewhere.else"),
        (traced, "the slow path: aten::conv1d (6x)"),
        (problem, "finding no step could be recorded"),
    ],
)
def test_two_verdicts_tell_each_change(tmp_path: Path, edit: Edit, said: str) -> None:
    one = read("verify-h200-27b.json")
    other = copy.deepcopy(one)
    edit(other)
    folder = write(tmp_path / "two", a=one, b=other)
    text = page(folder / "a.json", folder / "b.json")
    assert "<h1>Nothing that both tell has changed" not in text
    assert said in text.split('<table class="diff">')[1].split("A: ")[0]


def test_two_equal_verdicts_say_so_and_what_both_answer() -> None:
    file = RESULTS / "verify-h200-fla060-stock-triton.json"
    text = page(file, file)
    assert "<h1>Nothing that both tell has changed</h1>" in text
    assert "The answer of both is fail." in text


def test_two_kinds_are_refused_with_both_named() -> None:
    with pytest.raises(InputError) as refused:
        page(RESULTS / "check-h200.json", RESULTS / "verify-h200-27b.json")
    for words in ("check-h200.json is a check", "verify-h200-27b.json is a verdict"):
        assert words in refused.value.message
    assert "compare two of one kind" in (refused.value.hint or "")


def test_what_only_one_of_two_holds_is_a_change(tmp_path: Path) -> None:
    one = write(tmp_path / "one", check=passing_check(), verdict=read("verify-h200-27b.json"))
    other = write(tmp_path / "other", check=passing_check())
    assert "<td>a verdict</td>" in page(one, other)


def test_two_profiles_begin_with_what_each_fast_path_ran_on(tmp_path: Path) -> None:
    slow, fast = (to_document(profile(RESULTS / f"trace-{n}-h200.json.gz"), None) for n in ("naive", "fused"))
    folder = write(tmp_path / "two", slow=slow, fast=fast)
    text = page(folder / "slow.json", folder / "fast.json")
    rows = re.findall(r'<tr><td>(.*?)</td><td class="a">(.*?)</td><td class="b">(.*?)</td>', text)
    assert rows[0] == ("causal_conv1d_fn ran on", "the slow path: aten::conv1d (6x)", "causal_conv1d")
    assert rows[1][2] == "fla"
    subjects = {row[0] for row in rows}
    for subject in (
        "matrix products, milliseconds a step",
        "GPU idle, waiting for the next launch, milliseconds a step",
        "waits for the GPU a step",
        "could save at most: Give each update more tokens",
    ):
        assert subject in subjects
    fixes = text.split("B: Bound by")[1].split("What to do")[1].split("</ol>")[0]
    assert "at most" in fixes
    assert "warn" not in fixes
    # The other way round the second is slower, and its answer is worse.
    assert headline(folder / "fast.json", folder / "slow.json").endswith("times as long as A, and its answer is fail")


def test_two_profiles_tell_tokens_and_compilations(tmp_path: Path) -> None:
    trace = RESULTS / "verify-h200-trace.json.gz"
    one = to_document(profile(trace), read_run(RUN))
    other = copy.deepcopy(one)
    other["run"] |= {"density": 0.5, "tokens_per_s": 10.0}
    other["trace"]["compilations"]["count"] += 3
    folder = write(tmp_path / "two", a=one, b=other)
    text = page(folder / "a.json", folder / "b.json")
    for words in ("useful share of computed tokens", "useful tokens a second and rank", "<td>compilations</td>"):
        assert words in text


# --- a verdict's layers ---------------------------------------------------------------------------------------------


def test_a_verdict_draws_its_models_layers_by_what_was_measured(tmp_path: Path) -> None:
    verdict = read("verify-h200-27b-grouped.json")
    layers = verdict["subject"].pop("layers")
    assert layers == [*["linear_attention"] * 3, "full_attention"] * 16
    bare = write(tmp_path / "bare", verdict=verdict)
    assert "The layers of the model are not in this verdict" in page(bare), "one of an earlier version"
    verdict["subject"]["layers"] = layers
    drawn = page(write(tmp_path / "drawn", verdict=verdict))
    label = re.findall(r'aria-label="([^"]*layers of linear_attention[^"]*)"', drawn)[0]
    assert label.startswith("48 layers of linear_attention: causal_conv1d_fn warn, chunk_gated_delta_rule pass")
    assert "16 layers of full_attention" in label
    verdict["fast_paths"][1]["bound_to"] = "torch"
    assert "chunk_gated_delta_rule fail" in page(write(tmp_path / "slow", verdict=verdict))


# --- a training run -------------------------------------------------------------------------------------------------


def run_folder(folder: Path, config: str = "", **documents: Any) -> Path:
    shutil.copytree(RUN, folder)
    if config:
        (folder / "config.toml").write_text(config)
    return write(folder, **documents)


def test_a_run_on_the_cpu_has_no_gpu_in_its_units() -> None:
    assert headline(RUN) == "1,145 useful tokens a second and rank, on the CPU"
    text = page(RUN)
    assert "<dt>ranks</dt><dd>2</dd>" in text
    assert "second and GPU" not in text
    assert "second and GPU" not in render_profile(to_document(None, read_run(RUN)))


def test_a_run_draws_the_layers_that_the_trainer_built(tmp_path: Path) -> None:
    kinds = [*["linear_attention"] * 3, "full_attention"]
    home = "modeling_qwen3_5"
    bound = {
        f"{home}.causal_conv1d_fn": "causal_conv1d.causal_conv1d_fn",
        f"{home}.torch_chunk_gated_delta_rule": "the torch function, segment by segment (reference)",
    }
    folder = run_folder(tmp_path / "run", built={"schema": 1, "layer_types": kinds, "bound": bound, "device": "cuda"})
    layers, rows, where = run_layers(gather(folder))
    assert layers == kinds
    found = {row["symbol"]: row["status"] for row in rows["linear_attention"]}
    assert found == {"causal_conv1d_fn": "pass", "chunk_gated_delta_rule": "warn"}
    assert set(rows) == {"linear_attention"}
    assert "as the trainer wrote down" in where
    assert "causal_conv1d.causal_conv1d_fn" in page(folder)
    assert not any("built.json" in text for text in gather(folder).left_out)


def test_a_run_on_a_gpu_has(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    summary = json.loads((folder / "summary.json").read_text()) | {"gpu": "NVIDIA H200"}
    write(folder, summary=summary)
    assert headline(folder) == "1,145 useful tokens a second and GPU"
    assert "<dt>gpus</dt><dd>2</dd>" in page(folder)


def test_a_folder_without_the_model_says_why_no_layer_is_drawn() -> None:
    assert "is not drawn. The folder does not say which model was trained" in page(RUN)


CONFIG = f"""
[model]
path = "{ROOT / "examples/qwen3.8-27b"}"
layers = 16
kernels = "auto"
"""


@pytest.mark.parametrize(
    ("kernels", "gpu", "css"),
    [("auto", None, "warn"), ("auto", "NVIDIA H200", "pass"), ("fused", None, "pass"), ("reference", "x", "warn")],
)
def test_a_runs_layers_are_drawn_by_what_the_trainer_bound(
    tmp_path: Path, kernels: str, gpu: str | None, css: str
) -> None:
    folder = run_folder(tmp_path / "run", CONFIG.replace("auto", kernels))
    write(folder, summary=json.loads((folder / "summary.json").read_text()) | {"gpu": gpu})
    text = page(folder)
    assert text.count(f'class="layer-{css}"') == 12
    assert text.count('class="layer-none"') == 4
    assert "nothing in the folder shows what ran" in text


def test_what_really_ran_goes_before_what_was_configured(tmp_path: Path) -> None:
    bound = {"chunk_gated_delta_rule in modeling_qwen3_5": "torch m.torch_chunk", "causal_conv1d_fn": "package c.f"}
    attestation = {"schema": 1, "bound": bound}
    folder = run_folder(tmp_path / "run", CONFIG, **{"kernelguard-attestation": attestation})
    text = page(folder)
    assert text.count('class="layer-fail"') == 12
    assert "torch m.torch_chunk, as the launch attested" in text


def test_traces_in_a_run_are_named_with_the_command_that_reads_them(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", profile={"gpu_ms": 1.0})
    shutil.copy(RESULTS / "verify-h200-trace.json.gz", folder / "profile.trace.json.gz")
    text = page(folder).split("Files that are not shown")[1]
    assert "profile.trace.json.gz: a trace" in text
    assert text.count(f"kernelguard profile {folder} -o profile.html") == 2


def test_charts_begin_with_their_title_and_name_the_unit() -> None:
    for text in (page(RUN), render_profile(to_document(None, read_run(RUN)))):
        assert text.index("Seconds of each step</figcaption>") < text.index("2.77 s</text>")
        assert "6.49 nats</text>" in text
