"""Traces: what is read out of them, and that "nothing found" is never taken for "not there"."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import configs
import observed
from command import ROOT
from kernelguard.declare.values import SubModel
from kernelguard.errors import InputError, UndeterminedError
from kernelguard.trace import TraceFacts, fast_paths, load_names, read_trace
from kernelguard.trace.names import Names, base_name, unexplained
from kernelguard.trace.read import parse_trace
from kernelguard.verify.step import record_step

VERSIONS = {"fla-core": "0.6.0", "causal-conv1d": "1.7.0", "torch": "2.13.0"}
CUDA_CONV = (
    "void causal_conv1d_channellast_fwd_kernel<Causal_conv1d_channellast_fwd_kernel_traits<128, 4>, true>(Params)"
)


def kernel(name: str, ts: float, dur: float) -> dict[str, Any]:
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"stream": 7}}


DOCUMENT = {
    "schemaVersion": 1,
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": 2},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 4, "dur": 2},
        kernel("chunk_bwd_kernel_dqkwg", 10, 5.5),
        kernel("chunk_bwd_kernel_dqkwg", 20, 4.5),
        kernel(CUDA_CONV, 30, 20.0),
        kernel("chunk_fwd_kernel_o", 60, 1.0),
        kernel("unheard_of_kernel", 70, 1.0),
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 5, "dur": 100},
        {"ph": "i", "cat": "kernel", "name": "no duration", "ts": 5},
        "nonsense",
    ],
}


def facts() -> TraceFacts:
    return parse_trace(DOCUMENT, source="x")


def test_kernels_are_counted_and_added_up() -> None:
    found = facts()
    assert [(k.name, k.count, k.microseconds) for k in found.kernels][:2] == [
        (CUDA_CONV, 1, 20.0),
        ("chunk_bwd_kernel_dqkwg", 2, 10.0),
    ]
    assert found.launches == 5
    assert found.gpu_microseconds == 32.0
    assert found.span_microseconds == 61.0
    assert found.ops == {"aten::mm": 2}


def test_plain_and_compressed_files_say_the_same(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    plain.write_text(json.dumps(DOCUMENT))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(plain).kernels == read_trace(packed).kernels == facts().kernels
    plain.write_text(json.dumps(DOCUMENT["traceEvents"]))
    assert read_trace(plain).launches == 5


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"{}", "no list of trace events"),
        (b"[1", "is not JSON"),
        (gzip.compress(b"{}" * 9999, mtime=0)[:30], "damaged gzip"),
        (b"\x1f\x8bxxxxxxxx", "damaged gzip"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_bytes(content)
    with pytest.raises(InputError, match=words):
        read_trace(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "absent.json")


def test_kernels_belong_to_their_fast_path() -> None:
    wanted = [("fla", "chunk_gated_delta_rule"), ("causal_conv1d", "causal_conv1d_fn"), ("fla", "causal_conv1d")]
    delta, conv, fla_conv = fast_paths(facts(), wanted, VERSIONS)
    assert (delta.forward, delta.backward, conv.forward, conv.backward) == (True, True, True, False)
    assert [k.count for k in delta.kernels] == [2, 1]
    # The CUDA kernel of causal-conv1d is not mistaken for fla's Triton kernel of nearly the same name.
    assert fla_conv.kernels == ()
    assert [k.name for k in unexplained(facts(), (delta, conv, fla_conv))] == ["unheard_of_kernel"]


def test_kernels_of_a_package_that_is_handed_the_call_count_for_it() -> None:
    """Where FlashQLA is installed fla hands the delta rule over to it: its own kernels do not run then."""
    trace = read_trace(ROOT / "benchmarks/results/trace-flash-qla-h200.json.gz")
    wanted = [("fla", "chunk_gated_delta_rule")]
    (found,) = fast_paths(trace, wanted, {"fla-core": "0.6.0", "flash-qla": "0.1.3"})
    assert (found.forward, found.backward, found.fallbacks) == (True, True, ())
    assert all(run.name.startswith("tilelang_") for run in found.kernels)
    (without,) = fast_paths(trace, wanted, {"fla-core": "0.6.0"})
    assert without.known
    assert not without.forward


def test_a_version_without_known_names_is_not_an_absent_kernel() -> None:
    (found,) = fast_paths(facts(), [("fla", "chunk_gated_delta_rule")], {"fla-core": "9.0"})
    assert (found.known, found.forward) == (False, False)
    (odd,) = fast_paths(facts(), [("fla", "chunk_gated_delta_rule")], {"fla-core": "not-a-version"})
    assert odd.known is False
    (absent,) = fast_paths(facts(), [("fla", "no_such_symbol")], VERSIONS)
    assert absent.known is False


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("chunk_fwd_kernel_o", "chunk_fwd_kernel_o"),
        (CUDA_CONV, "causal_conv1d_channellast_fwd_kernel<>"),
        ("void flash::flash_fwd_kernel<Traits<256>, false>(flash::Params)", "flash_fwd_kernel<>"),
        ("void (anonymous namespace)::elementwise_kernel<4>(int)", "elementwise_kernel<>"),
        ("nvjet_tst_128x256", "nvjet_tst_128x256"),
        ("ampere_gemm(float*)", "ampere_gemm"),
    ],
)
def test_base_names(name: str, base: str) -> None:
    assert base_name(name) == base


def test_every_data_file_is_complete() -> None:
    names = load_names()
    assert {n.package for n in names} >= {"fla", "causal_conv1d", "liger_kernel", "mamba_ssm", "torch"}
    for row in names:
        assert isinstance(row, Names)
        assert row.forward or row.fallback_ops, row
        assert row.versions != SpecifierSet(""), row


@pytest.mark.observed
def test_a_real_step_on_the_slow_path_leaves_its_fingerprints(tmp_path: Path) -> None:
    """Real transformers without any kernel package: the fallbacks are seen, and no kernel is."""
    env = observed.environment(tmp_path / "env", "5.24.0", {})
    output = tmp_path / "trace.json.gz"
    part = SubModel(path="", model_type="qwen3_5_text", raw=configs.QWEN3_5)
    trace, record = record_step(
        str(env.python), [part], ["position_ids"], output, dtype="float32", device="cpu", lengths=[9], timeout=180.0
    )
    assert read_trace(output) == trace
    assert len(record["steps"]) == 2, "the seconds of the steps before the recorded one"
    assert trace.launches == 0
    assert trace.ops["aten::mm"] > 0
    delta, conv = fast_paths(
        trace, [("fla", "chunk_gated_delta_rule"), ("causal_conv1d", "causal_conv1d_fn")], VERSIONS
    )
    assert (delta.forward, delta.backward) == (False, False)
    assert "aten::linalg_solve_triangular" in delta.fallbacks[0]
    assert "aten::conv1d" in conv.fallbacks[0]


@pytest.mark.observed
def test_a_step_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    env = observed.environment(tmp_path / "env", None, {})
    part = SubModel(path="", model_type="qwen3_5_text", raw=configs.QWEN3_5)
    with pytest.raises(UndeterminedError, match="No module named 'transformers'"):
        record_step(str(env.python), [part], [], tmp_path / "t.json", device="cpu", dtype="float32", timeout=120.0)
