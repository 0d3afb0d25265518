"""The plan: real architectures as their own code declares them, mapped to kernels, shapes and lengths."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import packages
import pytest

import configs
import observed
from command import ROOT
from kernelguard import declare
from kernelguard.data import examples
from kernelguard.declare.modes import HubLayers
from kernelguard.declare.values import Declaration, Intent, Phase
from kernelguard.errors import InputError, UndeterminedError
from kernelguard.judge.values import Level, Status
from kernelguard.observe.interpreter import observe
from kernelguard.observe.values import Binding, Bindings, BoundTo, Environment
from kernelguard.verify.cache import cache_variables
from kernelguard.verify.files import from_document, to_document, violations
from kernelguard.verify.findings import findings
from kernelguard.verify.fingerprint import shapes_digest
from kernelguard.verify.plan import _COLUMNS, TRAINING_LENGTH, language_parts, plan
from kernelguard.verify.probing import run_probe
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.run import _absent, verify, worker_environment
from kernelguard.verify.values import Outcome

pytestmark = pytest.mark.observed

DECODING = Intent(phase=Phase.DECODING, use_cache=True)
PACKED = Intent(packed=True, signals=("position_ids", "cu_seq_lens_q", "seq_idx"))


def test_what_comes_later_keeps_its_minute_and_nothing_outlasts_the_whole_time() -> None:
    import time

    from kernelguard.verify.run import _Run

    blank: Any = None
    run = _Run(
        python="", declaration=blank, intent=blank, level=blank, length=1, environ={}, end=time.monotonic() + 300.0,
        isolates=True, records=True, shards=1, compiled=None, earlier=None, prints=blank, progress=blank,
    )  # fmt: skip
    assert run.room(2) == pytest.approx(180, abs=1), "isolation and the recorded step follow"
    assert run.room(2, 3) == pytest.approx(60, abs=1)
    assert run.room(1) == pytest.approx(240, abs=1)
    assert replace(run, end=time.monotonic() + 90.0).room(2) == pytest.approx(60, abs=1)
    assert replace(run, end=time.monotonic() + 20.0).room(2) == pytest.approx(20, abs=1), "never more than there is"


def declared(folder: Path, raw: dict[str, Any]) -> Declaration:
    tree = declare.find_tree(observed.transformers_base("5.24.0").site / "transformers")
    return declare.declare(declare.read_config(str(configs.write(folder, raw))), tree)


def by_symbol(requests: tuple[ProbeRequest, ...]) -> dict[str, ProbeRequest]:
    return {r.symbol: r for r in requests}


def the_27b(release: str) -> Declaration:
    tree = declare.find_tree(observed.transformers_base(release).site / "transformers")
    return declare.declare(declare.read_config(str(examples() / "qwen3.8-27b")), tree)


@pytest.mark.parametrize(("release", "keys"), [("5.17.0", 48), ("5.24.0", 16)])
def test_key_heads_reach_the_probe_as_this_release_hands_them_on(release: str, keys: int) -> None:
    """A layer repeated them itself until transformers left that to its PyTorch fallback."""
    declaration = the_27b(release)
    for intent, symbol in ((PACKED, "chunk_gated_delta_rule"), (DECODING, "fused_recurrent_gated_delta_rule")):
        cases = by_symbol(plan(declaration, intent))[symbol].cases
        assert {(case.shape["k_heads"], case.shape["v_heads"]) for case in cases} == {(keys, 48)}
    grouped = by_symbol(plan(declaration, replace(PACKED, grouped_heads=True)))["chunk_gated_delta_rule"]
    assert {case.shape["k_heads"] for case in grouped.cases} == {16}, "the bundled trainer's layers never repeat"


@pytest.mark.parametrize("release", ["5.12.0", "5.17.0"])
def test_the_gated_norm_that_only_the_trainer_calls_is_probed_and_tuned_at_its_size(release: str) -> None:
    """fla's; transformers had it too and has it in PyTorch since. Its tuning key holds the number of rows."""
    declaration = the_27b(release)
    found = [r for r in plan(declaration, replace(PACKED, grouped_heads=True), length=8192) if r.op == "gated_rms_norm"]
    assert [(r.module, r.symbol) for r in found] == [("fla.modules", "FusedRMSNormGated")]
    assert [(c.name, c.lengths, c.force) for c in found[0].cases] == [
        ("rows", (517,), True), ("training", (8192,), True),
    ]  # fmt: skip
    assert {(c.shape["size"], *c.shape["heads"]) for c in found[0].cases} == {(128, 48)}
    declares = {"FusedRMSNormGated"} & set(by_symbol(plan(declaration, PACKED)))
    assert bool(declares) is (release == "5.12.0"), "who does not run the trainer is asked what the model calls"


