"""Packed isolation in real transformers models: clean only with every signal, and each one left out makes it fail."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import packages
import pytest

import configs
import kernelguard.workers
import observed
from kernelguard.declare.values import SubModel
from kernelguard.verify.isolation import run_isolation, signal_sets
from kernelguard.verify.values import SignalCheck

pytestmark = pytest.mark.observed

ALL = ("position_ids", "cu_seq_lens_q", "seq_idx")
SIX = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
SINGLE = tuple(((name,), "") for name in ALL)


VERSIONS = ("5.16.1", "5.17.0", "5.24.0")


def check(  # noqa: PLR0917 - rows of a table
    folder: Path, version: str, files: dict[str, str], sets: Any, raw: dict[str, Any], attention: str | None = None
) -> list[SignalCheck]:
    env = observed.environment(folder, version, files)
    part = SubModel(path="", model_type=raw["model_type"], raw=raw)
    found = run_isolation(
        str(env.python),
        [part],
        sets,
        dtype="float32",
        device="cpu",
        lengths=(11, 1, 7),
        attn_implementation=attention,
        timeout=180.0,
    )
    return list(found)


def deaf() -> dict[str, str]:
    """A chunk kernel that does not listen to boundaries."""
    files = packages.working()
    ops = files["fla/ops/gated_delta_rule/__init__.py"]
    told = "cuts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()"
    assert told in ops
    files["fla/ops/gated_delta_rule/__init__.py"] = ops.replace(told, "cuts = [0, q.shape[1]]")
    return files


def touched(change: str) -> dict[str, str]:
    """A chunk kernel that keeps states apart, and whose output other samples touch without any gradient."""
    files = packages.working()
    ops = files["fla/ops/gated_delta_rule/__init__.py"]
    told = "return torch.stack(outputs, 1).to(dtype), torch.cat(states) if output_final_state else None"
    assert told in ops
    new = f"total, out = v.detach().sum(), torch.stack(outputs, 1)\n    return ({change}).to(dtype), None"
    files["fla/ops/gated_delta_rule/__init__.py"] = ops.replace(told, new)
    return files


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[SignalCheck]]:
    every = (*signal_sets(ALL), *SINGLE)
    one = signal_sets(ALL)[:1]
    unknown = {**configs.QWEN3_5, "model_type": "qwen99"}
    jobs: dict[str, Any] = {v: (v, packages.working(), every, configs.QWEN3_5) for v in VERSIONS}
    jobs["deaf"] = ("5.24.0", deaf(), one, configs.QWEN3_5)
    jobs["rounded"] = ("5.24.0", touched("(out + total / 16) - total / 16"), one, configs.QWEN3_5)
    jobs["silent"] = ("5.24.0", touched("out + 1e-3 * total"), one, configs.QWEN3_5)
    live = "v.sum() - v.sum()"
    jobs["nan"] = ("5.24.0", touched(f"out + 0.0 * torch.sqrt({live})"), one, configs.QWEN3_5)
    jobs["varlen"] = ("5.24.0", packages.working(), signal_sets(ALL), configs.QWEN3_5, "varlen")
    jobs["six names"] = ("5.24.0", packages.working(), signal_sets(SIX), configs.QWEN3_5, "varlen")
    jobs["unknown"] = ("5.24.0", {}, one, unknown)
    folder = tmp_path_factory.mktemp("isolation")
    with ThreadPoolExecutor(2) as pool:
        done = {name: pool.submit(check, folder / name, *job) for name, job in jobs.items()}
    return {name: job.result() for name, job in done.items()}


def test_what_attention_takes_together_is_left_out_together(results: dict[str, list[SignalCheck]]) -> None:
    """Each of the four alone would still be sent, and "without it" would be said of a run that had it."""
    every, *rest = results["six names"]
    assert every.isolated is True, every
    assert {c.left_out: c.isolated for c in rest} == {
        "position_ids": True, ", ".join(SIX[1:5]): False, "seq_idx": False,
    }  # fmt: skip
    assert [set(SIX) - set(c.signals) for c in rest] == [set(c.left_out.split(", ")) for c in rest]


@pytest.mark.parametrize("version", VERSIONS)
def test_clean_with_all_signals_and_leaks_with_any_left_out(
    version: str, results: dict[str, list[SignalCheck]]
) -> None:
    every, *rest = results[version]
    assert every.isolated is True, every
    assert every.leak_gradient == every.leak_logit == 0.0
    assert every.loss_packed == pytest.approx(every.loss_unpacked, rel=1e-6)
    assert every.worst_error is not None
    assert every.allowed is not None
    assert every.worst_error <= every.allowed < 1e-4
    assert [c.left_out for c in rest[:3]] == list(ALL)
    for one in rest:
        assert one.isolated is False, one
        assert (one.leak_gradient or 0.0) > 1e-3
        assert (one.leak_logit or 0.0) > 1e-3
    linear, attention = "Qwen3_5GatedDeltaNet", "Qwen3_5Attention"
    blamed = {c.left_out: " ".join(c.leaking_layers) for c in rest[:3]}
    assert attention in blamed["position_ids"]
    assert linear not in blamed["position_ids"]
    assert linear in blamed["cu_seq_lens_q"]
    assert linear in blamed["seq_idx"]
    assert all((c.worst_error or 0.0) > 100 * (c.allowed or 0.0) for c in rest[:3])


def test_a_kernel_that_ignores_boundaries_leaks_whatever_is_sent(results: dict[str, list[SignalCheck]]) -> None:
    (found,) = results["deaf"]
    assert found.isolated is False
    assert found.leaking_layers
    assert all("GatedDeltaNet" in layer for layer in found.leaking_layers)


def test_rounding_that_crosses_a_boundary_is_no_leak(results: dict[str, list[SignalCheck]]) -> None:
    """As in Mamba-2's scan, which adds up across boundaries: on an H200 by a unit in the last place."""
    (found,) = results["rounded"]
    assert found.isolated is True, found
    assert found.leak_gradient == 0.0
    assert 0.0 < (found.leak_logit or 0.0) <= found.allowed_logit < 1e-4


