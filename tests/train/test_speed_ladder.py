"""The ladder's own arithmetic and tables, and (thorough) the whole of it in toy size through the real commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernelguard_train.profiling import busy, part_of, self_times, summary

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def report() -> Any:
    import runpy

    return runpy.run_path(str(BENCHMARKS / "ladder_report.py"))


def row(name: str, rate: float, **more: Any) -> dict[str, Any]:
    return {"rung": name, "adds": "x", "kind": "bf16", "model": "27b", "tokens_per_s": rate, "mfu": rate / 5e4,
            "step_ms": 100.0, "computed_tokens_per_s": rate, **more}  # fmt: skip


def test_ratios_are_to_the_first_rung_of_the_same_model(report: Any) -> None:
    rows = [
        row("naive", 100),
        row("final", 900),
        row("dense: naive", 50, model="dense"),
        row("dense", 60, model="dense"),
    ]
    result = {"rungs": rows}
    report["rate"](result)
    assert [r["ratio"] for r in rows] == [1, 9, 1, 1.2]


def test_a_rung_that_failed_is_a_row_that_says_so(report: Any) -> None:
    broken = {"rung": "b", "adds": "x", "kind": "bf16", "model": "27b", "problem": "exit code 1: no memory"}
    text = report["table"]([row("a", 10), broken])
    assert "| b | x | exit code 1: no memory |" in text
    assert report["plot"]([row("a", 10), broken]).count("<rect") == 2, "the background and one bar"


def test_later_calls_add_what_the_first_lacks_and_replace_nothing_it_has(report: Any) -> None:
    here = {"versions": {"gpu": "H200"}}
    broken = {"rung": "c", "kind": "bf16", "model": "27b", "adds": "x", "problem": "not done"}
    first = {**here, "command": "one", "rungs": [row("naive", 10), broken], "left_out": ["b"]}
    second = {"versions": {"gpu": "H200", "trl": "1"}, "command": "two"}
    second["rungs"] = [row("naive", 99), row("b", 20), row("c", 30)]
    joined = report["join"]([first, second], ["naive", "b", "c"])
    assert [(r["rung"], r["tokens_per_s"], r["ratio"], r["call"]) for r in joined["rungs"]] == [
        ("naive", 10, 1, 1), ("b", 20, 2, 2), ("c", 30, 3, 2),
    ]  # fmt: skip
    assert [call["command"] for call in joined["calls"]] == ["one", "two"]
    assert joined["versions"] == {"gpu": "H200", "trl": "1"}
    with pytest.raises(ValueError, match="call 2 ran on A100"):
        report["join"]([first, {**second, "versions": {"gpu": "A100"}}], ["naive", "b", "c"])


def test_a_problem_is_named_by_its_exception(report: Any) -> None:
    log = "exit code 1:  forward\n[rank0]:   scan = f(\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried it\n"
    assert report["headline"](log) == "torch.OutOfMemoryError: CUDA out of memory. Tried it"
    assert report["headline"]("not done after 9 s") == "not done after 9 s"


def test_the_rooflines_parts_and_idle_time_make_up_the_step(report: Any) -> None:
    parts = {"products": {"ms": 60.0, "calls": 3}, "optimizer": {"ms": 8.0, "calls": 1}}
    final = row("final", 8192.0, profile={"tokens": 8192, "parts": parts}, step_ms=4000.0)
    result = {"rungs": [row("naive", 1.0), final], "ceilings": {"tflops": 800.0, "tb_s": 4.0}}
    entries = {entry["part"]: entry for entry in report["roofline"](result)}
    assert entries["step"]["ms"] == pytest.approx(1000)
    assert entries["optimizer"]["ms"] == pytest.approx(2), "one update for four times as many tokens"
    assert entries["idle (step less the recorded step's kernels)"]["ms"] == pytest.approx(1000 - 62)
    assert entries["products"]["bound_ms"] == pytest.approx(6 * 4.315e9 * 8192 / 800e12 * 1000)


def test_extrapolation_pays_for_layers_and_output_layer_apart(report: Any) -> None:
    final = row("final", 8192.0, profile={"tokens": 8192, "parts": {}})
    found = report["extrapolation"]({"rungs": [final]})
    head = 248_320 * 5120 / 4.315e9
    assert found["compute_s"] == pytest.approx(8 * (1 - head) + head)
    assert found["measured"] is False
    assert found["hidden"]["step_s"] < found["in the open"]["step_s"]


def test_where_it_was_made_is_not_published(report: Any, tmp_path: Path) -> None:
    result = {"command": "python x --site /some/where", "versions": {}, "rungs": []}
    report["write"](result, tmp_path, "n", {"/some/where": "SITE", "": "nothing"})
    assert (tmp_path / "n.json").read_text().count("--site SITE") == 1
    assert "/some" not in (tmp_path / "n.json").read_text() + (tmp_path / "n.md").read_text()


def test_operators_own_time_leaves_out_what_they_called() -> None:
    events = [
        {"tid": 1, "ts": 0, "dur": 100, "name": "outer"},
        {"tid": 1, "ts": 10, "dur": 30, "name": "inner"},
        {"tid": 1, "ts": 15, "dur": 10, "name": "innermost"},
        {"tid": 1, "ts": 50, "dur": 20, "name": "inner"},
        {"tid": 2, "ts": 20, "dur": 5, "name": "inner"},
    ]
    found = {name: sorted(times) for name, times in self_times(events).items()}
    assert found == {"outer": [0.05], "inner": [0.005, 0.02, 0.02], "innermost": [0.01]}


def test_kernels_that_run_together_are_counted_once() -> None:
    assert busy([(0, 2), (1, 3), (5, 6), (5.2, 5.5)]) == 4
    trace = [
        {"ph": "X", "cat": "kernel", "name": "nvjet_sm90", "ts": 0, "dur": 2000, "tid": 7},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 1000, "dur": 2000, "tid": 8},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaStreamSynchronize", "ts": 0, "dur": 3000, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 4000, "dur": 500, "tid": 1},
        {"ph": "i", "name": "mark", "ts": 0},
    ]
    found = summary(trace)
    assert (found["gpu_ms"], found["gpu_busy_ms"], found["gpu_ops"]) == (4, 3, 2)
    assert (found["cpu_queue_ms"], found["cpu_ops"], found["host_waits"]) == (0.5, 1, 1), "waiting is not queueing"
    assert set(found["parts"]) == {"products", "copies"}


@pytest.mark.parametrize(
    ("kernel", "part"),
    [
        ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_NNT", "products"),
        ("chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64", "delta rule"),
        ("tilelang_group_reduce_vector_kernel_kernel", "delta rule"),
        ("_convolve_back", "convolution"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("_cross_entropy", "cross entropy"),
        ("_rms_norm_backward_kernel", "norms"),
        ("triton_poi_fused__to_copy_mul_sigmoid_0", "activations"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata>", "optimizer"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
    ],
)
def test_kernels_are_told_apart_by_name(kernel: str, part: str) -> None:
    assert part_of(kernel) == part


@pytest.mark.thorough
def test_the_ladder_runs_in_toy_size(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "ladder.py"), "--out", str(tmp_path), "--tiny", "--packs", "2"]
    command += ["--only", "naive,packing,final"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "ladder.json").read_text())
    assert [r["rung"] for r in result["rungs"]] == ["naive", "packing", "final"]
    assert all(r["tokens_per_s"] > 0 for r in result["rungs"])
    packing, final = result["rungs"][1:]
    assert packing["losses"][0] == pytest.approx(final["losses"][0], rel=0.02), "other code, the same loss"
    assert final["profile"]["cpu_ops"] > 1000
    assert "isolation: no gradient crosses" in "\n".join(final["notes"])


RESULTS = BENCHMARKS / "results"


def test_the_documented_convolution_is_the_measured_one() -> None:
    from kernelguard_train import kernels

    found = json.loads((RESULTS / "convolution-h200.json").read_text())
    assert found["old"]["right"]
    assert found["new"]["right"]
    assert found["new"]["deterministic"]
    assert found["chosen"] == [kernels.ROWS, kernels.COLUMNS, kernels.UNROLL, kernels.WARPS]
    chosen = next(row for row in found["grid"] if row["sizes"] == found["chosen"])
    assert chosen["backward_ms"] < found["old"]["backward_ms"] / 4
    page = (BENCHMARKS.parent / "docs/training/speed.md").read_text()
    assert f"{chosen['backward_ms']:.2f} ms instead of {found['old']['backward_ms']:.2f}" in page


def test_the_readmes_table_is_the_measured_one() -> None:
    found = json.loads((RESULTS / "ladder-h200.json").read_text())
    page = (BENCHMARKS.parent / "README.md").read_text()
    shown = {row["rung"]: row for row in found["rungs"] if row["model"] == "27b"}
    lines = {line.split(" | ")[0].removeprefix("| "): line for line in page.splitlines() if line.startswith("| ")}
    assert shown.keys() <= lines.keys()
    for name, row in shown.items():
        mfu = f"{100 * row['mfu']:.1f} %"
        assert f"| {row['tokens_per_s']:,.0f} | {row['ratio']:.2f} | {mfu} | {row['peak_gib']:.0f} | " in lines[name]
    final = shown["final"]
    assert final["mfu"] > 0.6
    assert final["dtype"] == "bf16 products, float32 masters"
    assert final["recompiles_after_step_1"] == final["tunings_after_step_1"] == 0
    assert any("no gradient crosses a sample boundary" in note for note in final["notes"])
    assert final["losses"] == pytest.approx(shown["fused kernels"]["losses"][:5], rel=0.005), "the same model learns"
    speed = (BENCHMARKS.parent / "docs/training/speed.md").read_text()
    for entry in found["roofline"]:
        if entry["part"] in {"products", "delta rule", "attention", "copies", "optimizer", "convolution"}:
            assert f"| {entry['part']} | {entry['ms']:.1f} | {entry['bound_ms']:.1f} |" in speed


def test_the_documented_starts_are_the_measured_ones() -> None:
    found = json.loads((RESULTS / "cold-start-h200.json").read_text())
    starts = {(row["session"], row["way"]): row for row in found["starts"]}
    page = (BENCHMARKS.parent / "docs/training/speed.md").read_text()
    for way in (
        (4, "verified"),
        (4, "image"),
        (4, "again"),
        (4, "kernels"),
        (3, "verified"),
        (2, "image, no bytecode"),
    ):
        row = starts[way]
        assert row["tunings"] == row["tunings_after_step_1"] == row["recompiles_after_step_1"] == 0
        assert f"| {row['start_to_first_step_s']:.1f} | {row['imports_s']:.1f} |" in page
    assert starts[1, "empty"]["steps"] == 0
    image = starts[4, "image"]
    assert image["start_to_first_step_s"] < 20.0, "the aim"
    assert round(image["start_to_first_step_s"]) == round(starts[4, "verified"]["start_to_first_step_s"]) == 12
    assert round(image["imports_s"]) == round(starts[4, "verified"]["imports_s"]) == 8
    readme = (BENCHMARKS.parent / "README.md").read_text()
    assert "it took 12 s with the\nfolder that `verify --warm-cache` leaves, 8 of them imports" in readme
    saved = starts[4, "kernels"]["start_to_first_step_s"] - starts[4, "verified"]["start_to_first_step_s"]
    assert f"what torch.compile made saves {saved:.1f} s" in page


def test_the_documented_other_models_are_the_measured_ones() -> None:
    rungs = {
        row["rung"]: row
        for name in ("ladder-h200.json", "other-models-h200.json")
        for row in json.loads((RESULTS / name).read_text())["rungs"]
    }
    page = (BENCHMARKS.parent / "docs/training/speed.md").read_text()
    for model in ("dense", "mamba", "moe"):
        naive, final = rungs[f"{model}: naive"], rungs[f"{model}: final"]
        cells = [f"{row['tokens_per_s']:,.0f} | {100 * row['mfu']:.1f} %" for row in (naive, final)]
        times = final["tokens_per_s"] / naive["tokens_per_s"]
        assert f"| {cells[0]} | {cells[1]} | {times:.3g} |" in page, model


def test_what_is_said_of_two_gpus_was_measured() -> None:
    found = json.loads((RESULTS / "two-gpus-h200.json").read_text())
    page = (BENCHMARKS.parent / "docs/training/speed.md").read_text()
    for row in found["scaling"]["variants"]:
        cells = (
            f"{row['tokens_per_s']:,.0f}",
            f"{100 * row['mfu']:.1f} %",
            f"{row['peak_gib']:.0f}",
            f"{row['to_one']:.3f}",
        )
        assert f"| {' | '.join(cells)} |" in page, row["variant"]
    launched = found["launch"]
    assert launched["train"]["code"] == 0
    preflight = launched["train"]["outcome"]
    guarded = (BENCHMARKS.parent / "docs/launch.md").read_text()
    assert f"after {preflight['seconds']:.1f} s, where 45 are the target" in guarded
    assert f"with 78 after {launched['changed']['outcome']['seconds']:.1f} s" in guarded
    assert preflight["collectives"]["backend"] == "nccl"
    launches = [launched["train"], found["recover"]["killed"], found["recover"]["resumed-2"]]
    rates = sorted(row["outcome"]["collectives"]["bus_gb_per_s"]["slowest"] for row in launches)
    assert f"{rates[0]:.0f} to {rates[-1]:.0f} GB/s" in guarded
    assert f"{rates[0]:.0f} to {rates[-1]:.0f} GB/s" in page
    took = sorted(row["outcome"]["timings"]["collectives"] for row in launches)
    assert f"{took[0]:.1f} to {took[-1]:.1f}, and" in guarded
    assert launched["kernels_of_step_1"]["causal_conv1d_fn"] == ["_convolve", "_convolve_back"]
    assert (
        f"{launched['summary']['tokens_per_s']:,.0f} tokens/s per GPU, {100 * launched['summary']['mfu']:.1f} % MFU"
        in page
    )
    changed = launched["changed"]
    assert changed["code"] == 78
    assert {row["field"]: row["values"] for row in changed["named"]}["version of fla-core"] == {
        "0.5.9": [1],
        "0.6.0": [0],
    }
    recover = found["recover"]
    assert recover["killed"]["code"] == 137
    assert recover["resumed-2"]["code"] == recover["resumed-1"]["code"] == 0
    assert recover["resumed"]["to_killed"]["difference"] == 0.0
    assert recover["resumed"]["passed"]
    assert recover["resumed"]["can_show_a_fault"]
    assert f"by {100 * recover['resumed']['change_since_the_checkpoint']:.1f} %, two ranks" in page
    across = recover["resumed"]["one_to_several"]["difference"]
    assert f"one rank within\n{across:.1e}".replace("e-0", "e-") in page
    equal = found["equal"]
    assert equal["float32"]["passed"]
    assert equal["bfloat16"]["passed"]
    assert equal["bfloat16"]["gradients"] == 56
    assert f"within {equal['float32']['worst'][0]['difference']:.1e}".replace("e-0", "e-") in page
    worst = equal["bfloat16"]["worst"][0]
    assert f"{100 * worst['difference']:.2f} % where {100 * worst['tolerance']:.2f} % are allowed" in page
    over = [row["name"] for row in equal["before"]["bfloat16"]["worst"] if row["difference"] > row["tolerance"]]
    assert over == ["lm.model.embed_tokens.weight"]


def test_every_way_of_starting_runs_in_toy_size(tmp_path: Path, toy: Path) -> None:
    cache = tmp_path / "cache"
    (cache / "kernel").mkdir(parents=True)
    (cache / "kernel" / "x.json").write_text("{}")
    (cache / "torch-compile-a.bin").write_bytes(b"of another torch")
    command = [sys.executable, str(BENCHMARKS / "cold_start.py"), "--json", str(tmp_path / "out.json")]
    small = [f"model.path={toy}", "model.layers=4", "batch.tokens=256", "train.device=cpu", "train.steps=2"]
    small += ["model.compute_dtype=float32", "data.synthetic_median=40", "data.synthetic_samples=200"]
    done = subprocess.run(
        [*command, "--cache", str(cache), "--ways", "empty,kernels,image", *small],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    starts = json.loads((tmp_path / "out.json").read_text())["starts"]
    assert [row["way"] for row in starts] == ["empty", "kernels", "image"]
    unread = [any("torch-compile-a.bin" in text for _, text in row["told"]) for row in starts]
    assert unread == [False, False, True], "and one that cannot be read ends nothing"
    assert all(row["start_to_first_step_s"] > row["imports_s"] > 0 and row["steps"] == 2 for row in starts)
    assert {path.name for path in cache.rglob("*")} == {"kernel", "x.json", "torch-compile-a.bin"}, (
        "nothing is written to what verify left"
    )
    refused = subprocess.run([*command, "--ways", "lukewarm"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "lukewarm is none of empty, kernels, verified, image, again" in refused.stderr


@pytest.mark.thorough
def test_two_rank_variants_run_in_toy_size(tmp_path: Path, toy: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "two_gpus" / "scaling.py"), "--json", str(tmp_path / "out.json")]
    small = [f"model.path={toy}", "model.layers=4", "batch.tokens=256", "train.device=cpu"]
    small += ["model.compute_dtype=float32", "data.synthetic_median=40", "data.synthetic_samples=400"]
    done = subprocess.run(
        [*command, "--only", "base,one,two-layers-per-unit", *small], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out.json").read_text())["variants"]}
    assert rows["base"]["gpus"] == 2
    assert rows["base"]["losses"] == pytest.approx(rows["two-layers-per-unit"]["losses"], rel=1e-5)
    assert rows["base"]["to_base"] == rows["one"]["to_one"] == 1
    assert (tmp_path / "out-profile.trace.json.gz").exists()


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    import runpy

    path = tmp_path / "toy" / "config.json"
    path.parent.mkdir()
    sys.path.insert(0, str(BENCHMARKS))
    try:
        path.write_text(json.dumps(runpy.run_path(str(BENCHMARKS / "ladder.py"))["TOY"]))
    finally:
        sys.path.remove(str(BENCHMARKS))
    return path
