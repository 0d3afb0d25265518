"""What a trace says: the tables agree with torch's own, gaps are booked to what the GPU waited for, causes add up."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import ELEMENTWISE, GEMM, NCCL, Timeline

import observed
from command import ROOT
from kernelguard.errors import InputError
from kernelguard.trace.bound import Cause
from kernelguard.trace.intervals import Bins, Cover, gaps, union
from kernelguard.trace.parts import Parts, peak_of
from kernelguard.trace.profile import Profile, profile
from kernelguard.trace.ranks import judge_ranks
from kernelguard.trace.runs import RunFacts, read_run
from kernelguard.trace.versions import versions
from kernelguard.trace.work import work

RUN = ROOT / "tests/data/runs/demo-train"
RESULTS = ROOT / "benchmarks/results"
H200 = RESULTS / "verify-h200-trace.json.gz"


def recorded(kind: str, folder: Path) -> tuple[Profile, list[dict[str, Any]]]:
    """Real steps by the observed torch, and its own table of them."""
    env = observed.environment(folder / "env", None, {})
    script = Path(__file__).parent / "recorded_checks.py"
    subprocess.run([str(env.python), str(script), kind, str(folder)], check=True, capture_output=True)
    return profile(folder / "trace.json"), json.loads((folder / "averages.json").read_text())


@pytest.mark.observed
@pytest.mark.parametrize("kind", ["plain", pytest.param("compile", marks=pytest.mark.thorough)])
def test_the_tables_agree_with_key_averages(kind: str, tmp_path: Path) -> None:
    """The same names, calls, own and total time; the trace rounds each event to a thousandth of a microsecond."""
    found, table = recorded(kind, tmp_path)
    ours = {operator.name: operator for operator in found.operators}
    assert ours.keys() == {row["key"] for row in table}
    for row in table:
        operator = ours[row["key"]]
        rounding = 0.01 * operator.calls + 0.01
        assert operator.calls == row["count"], row
        assert operator.self_host == pytest.approx(row["self_cpu_us"], abs=rounding), row
        assert operator.total_host == pytest.approx(row["cpu_us"], abs=rounding), row
    assert found.self_host == pytest.approx(sum(row["self_cpu_us"] for row in table), rel=1e-6)
    assert len(found.steps) == 3
    assert (found.compilations > 0) == (kind == "compile")


def busy_step(line: Timeline, name: str, *, kernels: int = 10, length: float = 1000.0) -> None:
    """One step in which the GPU works without a pause: everything is launched ahead."""
    line.step(1, 0, kernels * length + 100)
    line.op("aten::all_of_it", 0, 90)
    for number in range(kernels):
        line.kernel(name, 100 + number * length, length, launched=5 + number)


def waiting_step(line: Timeline, *, inside: str = "aten::small", category: str = "cpu_op") -> None:
    """One step in which each short kernel is launched after the one before it has long ended."""
    line.step(1, 0, 10_000)
    for number in range(100):
        start = number * 100.0
        line.add(category, inside, start, 95)
        line.kernel(ELEMENTWISE, start + 90, 8, launched=start + 85)


@pytest.mark.parametrize(
    ("kernel", "cause"), [(GEMM, Cause.GEMM), (ELEMENTWISE, Cause.MEMORY), (NCCL, Cause.COMMUNICATION)]
)
def test_a_busy_gpu_is_bound_by_what_it_runs(kernel: str, cause: Cause, tmp_path: Path) -> None:
    line = Timeline()
    busy_step(line, kernel)
    found = line.understood(tmp_path)
    assert found.bound.cause is cause
    assert dict(found.bound.shares)[cause] == pytest.approx(10_000 / 10_100)
    assert not found.bound.paradox


def test_kernels_of_no_known_kind_are_not_guessed(tmp_path: Path) -> None:
    line = Timeline()
    busy_step(line, "never_heard_of_it")
    bound = line.understood(tmp_path).bound
    assert bound.cause is Cause.UNKNOWN
    assert "Not known" in bound.sentence


def test_utilization_is_no_use(tmp_path: Path) -> None:
    """A counter finds a kernel in every millisecond, and the GPU stands still nine tenths of it."""
    line = Timeline()
    waiting_step(line)
    found = line.understood(tmp_path)
    assert found.bound.cause is Cause.LAUNCH
    assert found.bound.paradox
    assert found.coarse == 1.0
    assert found.busy == pytest.approx(800)
    assert found.idle.launch == pytest.approx(9200)
    assert found.bound.sentence.startswith("100% utilization and yet bound by host launch")
    # Short kernels are no work of their own: all of the step is launching.
    assert dict(found.bound.shares)[Cause.LAUNCH] == pytest.approx(1.0)
    assert found.short == found.launches == 100


def test_gaps_belong_to_reading_data_where_the_script_says_so(tmp_path: Path) -> None:
    line = Timeline()
    waiting_step(line, inside="enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", category="user_annotation")
    found = line.understood(tmp_path)
    assert found.bound.cause is Cause.DATA
    # Of each 100 µs the next launch is called at 85; the 5 until its kernel starts are launching.
    assert found.idle.data == pytest.approx(100 * 85)
    assert found.bound.fixes[0].title == "Read data ahead"


def test_a_silent_host_is_the_scripts_own_time(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 20_000)
    line.op("aten::mm", 12_000, 100)
    line.kernel(GEMM, 12_100, 7_900, launched=12_050)
    found = line.understood(tmp_path)
    assert found.idle.script == pytest.approx(12_000)
    assert found.bound.cause is Cause.SCRIPT
    assert "record_function" in found.bound.fixes[0].how


def test_gaps_between_kernels_that_were_launched_are_the_gpus(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 1000)
    line.op("aten::x", 0, 50)
    line.kernel(GEMM, 50, 450, launched=10)
    line.kernel(GEMM, 510, 490, launched=20)
    found = line.understood(tmp_path)
    assert found.idle.device == pytest.approx(10)
    assert found.idle.launch == pytest.approx(50)


def test_waits_are_named_after_who_asked_for_them(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 3000)
    line.op("aten::mm", 0, 50)
    line.kernel(GEMM, 50, 950, launched=10)
    line.op("aten::item", 60, 960)
    line.op("aten::_local_scalar_dense", 61, 958)
    line.wait(62, 940)
    line.op("aten::mm", 1500, 50)
    line.kernel(GEMM, 1600, 1400, launched=1510)
    found = line.understood(tmp_path)
    (wait,) = found.waits
    assert (wait.operator, wait.call, wait.count, wait.microseconds) == ("aten::item", "cudaStreamSynchronize", 1, 940)
    # The queue was empty after it: the whole gap until the next kernel starts is due to that wait.
    assert found.idle.after_wait == pytest.approx(600)
    fix = next(fix for fix in found.bound.fixes if fix.title == "Do not wait for the GPU in every step")
    assert fix.gain == pytest.approx(600 / 3000)
    assert "aten::item" in fix.why


def test_communication_that_is_hidden_costs_nothing(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 10_000)
    line.op("aten::x", 0, 50)
    line.kernel(GEMM, 0, 6000, launched=0)
    line.kernel(NCCL, 1000, 7000, launched=1, stream=20)
    found = line.understood(tmp_path)
    assert found.communication == pytest.approx(7000)
    assert found.exposed_communication == pytest.approx(2000)
    assert found.busy == pytest.approx(8000)


def test_compiling_inside_a_step_is_named(tmp_path: Path) -> None:
    line = Timeline()
    waiting_step(line, inside="_compile.compile_inner (dynamo_timed)")
    found = line.understood(tmp_path)
    assert found.compilations > 50
    assert found.bound.fixes[0].title == "Stop compiling inside steps"


def test_the_slow_path_is_the_first_fix(tmp_path: Path) -> None:
    line = Timeline()
    waiting_step(line, inside="aten::linalg_solve_triangular")
    found = line.understood(tmp_path)
    (path,) = [i for i in found.implementations if "chunk_gated_delta_rule" in i.symbols]
    assert (path.package, path.fallbacks) == ("", ("aten::linalg_solve_triangular (100x)",))
    assert found.bound.fixes[0].title == "Get chunk_gated_delta_rule off the slow path"
    assert found.bound.fixes[0].how.startswith("kernelguard check")


def run_with(**changes: Any) -> RunFacts:
    from dataclasses import replace

    return replace(read_run(RUN), **changes)


def test_padding_is_counted_by_what_the_trainer_wrote(tmp_path: Path) -> None:
    line = Timeline()
    busy_step(line, GEMM)
    found = line.understood(tmp_path, run=run_with(density=0.3))
    assert found.bound.cause is Cause.PADDING
    assert dict(found.bound.shares)[Cause.PADDING] == pytest.approx(0.7 * 10_000 / 10_100)
    assert found.bound.fixes[0].title.startswith("Pack samples")


def test_nvml_is_believed_about_what_nvml_says(tmp_path: Path) -> None:
    line = Timeline()
    waiting_step(line)
    assert line.understood(tmp_path, run=run_with(gpu_utilization=98.0)).bound.sentence.startswith("98% utilization")
    assert not line.understood(tmp_path, run=run_with(gpu_utilization=40.0)).bound.paradox
    idle = Timeline()
    idle.step(1, 0, 20_000)
    idle.op("aten::mm", 12_000, 100)
    idle.kernel(GEMM, 12_100, 7_900, launched=12_050)
    assert idle.understood(tmp_path, run=run_with(gpu_utilization=98.0)).bound.paradox


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    profiles = []
    for rank in range(4):
        line = Timeline(rank=rank)
        line.step(1, 0, 10_000)
        line.op("aten::x", 0, 50)
        computing = 8000 if rank == 2 else 4000
        line.kernel(GEMM, 0, computing, launched=0)
        line.kernel(NCCL, computing, 10_000 - computing, launched=1)
        profiles.append(profile(line.write(tmp_path / f"rank{rank}.json")))
    shown, ranks = judge_ranks(profiles)
    assert ranks.slowest is not None
    assert ranks.slowest.rank == 2
    assert ranks.waiting == pytest.approx(0.4)
    assert shown.bound.cause in {Cause.STRAGGLER, Cause.GEMM}
    assert dict(shown.bound.shares)[Cause.STRAGGLER] == pytest.approx(0.4)
    assert any("rank 2" in fix.title for fix in shown.bound.fixes)


def test_ranks_that_cannot_be_of_one_run_are_doubted(tmp_path: Path) -> None:
    profiles = []
    for number, (rank, gpu, length) in enumerate([(1, "NVIDIA H200", 4000), (None, "NVIDIA H100", 9000)]):
        line = Timeline(rank=rank, gpu=gpu)
        line.step(1, 0, length)
        line.op("aten::x", 0, 50)
        line.kernel(GEMM, 0, length, launched=0)
        profiles.append(profile(line.write(tmp_path / f"{number}.json")))
    shown, ranks = judge_ranks(profiles)
    # The one that names none gets a number that no other has.
    assert sorted((row.rank, Path(row.source).name) for row in ranks.rows) == [(0, "1.json"), (1, "0.json")]
    notes = " ".join(shown.notes)
    for words in ("1 of them name no rank", "different GPUs: NVIDIA H100, NVIDIA H200", "of several runs?"):
        assert words in notes


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (
            {"cuda_driver_version": 13000, "cuda_runtime_version": 12090},
            {"CUDA driver": "13.0", "CUDA runtime": "12.9"},
        ),
        ({"distributedInfo": {"rank": 0, "nccl_version": "2.28.9"}}, {"NCCL": "2.28.9"}),
        ({"cuda_driver_version": True, "distributedInfo": [1]}, {}),
        ({"cuda_driver_version": "new", "distributedInfo": {"nccl_version": 7}}, {}),
    ],
)
def test_versions_are_what_the_trace_tells(header: dict[str, Any], said: dict[str, str]) -> None:
    assert versions(header) == said


def test_equal_ranks_have_no_straggler(tmp_path: Path) -> None:
    line = Timeline(rank=0)
    busy_step(line, GEMM)
    one = profile(line.write(tmp_path / "a.json"))
    _, ranks = judge_ranks([one, one, one])
    assert ranks.slowest is None


def test_steps_are_told_apart(tmp_path: Path) -> None:
    line = Timeline()
    for number in range(3):
        start = number * 1000.0
        line.step(number + 5, start, 1000)
        line.op("aten::mm", start, 50)
        line.kernel(GEMM, start + 100, 300 + 100 * number, launched=start + 10)
    found = line.understood(tmp_path)
    assert [(s.number, s.wall, s.busy, s.launches) for s in found.steps] == [
        (5, 1000, 300, 1),
        (6, 1000, 400, 1),
        (7, 1000, 500, 1),
    ]
    assert found.timeline is not None
    assert found.timeline.title == "step 5"
    assert sum(found.timeline.groups["gemm"]) / len(found.timeline.groups["gemm"]) == pytest.approx(0.3)


def test_rates_come_from_shapes(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 1000)
    shapes = {"Input Dims": [[8192, 5120], [5120, 17408]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    of = line.op("aten::mm", 0, 50, **shapes)
    line.kernel(GEMM, 50, 2000, launched=10, of=of)
    found = line.understood(tmp_path)
    (part,) = found.parts
    assert part.operations == 2 * 8192 * 5120 * 17408
    assert part.operations / part.operations_time / 1e6 == pytest.approx(730, abs=1)
    assert "730 TFLOP/s" in found.bound.sentence
    assert "74% of this GPU's peak" in found.bound.sentence


@pytest.mark.parametrize(
    ("name", "dims", "operations"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 60),
        ("aten::addmm", [[5], [2, 3], [3, 5]], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420),
        ("aten::baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5]], 420),
        ("aten::_grouped_mm", [[10, 3], [4, 3, 5]], 300),
    ],
)
def test_products_are_counted(name: str, dims: list[list[int]], operations: int) -> None:
    done = work(name, {"Input Dims": dims, "Input type": ["float"] * len(dims)})
    assert done is not None
    assert done.operations == operations
    assert done.read == 4 * sum(math.prod(d) for d in dims)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("aten::mul", 40), ("aten::silu", 40), ("aten::add_", 0), ("aten::copy_", 0), ("aten::sum", 0),
        ("aten::_foreach_norm", 0), ("aten::linalg_vector_norm", 0), ("aten::summary", 40),
    ],
)  # fmt: skip
def test_an_output_beside_the_inputs_is_counted_where_there_is_one(name: str, written: int) -> None:
    done = work(name, {"Input Dims": [[10], [10]], "Input type": ["float", "float"]})
    assert done is not None
    assert (done.read, done.written) == (80, written)


@pytest.mark.parametrize("name", ["aten::embedding", "aten::index_select", "aten::gather", "aten::index"])
def test_what_is_touched_in_part_is_not_counted_as_a_whole(name: str) -> None:
    done = work(name, {"Input Dims": [[1000, 10], [3]], "Input type": ["float", "long int"]})
    assert done is not None
    assert math.isnan(done.read)
    assert math.isnan(done.written)


def test_a_recording_without_a_gpu_says_so() -> None:
    line = Timeline()
    line.op("aten::mm", 0, 50)
    from kernelguard.trace.profile import understand
    from kernelguard.trace.recording import record_events

    found = understand(record_events(iter(line.events), "x"))
    assert found.bound.cause is Cause.UNKNOWN
    assert "no GPU activity" in found.bound.sentence


def test_a_real_trace_of_an_h200() -> None:
    """The figures are read out of the file by other means: jq, and the eye."""
    found = profile(H200)
    assert found.gpu == "NVIDIA H200"
    assert found.launches == 804
    assert found.kernels_total == pytest.approx(17124.885, abs=0.01)
    assert found.bound.cause is Cause.LAUNCH
    assert sum(share for _, share in found.bound.shares) == pytest.approx(1.0)
    assert {i.package for i in found.implementations} == {"fla", "causal_conv1d"}
    assert all(i.forward and i.backward and not i.fallbacks for i in found.implementations)
    assert not any(part.name == "other" for part in found.parts), [k.name for k in found.kernels]
    idle = found.idle.launch + found.idle.device + found.idle.data + found.idle.script + found.idle.compiling
    assert found.busy + idle == pytest.approx(found.wall)


def test_the_profilers_own_work_is_told_apart(tmp_path: Path) -> None:
    line = Timeline()
    busy_step(line, GEMM)
    assert not any("profiler's own" in note for note in line.understood(tmp_path).notes)
    line.add("overhead", "Activity Buffer Request", 500, 4000)
    assert any(note.startswith("the profiler's own work took 4.0 ms") for note in line.understood(tmp_path).notes)


@pytest.mark.parametrize("broken", [{"dur": -5.0}, {"ts": "nan"}, {"ts": float("inf")}, {"ts": None}])
def test_events_without_a_usable_time_are_left_out_and_counted(broken: dict[str, Any], tmp_path: Path) -> None:
    line = Timeline()
    busy_step(line, GEMM)
    before = line.understood(tmp_path)
    last = line.events[-1]
    line.events.append(last | broken)
    found = line.understood(tmp_path)
    assert (found.busy, found.launches, found.bound.cause) == (before.busy, before.launches, before.bound.cause)
    assert "1 events have no usable time and were left out" in found.notes
    line.events[:] = [event | (broken if event["cat"] == "kernel" else {}) for event in line.events]
    with pytest.raises(InputError, match="the time of all 11 is no number"):
        line.understood(tmp_path)


def test_the_names_of_old_writers_are_known(tmp_path: Path) -> None:
    line = Timeline()
    busy_step(line, GEMM)
    now = line.understood(tmp_path)
    old = {"cpu_op": "Operator", "cuda_runtime": "Runtime", "kernel": "Kernel"}
    for event in line.events:
        event["cat"] = old.get(event["cat"], event["cat"])
    before = line.understood(tmp_path)
    assert (before.busy, before.launches, before.bound.cause) == (now.busy, now.launches, now.bound.cause)


@pytest.mark.observed
@pytest.mark.thorough
def test_the_page_tells_how_to_record(tmp_path: Path) -> None:
    """The code of docs/profile.md, run as it stands, leaves a trace that can be read."""
    text = (ROOT / "docs/profile.md").read_text()
    block = text.split("```python\n")[1].split("```")[0]
    env = observed.environment(tmp_path / "env", None, {})
    command = [str(env.python), "-W", "ignore", "-c", block]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
    found = profile(tmp_path / "trace.json.gz")
    assert len(found.steps) == 2
    assert found.has_shapes


def test_a_training_run_of_ours_is_read() -> None:
    run = read_run(RUN)
    assert run.steps == 41
    assert run.step_s == pytest.approx(run.summary["step_p50_s"])
    assert run.step_p95_s == pytest.approx(run.summary["step_p95_s"])
    assert run.data_wait_s == pytest.approx(run.summary["data_wait_s"])
    assert len(run.losses) == 43


@pytest.mark.parametrize(
    ("name", "part"),
    [
        (GEMM, "matmul"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256>(Params)", "matmul"),
        (NCCL, "communication"),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<256> >(flash::Flash_fwd_params)", "attention"),
        ("chunk_gated_delta_rule_fwd_kernel_h_blockdim64", "sequence"),
        ("void causal_conv1d_channellast_bwd_kernel<Traits>(ConvParamsBwd)", "sequence"),
        ("triton_poi_fused_add_mul_0", "elementwise"),
        ("triton_red_fused__to_copy_mean_1", "norm"),
        ("Memcpy DtoH (Device -> Pageable)", "copy"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Iterator&)>", "copy"),
        ("liger_cross_entropy_kernel", "loss"),
        ("_rms_norm_backward_kernel", "norm"),
        ("_swiglu_forward_kernel", "elementwise"),
        ("what_is_this", "other"),
    ],
)  # fmt: skip
def test_kernels_find_their_part(name: str, part: str) -> None:
    parts = Parts()
    assert parts.parts[parts.index(name)].name == part


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA L4", 121),
     ("NVIDIA L40S", 362), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA A10G", 125)],
)  # fmt: skip
def test_the_longest_match_is_the_gpu(gpu: str, tflops: float) -> None:
    peak = peak_of(gpu)
    assert peak is not None
    assert peak.bf16_tflops == tflops


def test_an_unknown_gpu_has_no_peak() -> None:
    assert peak_of("NVIDIA H2000") is None
    assert peak_of("") is None


intervals = st.lists(
    st.tuples(st.integers(0, 200), st.integers(0, 30)).map(lambda t: (float(t[0]), float(t[0] + t[1])))
)


@given(intervals)
def test_a_union_covers_the_same_time_once(found: list[tuple[float, float]]) -> None:
    merged = union(found)
    points = {x for begin, end in found for x in range(int(begin), int(end))}
    assert {x for begin, end in merged for x in range(int(begin), int(end))} == points
    assert sum(end - begin for begin, end in merged) == len(points)
    assert Cover(found).length(20, 120) == len([x for x in points if 20 <= x < 120])
    assert sum(end - begin for begin, end in gaps(merged, 20, 120)) == 100 - len([x for x in points if 20 <= x < 120])


@given(intervals, st.integers(1, 50))
def test_slices_keep_the_time(found: list[tuple[float, float]], count: int) -> None:
    bins = Bins(10, 110, count)
    for begin, end in union(found):
        bins.add(begin, end)
    assert sum(bins.filled) == pytest.approx(Cover(found).length(10, 110))
    assert all(0 <= share <= 1 for share in bins.shares)


def test_a_recorded_step_of_the_baseline_loop_begins_with_its_slow_paths() -> None:
    """The published loop without a fused kernel: four layers of the 27B's shape on an H200."""
    found = profile(RESULTS / "trace-naive-h200.json.gz")
    slow = {i.symbols[0]: i for i in found.implementations if i.fallbacks}
    assert set(slow) == {"causal_conv1d_fn", "chunk_gated_delta_rule"}
    # Three linear layers, forward and, recomputed, backward; each rule inverts a triangle per chunk and layer.
    assert "aten::conv1d (6x)" in slow["causal_conv1d_fn"].fallbacks
    assert "The slow path of causal_conv1d_fn, chunk_gated_delta_rule ran" in found.bound.sentence
    assert found.bound.fixes[0].title == "Get causal_conv1d_fn, chunk_gated_delta_rule off the slow path"
    assert found.launches > 6000
    assert found.busy / found.wall < 0.85
    gains = {fix.title: fix.gain for fix in found.bound.fixes}
    assert 0.25 < gains[found.bound.fixes[0].title] < 0.4, "not what the optimizer and cuDNN's plans take"
    assert 0.2 < gains["Keep aten::_chunk_cat from holding up the host"] < 0.25