def test_the_trainers_own_convolution_is_probed_beside_the_models() -> None:
    declaration = the_27b("5.24.0")
    found = by_symbol(plan(declaration, replace(PACKED, grouped_heads=True, own_convolution=True)))
    own, models = found["packed_convolution"], found["causal_conv1d_fn"]
    assert (own.module, own.stands_for) == ("kernelguard_train.kernels", "causal_conv1d_fn")
    assert models.stands_for == ""
    assert [c.lengths for c in own.cases] == [c.lengths for c in models.cases]
    assert dict(own.cases[0].shape) == {**models.cases[0].shape, "keys": 16 * 128}
    assert "packed_convolution" not in by_symbol(plan(declaration, replace(PACKED, grouped_heads=True)))


def test_without_the_trainer_its_convolution_is_left_out_and_any_other_failure_is_not(tmp_path: Path) -> None:
    """An image is verified before the trainer is put on it; the trainer takes the model's convolution then."""
    request = next(
        r for r in plan(the_27b("5.24.0"), replace(PACKED, grouped_heads=True, own_convolution=True)) if r.stands_for
    )
    bare = observed.environment(tmp_path / "bare", None)
    absent = run_probe(str(bare.python), request, timeout=60.0, device="cpu")
    assert absent.outcome is Outcome.RAISED
    assert _absent(request, absent)
    assert not _absent(replace(request, stands_for=""), absent)
    files = {"kernelguard_train/__init__.py": "", "kernelguard_train/kernels.py": "import no_such_triton\n"}
    broken = run_probe(
        str(observed.environment(tmp_path / "broken", None, files).python), request, timeout=60.0, device="cpu"
    )
    assert broken.outcome is Outcome.RAISED
    assert not _absent(request, broken), "the trainer is there, and would fail"


@pytest.mark.parametrize(
    "changed",
    [{"linear_conv_kernel_dim": 3}, {"linear_num_key_heads": 3, "linear_key_head_dim": 32}, {"hidden_act": "relu"}],
)
def test_where_the_trainer_does_not_take_its_own_convolution_it_is_not_asked_for(
    changed: dict[str, Any], tmp_path: Path
) -> None:
    """As kernelguard_train/kernels.py has it, which needs Triton to be imported."""
    kernels = (ROOT / "train" / "kernelguard_train" / "kernels.py").read_text(encoding="utf-8")
    assert re.search(rf"^ROWS, COLUMNS, .* = \d+, {_COLUMNS}, ", kernels, re.MULTILINE)
    assert "return weight.shape[1] == 4 and key % COLUMNS == 0 and weight.shape[0] % COLUMNS == 0" in kernels
    raw = {**configs.QWEN3_5, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64,
           "linear_value_head_dim": 64}  # fmt: skip
    intent = replace(PACKED, grouped_heads=True, own_convolution=True)
    assert "packed_convolution" in by_symbol(plan(declared(tmp_path / "a", raw), intent))
    assert "packed_convolution" not in by_symbol(plan(declared(tmp_path / "b", {**raw, **changed}), intent))


def test_where_the_source_does_not_tell_both_calls_are_measured() -> None:
    declaration = the_27b("5.24.0")
    unknown = tuple(replace(path, repeats_heads=None) for path in declaration.fast_paths)
    cases = by_symbol(plan(replace(declaration, fast_paths=unknown), PACKED))["chunk_gated_delta_rule"].cases
    assert [(case.name, case.shape["k_heads"]) for case in cases] == [
        ("ragged", 48),
        ("training", 48),
        ("ragged, grouped", 16),
        ("training, grouped", 16),
    ]


def test_the_27b_is_probed_at_its_own_shapes() -> None:
    declaration = the_27b("5.24.0")
    found = by_symbol(plan(declaration, PACKED))
    assert set(found) == {"chunk_gated_delta_rule", "causal_conv1d_fn", "scaled_dot_product_attention"}
    delta = found["chunk_gated_delta_rule"]
    assert delta.cases[0].shape == {"k_heads": 16, "v_heads": 48, "k_dim": 128, "v_dim": 128}
    assert found["causal_conv1d_fn"].cases[0].shape == {
        "channels": 2 * 16 * 128 + 48 * 128,
        "width": 4,
        "activation": "silu",
        "bias": False,
    }
    attention = found["scaled_dot_product_attention"].cases[0]
    assert attention.shape == {"q_heads": 24, "kv_heads": 4, "head_dim": 256}
    assert {1, 63, 64, 65} <= set(delta.cases[0].lengths)
    assert all(sum(r.cases[-1].lengths) == TRAINING_LENGTH for r in found.values())
    assert delta.cases[0].force
    assert delta.cases[0].packed
    assert delta.dtype == "bfloat16"
    assert next(p.model_type for p in language_parts(declaration)) == "qwen3_5_text"


