"""Each way in which a model gets slow or wrong without an exception has a detector, shown on real, training models.

One process for each interpreter trains all of its models (tests/guard/live_checks.py); each test looks at one answer.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import group
import packages
import pytest
from ops import RIGHT

import crafted
from kernelguard.guard.expectation import Expectation
from kernelguard.guard.steptrace import StepTrace, base_name, judge_trace

pytestmark = pytest.mark.observed
SCRIPT = Path(__file__).with_name("live_checks.py")
KERNELS_SITE = "lib/python3.11/site-packages"


def working() -> dict[str, str]:
    """Every kernel package, working on the CPU, as their real ones are laid out."""
    scan = RIGHT.replace("dt_softplus=False, **kwargs):", "dt_softplus=False, return_final_states=False, **kwargs):")
    scan = scan.replace(
        "    return (torch.stack(outs, 1) + x * D[:, None]).to(dtype)",
        "    y = (torch.stack(outs, 1) + x * D[:, None]).to(dtype)\n    return (y, h) if return_final_states else y",
    )
    assert "return (y, h)" in scan
    mamba = {
        **crafted.mamba_ssm(),
        "mamba_ssm/__init__.py": '__version__ = "2.3.2"\n',
        "mamba_ssm/ops/triton/ssd_combined.py": scan,
        "mamba_ssm/ops/selective_scan_interface.py": RIGHT,
    }
    liger = {
        "liger_kernel/__init__.py": "import torch\n"
        "def forward(self, x):\n"
        "    x = x.float()\n"
        "    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))\n"
    }
    return {**packages.working(), **mamba, **liger}


def _broken() -> dict[str, str]:
    return {**packages.working(), "causal_conv1d/__init__.py": "raise ImportError('undefined symbol: _ZN3c10')\n"}


def _renamed() -> dict[str, str]:
    files = packages.working()
    name = "fla/ops/gated_delta_rule/__init__.py"
    return {**files, name: files[name].replace("cu_seqlens", "cuts")}


def _nested() -> dict[str, str]:
    return {**packages.working(), "fla/__init__.py": '__version__ = "0.6.0"\n'}


def _for_old() -> dict[str, str]:
    """Releases up to 5.14 look for the symbols below what the package root has imported."""
    parts = "import mamba_ssm.ops.triton.ssd_combined, mamba_ssm.ops.triton.selective_state_update\n"
    return {**working(), "mamba_ssm/__init__.py": '__version__ = "2.3.2"\n' + parts}


@dataclass(frozen=True)
class Machine:
    """An interpreter."""

    version: str
    files: Callable[[], dict[str, str]]
    kernels: bool = False


MACHINES = {
    "working": Machine("5.24.0", working),
    "bare": Machine("5.24.0", dict),
    "broken": Machine("5.24.0", _broken),
    "renamed": Machine("5.24.0", _renamed),
    "root-only": Machine("5.16.1", _nested),
    "old": Machine("5.5.4", dict),
    "old-with-kernels": Machine("5.5.4", _for_old),
    "hub": Machine("5.17.0", dict, kernels=True),
}
# case -> (interpreter, the rows that have to be found with their status, a word of the text)
CASES: dict[str, tuple[str, set[tuple[str, str]], str]] = {
    "clean": ("working", set(), ""),
    "clean_any_model": ("working", set(), ""),
    "clean_packed": ("working", set(), ""),
    "clean_signals_of_attention": ("working", set(), ""),
    "clean_mamba2": ("working", {("attention", "warn")}, ""),
    "clean_llama": ("working", set(), ""),
    "checkpointing": ("working", set(), ""),
    "an_evaluation_before": ("working", set(), ""),
    "another_model_first": ("working", set(), ""),
    "compiled": ("working", set(), ""),
    "row_1_absent": ("bare", {("fallback", "fail")}, "fla is not installed"),
    "row_1_broken": ("broken", {("package-ignored", "fail")}, "causal_conv1d is installed, and was not bound"),
    "row_2_ignored": ("root-only", {("package-ignored", "fail")}, "transformers 5.16.1 ignores a fla"),
    "row_3_packed": ("renamed", {("argument-dropped", "fail")}, "takes no cu_seqlens"),
    "row_3_dropped": ("renamed", set(), ""),
    "row_4_layer_attributes": ("old", {("layer-fallback", "fail")}, "causal_conv1d_fn is None"),
    "row_4_gate": ("old", {("gated-off", "fail"), ("attention", "warn")}, "is_fast_path_available is False"),
    "row_5_device": ("old-with-kernels", {("blocked-by-device", "fail"), ("attention", "warn")}, "lies on the CPU"),
    "row_5_compile": ("old-with-kernels", {("blocked-by-compile", "fail"), ("attention", "warn")}, "is compiled"),
    "row_6_nothing_replaced": ("hub", {("hub-nothing-replaced", "fail")}, "replaced nothing"),
    "row_6_replaced": ("hub", set(), ""),
    "row_6_a_verified_layer": ("hub", {("hub-nothing-replaced", "fail")}, "hub kernel of TinyNorm was verified"),
    "row_7_switched_off": ("hub", {("hub-nothing-replaced", "fail")}, "USE_HUB_KERNELS=0"),
    "row_8_inference": ("hub", {("inference-kernel", "fail")}, "has no backward"),
    "row_8_kernelized_later": ("hub", {("rebound", "fail")}, "its own forward when the model was built"),
    "row_8_rebound": ("working", {("rebound", "fail")}, "causal_conv1d_fn was package"),
    "row_9_attention": ("working", {("attention", "fail")}, "runs eager attention, sdpa was asked for"),
    "row_9_other_part": ("working", {("attention", "fail")}, "side runs eager attention"),
    "row_10_math": ("working", {("fallback-ran", "fail")}, "aten::_scaled_dot_product_attention_math"),
    "row_11_eager": ("working", {("experts", "fail")}, "one by one in a Python loop"),
    "row_11_fallback": ("working", {("fallback-ran", "fail"), ("attention", "warn")}, "grouped_mm_fallback"),
    "row_12_dequantized": ("working", {("dequantized", "fail"), ("attention", "warn")}, "turned back into bf16"),
    "row_13_liger": ("working", {("liger-nothing-replaced", "fail")}, "no layer of the model runs its code"),
    "row_13_liger_there": ("working", set(), ""),
    "row_14_not_loaded": ("working", {("kernel-not-loaded", "fail"), ("attention", "warn")}, "rwkv_cuda_kernel is"),
    "row_15_xlstm": (
        "working", {("slow-by-config", "fail"), ("fallback", "fail"), ("attention", "warn")}, "native_autograd",
    ),
    "row_15_mambapy": ("bare", {("slow-by-config", "fail"), ("fallback", "fail")}, "mambapy is not installed"),
    "row_16_cache": ("working", {("cache-in-training", "fail"), ("attention", "warn")}, "runs only without one"),
    "row_16_cache_that_costs_nothing": ("working", {("cache-in-training", "warn")}, ""),
    "row_17_positions_only": ("working", {("packing-signal-missing", "fail")}, "seq_idx and cu_seq_lens_q"),
    "row_17_no_seq_idx": ("working", {("packing-signal-missing", "fail")}, "not given seq_idx:"),
    "row_17_no_cuts": ("working", {("packing-signal-missing", "fail")}, "not given cu_seq_lens_q:"),
    "row_17_nothing_in_a_packed_run": ("working", {("packing-signal-missing", "fail")}, "its first batch carries no"),
    "row_17_disagree": ("working", {("packing-signal-wrong", "fail")}, "[0, 8], the positions at [0, 9]"),
    "row_17_empty_sample": ("working", {("packing-signal-wrong", "fail")}, "does not grow strictly"),
    "row_17_attention_without_a_mask": ("working", {("attention-across-samples", "fail")}, "no mask between"),
    "row_17_attention_with_its_mask": ("working", set(), ""),
    "row_17_padding_on_the_left": ("working", set(), ""),
    "row_17_ends_of_text_inside": ("working", {("packing-not-said", "warn")}, "2 ends of text"),
    "row_18_exporting": ("working", {("export", "fail")}, "is being exported"),
    "row_18_graph": ("working", {("export", "unknown")}, "lm_head is an exported graph"),
    "row_20_class": ("working", {("class-replaced", "unknown")}, "is __main__'s"),
    "row_20_forward": ("working", {("class-replaced", "unknown")}, "was replaced by __main__"),
}  # fmt: skip
QUICK = "working"
"""The one interpreter whose models train in every run; the others belong to the thorough one."""


@functools.cache
def _answers(machine: str, folder: Path) -> dict[str, Any]:
    spec = MACHINES[machine]
    env = group.make_interpreter(folder / machine, spec.version, spec.files())
    if spec.kernels:
        from programs import tool

        site = tool("kernels-0.17.2", "kernels==0.17.2").parent.parent / KERNELS_SITE
        # Behind everything of the interpreter's own.
        (env.site / "zz_kernels.pth").write_text(f"{site}\n")
    names = [name for name, (where, _, _) in CASES.items() if where == machine]
    names += ["row_19_never_called"] if machine == QUICK else []
    done = subprocess.run(
        [str(env.python), str(SCRIPT), *names],
        capture_output=True, text=True, check=False, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("running")


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if c[0] == QUICK else pytest.mark.thorough) for n, c in CASES.items()],
)
def test_what_is_said(name: str, folder: Path) -> None:
    machine, rows, word = CASES[name]
    answer = _answers(machine, folder)[name]
    assert "error" not in answer, answer["error"]
    assert {(row, status) for row, status, _ in answer["findings"]} == rows, answer
    assert any(word in text for _, _, text in answer["findings"]) or not word, answer
    # A definite no stops the run, before anything was learned where that can be; everything else lets it go on.
    failed = any(status == "fail" for _, status in rows)
    assert answer["stopped"].endswith("78") == failed
    assert answer["state"] == "done"
    # Nothing of the guard is left: no hook, no profiler.
    assert answer["left"] == 0


def test_each_row_of_the_catalogue_has_a_detector_and_a_case() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guard.md").read_text(encoding="utf-8")
    told = {
        int(n): set(re.findall(r"`([a-z-]+)`", codes))
        for n, codes in re.findall(r"^\| (\d+) \|.*\| (.*) \|$", page, re.MULTILINE)
    }
    assert sorted(told) == list(range(1, 21))
    for number, codes in told.items():
        mine = [rows for name, (_, rows, _) in CASES.items() if name.startswith(f"row_{number}_")]
        shown = {row for rows in mine for row, status in rows if status != "warn"}
        # Calls and launches are counted by the tests below.
        counted = {16: {"never-called"}, 19: {"never-called", "kernel-not-launched"}}.get(number, set())
        assert codes <= shown | counted, number
        assert codes, number


def test_the_kernels_calls_are_counted_and_the_step_is_traced(folder: Path) -> None:
    answer = _answers(QUICK, folder)["clean"]
    assert answer["bound"] == {"causal_conv1d_fn": "package", "chunk_gated_delta_rule": "package"}
    # One linear layer, two micro-batches.
    assert answer["counts"] == {"causal_conv1d_fn": 2, "chunk_gated_delta_rule": 2}
    assert answer["ops"] > 500


def test_a_compiled_model_is_not_compiled_again_when_the_guard_has_gone(folder: Path) -> None:
    answer = _answers(QUICK, folder)["compiled"]
    assert answer["compiled"] > 0
    assert answer["compiled_again"] == 0


def test_only_the_model_that_trains_is_waited_for(folder: Path) -> None:
    assert _answers(QUICK, folder)["an_evaluation_before"]["waiting"] == "waiting"
    other = _answers(QUICK, folder)["another_model_first"]
    assert (other["waiting"], other["began"]) == ("waiting", "first-step")


def test_a_bound_kernel_that_is_gone_around(folder: Path) -> None:
    """Row 19 where there is no GPU: the calls are counted."""
    answer = _answers(QUICK, folder)["row_19_never_called"]
    assert {row for row, _, _ in answer["goes_around"]["findings"]} == {"never-called"}
    assert answer["goes_around"]["stopped"] == "step 0 optimizer: 78"
    assert answer["calls"]["findings"] == []


FLASH = "void flash::flash_fwd_kernel<Traits<128>, false>(Params)"


@pytest.mark.parametrize(
    ("kernels", "rows"),
    [
        ({"chunk_fwd_kernel_o": 3, FLASH: 2}, set()),
        ({"chunk_fwd_kernel_o": 3}, {("kernel-not-launched", "fail", "scaled_dot_product_attention")}),
        ({FLASH: 1, "aten_gemm": 5}, {("kernel-not-launched", "fail", "chunk_gated_delta_rule")}),
        ({}, {("not-traced", "unknown", "no GPU kernel at all")}),
    ],
    ids=["both", "one-fell-back", "the-other", "nothing-seen"],
)
def test_the_kernels_that_the_verdict_saw_have_to_be_launched(
    kernels: dict[str, int], rows: set[tuple[str, str, str]]
) -> None:
    """Row 19 on a GPU, on names as a profiler writes them; benchmarks run it on a real one."""
    trace = StepTrace()
    trace.kernels.update(kernels)
    expected = Expectation(
        ticketed=True,
        kernels={
            "chunk_gated_delta_rule": ("chunk_fwd_kernel_o", "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"),
            "scaled_dot_product_attention": ("flash_fwd_kernel<>",),
        },
    )
    found = list(judge_trace(trace, {}, expected))
    assert {(f.row, f.status) for f in found} == {(row, status) for row, status, _ in rows}
    assert all(any(word in f.what for f in found) for _, _, word in rows)


def test_a_trace_that_could_not_be_made_is_unknown_where_one_was_promised() -> None:
    trace = StepTrace(problem="the script's own profiler is running")
    promised = Expectation(ticketed=True, kernels={"a": ("b",)})
    assert [f.status for f in judge_trace(trace, {}, promised)] == ["unknown"]
    assert [f.status for f in judge_trace(trace, {}, Expectation())] == ["warn"]


@pytest.mark.parametrize(
    "name",
    [
        "void (anonymous namespace)::causal_conv1d_fwd_kernel<Traits<128, 4>>(ConvParams)",
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
        "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>(int, float)",
    ],
)
def test_kernel_names_are_read_as_the_room_trace_reads_them(name: str) -> None:
    from kernelguard.trace import names

    assert base_name(name) == names.base_name(name)