@pytest.mark.parametrize(("name", "busy"), [("fused", (0.6, 0.8)), ("packed", (0.9, 1.0))])
def test_a_recorded_step_on_fused_kernels_is_bound_by_its_products(name: str, busy: tuple[float, float]) -> None:
    """The bundled trainer's step with the kernels installed, without and with packing: as the baseline loop's above."""
    found = profile(RESULTS / f"trace-{name}-h200.json.gz")
    assert found.bound.cause is Cause.GEMM
    assert "slow path" not in found.bound.sentence
    ran = {symbol: i for i in found.implementations for symbol in i.symbols}
    assert {"chunk_gated_delta_rule", "causal_conv1d_fn"} <= set(ran)
    assert not any(i.fallbacks for i in found.implementations)
    assert found.launches == pytest.approx(2087, abs=10)
    assert busy[0] < found.busy / found.wall < busy[1]
    # A padded length that is new: cuDNN plans it, for 70 ms a call, and nothing is launched meanwhile.
    stalled = {stall.operator: stall.microseconds for stall in found.stalls}
    assert (sum(stalled.values()) > 0.2 * found.wall) is (name == "fused")
    assert ("aten::_cudnn_attention_forward" in stalled) is (name == "fused")
    assert 0.04 < found.recomputed / found.wall < 0.09
    # One small batch to an update: four layers and an output layer that make up most of the parameters.
    fixes = {fix.title: fix.gain for fix in found.bound.fixes}
    assert 0.15 < fixes["Give each update more tokens"] < 0.3
    assert fixes["Fuse what only moves bytes"] < 0.15, "the update's share is not counted twice"