@pytest.mark.parametrize(
    ("raw", "symbol", "op", "shape"),
    [
        (configs.QWEN3_NEXT, "chunk_gated_delta_rule", "gated_delta_rule", {"k_heads": 2, "v_heads": 4, "k_dim": 16}),
        (configs.MAMBA2, "mamba_split_conv1d_scan_combined", "split_conv1d_scan", {"heads": 8, "groups": 1}),
        (configs.BAMBA, "mamba_split_conv1d_scan_combined", "split_conv1d_scan", {"heads": 8, "state": 16}),
        (configs.JAMBA, "selective_scan_fn", "selective_scan", {"channels": 128, "state": 8}),
        (configs.LLAMA, "scaled_dot_product_attention", "sdpa", {"q_heads": 4, "kv_heads": 2, "head_dim": 16}),
    ],
    ids=["qwen3_next", "mamba2", "bamba", "jamba", "llama"],
)
def test_other_architectures(raw: dict[str, Any], symbol: str, op: str, shape: dict[str, int], tmp_path: Path) -> None:
    found = by_symbol(plan(declared(tmp_path, raw), Intent()))
    assert found[symbol].op == op
    assert shape.items() <= dict(found[symbol].cases[0].shape).items()
    assert not found[symbol].cases[0].packed or op == "sdpa"


def test_the_runs_own_choices_bring_kernels_in(tmp_path: Path) -> None:
    declaration = declared(tmp_path, configs.QWEN3_NEXT)
    found = by_symbol(plan(declaration, Intent(liger=True, attn_implementation="flash_attention_2")))
    assert found["flash_attn_varlen_func"].op == "flash_varlen"
    assert found["grouped_mm"].cases[0].shape["experts"] == 4
    assert {s for s in found if s.startswith("liger")} == {
        "liger_fused_linear_cross_entropy", "liger_rms_norm", "liger_swiglu",
    }  # fmt: skip
    eager = by_symbol(plan(declaration, Intent(experts_implementation="eager", attn_implementation="some-hub/attn")))
    assert "grouped_mm" not in eager
    assert (eager["some-hub/attn"].op, eager["some-hub/attn"].hub_attention) == ("flash_varlen", "some-hub/attn")
    flex = by_symbol(plan(declaration, Intent(attn_implementation="flex_attention")))
    assert flex["flex_attention"].op == "flex"
    unknown = by_symbol(plan(declaration, Intent(attn_implementation="of-my-own")))
    assert unknown["of-my-own"].op == ""


def test_use_kernels_brings_in_what_the_hub_replaces_in_training(tmp_path: Path) -> None:
    declaration = declared(tmp_path, configs.QWEN3_5)
    hub = {r.symbol: r for r in plan(declaration, Intent(use_kernels=True)) if r.package == "kernels"}
    [fact] = [fact for fact in declaration.modes if isinstance(fact, HubLayers)]
    on_cuda = {x.layer: {o.training for o in x.options if o.device == "cuda"} for x in fact.layers}
    assert on_cuda["causal_conv1d_update"] == {True, False}, "the premise: a step of decoding is mapped for training"
    assert on_cuda["fused_recurrent_gated_delta_rule"] == {False}
    assert set(hub) == {"RMSNormGated", "Qwen3_5GatedDeltaNet", "causal_conv1d_fn", "chunk_gated_delta_rule"}
    on_hopper = plan(declaration, Intent(use_kernels=True), capabilities=[(9, 0)])
    assert {r.symbol for r in on_hopper if r.package == "kernels"} == set(hub) - {"Qwen3_5GatedDeltaNet"}
    request = hub["chunk_gated_delta_rule"]
    assert (request.op, request.model["parts"][0]["model_type"]) == ("layer", "qwen3_5_text")
    assert [sum(case.lengths) for case in request.cases] == [321, TRAINING_LENGTH]
    assert request.cases[0].force, "a Triton kernel may be behind it"
    assert not [r for r in plan(declaration, Intent()) if r.package == "kernels"]


def test_what_the_configuration_does_not_tell_has_no_probe(tmp_path: Path) -> None:
    raw = {k: v for k, v in configs.QWEN3_5.items() if k != "linear_key_head_dim"}
    found = by_symbol(plan(declared(tmp_path, raw), Intent()))
    assert found["chunk_gated_delta_rule"].op == ""