def test_a_leak_without_a_gradient_is_one_all_the_same(results: dict[str, list[SignalCheck]]) -> None:
    (found,) = results["silent"]
    assert found.isolated is False
    assert found.leak_gradient == 0.0
    assert (found.leak_logit or 0.0) > 10 * found.allowed_logit


def test_a_gradient_that_is_no_number_is_no_zero(results: dict[str, list[SignalCheck]]) -> None:
    (found,) = results["nan"]
    assert found.isolated is None
    assert "gradient: not finite in the cut-down model" in found.detail


def test_a_model_that_cannot_be_built_is_could_not_tell(results: dict[str, list[SignalCheck]]) -> None:
    (found,) = results["unknown"]
    assert found.isolated is None
    assert "qwen99: unknown to this transformers" in found.detail


KEEPS = """
import importlib.util, json, sys
import torch
spec = importlib.util.spec_from_file_location("isolation", sys.argv[1])
isolation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(isolation)
request = {"parts": [json.loads(sys.argv[2])], "dtype": "float32", "device": "cpu", "lengths": [5, 3]}
class Out:
    def stage(self, name): pass
model = isolation.Model(request, Out())
import fla.ops.gated_delta_rule as ops
heads, inner = [], {}
for home in {sys.modules[type(m).__module__] for m in model.model.modules()}:
    for name in ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        if name in vars(home):
            inner[home, name] = vars(home)[name]
def recorded(function):
    def call(q, k, v, **kwargs):
        heads.append((q.shape[2], k.shape[2], v.shape[2]))
        return function(q, k, v, **kwargs)
    return call
for (home, name), function in inner.items():
    setattr(home, name, recorded(ops.chunk_gated_delta_rule))
for module in model.model.modules():
    if "chunk_gated_delta_rule" in vars(module):
        module.chunk_gated_delta_rule = recorded(ops.chunk_gated_delta_rule)
every = ("position_ids", "cu_seq_lens_q", "seq_idx")
loss, before = model.gradients(model.signals(every))
seen, heads[:] = list(heads), []
isolation.keep_groups(model.model)
isolation.keep_groups(model.model)
again, after = model.gradients(model.signals(every))
worst = max(float((after[n] - before[n]).norm() / (before[n].norm() + 1e-6)) for n in before)
print(json.dumps({"before": seen, "after": heads, "loss": [loss, again], "worst": worst}))
"""


@pytest.mark.parametrize(("version", "before"), [("5.16.1", 4), ("5.17.0", 4), ("5.24.0", 2)])
def test_key_heads_stay_grouped_where_the_training_keeps_them(version: str, before: int, tmp_path: Path) -> None:
    """The bundled trainer's layers do not repeat key heads; the cut-down model then calls the same kernels."""
    env = observed.environment(tmp_path, version, packages.working())
    worker = Path(kernelguard.workers.__file__).parent / "isolation.py"
    part = json.dumps({"model_type": configs.QWEN3_5["model_type"], "raw": configs.QWEN3_5})
    command = [str(env.python), "-c", KEEPS, str(worker), part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {tuple(h) for h in found["before"]} == {(before, before, 4)}
    assert {tuple(h) for h in found["after"]} == {(2, 2, 4)}
    assert found["loss"][0] == pytest.approx(found["loss"][1], rel=1e-6)
    assert found["worst"] < 1e-4


def test_torchs_varlen_attention_is_registered_as_the_bundled_trainer_does(
    results: dict[str, list[SignalCheck]],
) -> None:
    every, *rest = results["varlen"]
    assert every.isolated is True, every
    # It keeps samples apart by their boundaries, and rotary embeddings depend on distances alone.
    assert {c.left_out: c.isolated for c in rest} == {"position_ids": True, "cu_seq_lens_q": False, "seq_idx": False}
    blamed = {c.left_out: " ".join(c.leaking_layers) for c in rest}
    assert "Qwen3_5Attention" in blamed["cu_seq_lens_q"], "without boundaries all of it is one sample"
    assert "Qwen3_5Attention" not in blamed["seq_idx"]