def test_a_step_of_two_ranks_hides_almost_all_of_its_communication() -> None:
    """Eight layers on two H200s under FSDP2: NCCL kernels take 90 ms, nearly all of it beside products."""
    found = profile(RESULTS / "trace-two-gpus-h200.json.gz")
    assert found.bound.cause is Cause.GEMM
    assert 85e3 < found.communication < 95e3
    assert 0.01 < found.exposed_communication / found.wall < 0.03
    ran = {symbol for i in found.implementations for symbol in i.symbols}
    assert {"chunk_gated_delta_rule", "varlen_attn", "FusedRMSNormGated", "packed_convolution"} <= ran
    assert "causal_conv1d_fn" not in ran, "the trainer's own convolution ran in its place"


def test_flash_qla_is_named_as_what_the_delta_rule_ran_on() -> None:
    found = profile(RESULTS / "trace-flash-qla-h200.json.gz")
    ran = {symbol: i for i in found.implementations for symbol in i.symbols}
    assert ran["chunk_gated_delta_rule"].package == "flash_qla"
    assert ran["chunk_gated_delta_rule"].forward
    assert ran["chunk_gated_delta_rule"].backward
    assert next(part for part in found.parts if part.name == "sequence").launches == 10


@pytest.mark.parametrize("name", ["naive", "fused", "packed", "flash-qla"])
def test_no_part_moves_more_than_the_memory_can(name: str) -> None:
    found = profile(RESULTS / f"trace-{name}-h200.json.gz")
    assert found.peak is not None
    rates = {p.name: p.bytes / p.bytes_time / 1000 / found.peak.memory_gb_s for p in found.parts if p.bytes_time}
    assert rates
    assert max(rates.values()) < 1, rates