def test_decoding_probes_the_one_token_kernels_and_expects_no_backward(tmp_path: Path) -> None:
    found = by_symbol(plan(declared(tmp_path, configs.QWEN3_5), Intent(phase=Phase.DECODING)))
    one = found["fused_recurrent_gated_delta_rule"]
    assert one.op == "recurrent_gated_delta_rule"
    assert not one.trains
    assert one.cases[0].lengths == (1,)
    assert one.cases[0].state
    step = found["causal_conv1d_update"]
    assert (step.op, step.backward, step.trains) == ("causal_conv1d_update", False, False)
    for raw, shape in ((configs.MAMBA2, {"heads": 8}), (configs.JAMBA, {"channels": 128})):
        update = by_symbol(plan(declared(tmp_path, raw), Intent(phase=Phase.DECODING)))["selective_state_update"]
        assert (update.op, update.backward) == ("state_update", False)
        assert shape.items() <= dict(update.cases[0].shape).items()


def test_the_digest_of_shapes_changes_with_them_and_not_with_their_order(tmp_path: Path) -> None:
    requests = plan(declared(tmp_path, configs.QWEN3_5), PACKED)
    assert shapes_digest(requests) == shapes_digest(tuple(reversed(requests)))
    assert shapes_digest(requests) != shapes_digest(plan(declared(tmp_path, configs.QWEN3_5), PACKED, length=512))
    assert shapes_digest(requests) != shapes_digest([replace(r, dtype="float16") for r in requests])


def test_an_environment_file_cannot_be_verified(tmp_path: Path) -> None:
    with pytest.raises(UndeterminedError, match="nothing can be executed"):
        verify(declared(tmp_path, configs.LLAMA), Intent(), Environment(origin="file e.json", live=False))


def test_the_warm_cache_is_where_a_training_process_will_look(tmp_path: Path) -> None:
    found = worker_environment({"PATH": "/bin"}, level=Level.GPU, warm_cache=tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert found["TRITON_CACHE_DIR"] == str(tmp_path / "a" / "b")
    assert cache_variables(tmp_path / "a" / "b").items() <= found.items()
    assert "TRITON_INTERPRET" not in found
    assert worker_environment({}, level=Level.INTERPRETED, warm_cache=None) == {"TRITON_INTERPRET": "1"}
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot make the cache folder"):
        worker_environment({}, level=Level.GPU, warm_cache=tmp_path / "file" / "x")


def test_a_whole_model_without_a_gpu(tmp_path: Path) -> None:
    """Everything is right and isolated there, and still no number passes."""
    env = observed.environment(tmp_path / "env", "5.24.0", packages.working())
    environment = observe(str(env.python), gpu=False)
    declaration = declared(tmp_path / "m", configs.QWEN3_5)
    # The convolution is not what this model is bound to, so what it computes does not matter.
    module = "transformers.models.qwen3_5.modeling_qwen3_5"
    bound = Bindings(bindings=(Binding(symbol="causal_conv1d_fn", module=module, bound_to=BoundTo.TORCH),))
    said: list[str] = []
    verdict = verify(
        declaration,
        PACKED,
        environment,
        bindings=bound,
        level=Level.INTERPRETED,
        timeout=300.0,
        length=67,
        shards=1,
        progress=said.append,
    )
    assert {p.symbol: p.outcome for p in verdict.probes} == {
        "chunk_gated_delta_rule": Outcome.RIGHT,
        "scaled_dot_product_attention": Outcome.RIGHT,
    }
    assert [c.isolated for c in verdict.isolation] == [True, False, False, False]
    assert any(text.startswith("1/2 chunk_gated_delta_rule") for text in said)
    document = to_document(verdict)
    assert violations(document) == []
    assert from_document(document, source="x") == verdict
    assert {row["numbers"] for row in document["probes"]} == {"unknown"}
    assert verdict.fingerprint.transformers == "5.24.0"
    assert verdict.fingerprint.distributions["fla-core"] == "0.6.0"
    found = {f.code: f.status for f in findings(verdict)}
    assert found == {"interpreted": Status.PASS, "isolation-not-verified": Status.UNKNOWN}


def test_at_the_import_level_nothing_is_executed(tmp_path: Path) -> None:
    files = packages.working()
    del files["fla/ops/gated_delta_rule/__init__.py"]
    files["fla/__init__.py"] = files["fla/ops/__init__.py"] = ""
    env = observed.environment(tmp_path / "env", "5.24.0", files)
    verdict = verify(
        declared(tmp_path / "m", configs.QWEN3_5), PACKED, observe(str(env.python), gpu=False), level=Level.IMPORT
    )
    found = {p.symbol: p.outcome for p in verdict.probes}
    assert found["causal_conv1d_fn"] is Outcome.LOADED
    assert found["chunk_gated_delta_rule"] is Outcome.RAISED
    assert verdict.isolation == ()
    assert {f.code: f.status for f in findings(verdict)} == {"loads": Status.PASS, "kernel-raises": Status.FAIL}