def test_a_long_call_that_launches_nothing_is_named(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 100_000)
    line.op("aten::mm", 0, 60)
    line.kernel(GEMM, 100, 20_000, launched=20)
    # The host prepares for 60 ms; the GPU has work for the first 20 of them.
    line.op("aten::_cudnn_attention_forward", 100, 60_000)
    line.kernel(GEMM, 60_200, 39_800, launched=60_050)
    found = line.understood(tmp_path)
    (stall,) = found.stalls
    assert (stall.operator, stall.calls, stall.longest) == ("aten::_cudnn_attention_forward", 1, 60_000)
    assert stall.microseconds == pytest.approx(39_950, abs=10)
    assert found.idle.stalled == pytest.approx(stall.microseconds)
    titles = {fix.title: fix for fix in found.bound.fixes}
    fix = titles["Keep aten::_cudnn_attention_forward from holding up the host"]
    assert fix.how.startswith("torch.backends.cuda.enable_cudnn_sdp(False)")
    assert fix.gain == pytest.approx(0.4, abs=0.01)
    assert "Launch less" not in titles, "fewer launches would win nothing here"


def test_a_forward_pass_that_runs_again_in_the_backward_pass_is_counted(tmp_path: Path) -> None:
    line = Timeline()
    line.step(1, 0, 10_000)
    line.op("aten::linear", 0, 50)
    line.kernel(GEMM, 100, 3000, launched=10, of=line.op("aten::mm", 5, 30))
    line.add("cpu_op", "autograd::engine::evaluate_function: CheckpointBackward", 100, 400)
    line.op("aten::linear", 110, 100)
    line.kernel(GEMM, 3100, 2900, launched=130, of=line.op("aten::mm", 120, 50))
    line.add("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 600, 200)
    line.kernel(GEMM, 6000, 4000, launched=640, of=line.op("aten::mm", 630, 50))
    found = line.understood(tmp_path)
    assert found.recomputed == pytest.approx(2900)
    assert {fix.title: fix.gain for fix in found.bound.fixes}["Recompute less"] == pytest.approx(0.29, abs=0.01)


def test_packing_is_what_fills_the_gpu() -> None:
    """The three recordings in a row: what the host launches, and how long the GPU stands still for it."""
    naive, fused, packed = (profile(RESULTS / f"trace-{name}-h200.json.gz") for name in ("naive", "fused", "packed"))
    assert naive.launches > 3 * fused.launches
    assert fused.launches == pytest.approx(packed.launches, rel=0.01)
    assert naive.busy / naive.wall < 0.75
    assert packed.wall < fused.wall < naive.wall
