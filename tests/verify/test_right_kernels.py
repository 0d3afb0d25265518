"""Right kernels of every family pass at ragged packed lengths, and a wrong one of each family does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from many import probe_many
from ops import RIGHT

import observed
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.values import Outcome, ProbeResult

pytestmark = pytest.mark.observed

RAGGED = (63, 1, 65)
LINEAR: dict[str, Any] = {"k_heads": 2, "v_heads": 4, "k_dim": 8, "v_dim": 8}
SSD: dict[str, Any] = {"heads": 4, "head_dim": 8, "groups": 2, "state": 8, "chunk": 16, "width": 4, "hidden": 16}
ATTENTION: dict[str, Any] = {"q_heads": 4, "kv_heads": 2, "head_dim": 16}
CONV: dict[str, Any] = {"channels": 12, "width": 4, "activation": "silu", "bias": True}
INNER: dict[str, Any] = {"channels": 16, "state": 8, "rank": 8, "width": 4, "hidden": 16}
STEP: dict[str, Any] = {"lengths": (1,), "packed": False, "state": True, "trains": False, "backward": False}


def request(symbol: str, op: str, shape: dict[str, Any], **options: Any) -> ProbeRequest:
    case = {key: options.pop(key) for key in ("lengths", "packed", "state") if key in options}
    cases = (Case(name="ragged", **{"lengths": RAGGED, "packed": True, "repeats": 2, "shape": shape, **case}),)
    return ProbeRequest(symbol=symbol, package="right", module="right", op=op, cases=cases, **options)


REQUESTS = {
    "delta": request("chunk_gated_delta_rule", "gated_delta_rule", LINEAR),
    "delta-unpacked": request("chunk_gated_delta_rule", "gated_delta_rule", LINEAR, lengths=(70,), packed=False),
    "delta-fp32": request("chunk_gated_delta_rule", "gated_delta_rule", LINEAR, dtype="float32"),
    "recurrent": request(
        "fused_recurrent_gated_delta_rule",
        "recurrent_gated_delta_rule",
        LINEAR,
        lengths=(1,),
        packed=False,
        state=True,
        trains=False,
    ),
    "kda": request("chunk_kda", "kda", LINEAR),
    "conv": request("causal_conv1d_fn", "causal_conv1d", CONV),
    "packed-conv": request("packed_convolution", "packed_convolution", {**CONV, "bias": False, "keys": 4}),
    "packed-conv-alone": request(
        "packed_convolution", "packed_convolution", {**CONV, "bias": False, "keys": 4}, lengths=(70,), packed=False
    ),
    "fla-conv": request("fla_convolution", "fla_convolution", CONV),
    "gated-norm": request("FusedRMSNormGated", "gated_rms_norm", {"size": 16, "heads": [4]}),
    "norm": request("rms_norm", "rms_norm", {"size": 16}),
    "norm-gemma": request("rms_norm", "rms_norm", {"size": 16, "offset": 1.0}),
    "swiglu": request("swiglu", "swiglu", {"size": 16}),
    "loss": request("linear_cross_entropy", "linear_cross_entropy", {"hidden": 16, "vocabulary": 50}),
    "experts": request("grouped_mm", "grouped_mm", {"experts": 4, "hidden": 16, "intermediate": 8}),
    "flash-varlen": request("flash_attn_varlen_func", "flash_varlen", ATTENTION),
    "flash": request("flash_attn_func", "flash", ATTENTION),
    "sdpa": request("F.scaled_dot_product_attention", "sdpa", ATTENTION),
    "ssd": request("mamba_chunk_scan_combined", "chunk_scan", SSD),
    "mamba2": request("mamba_split_conv1d_scan_combined", "split_conv1d_scan", SSD),
    "scan": request("selective_scan_fn", "selective_scan", {"channels": 6, "state": 4}, lengths=(65,), packed=False),
    "flex": request("flex_attention", "flex", ATTENTION),
    "conv-step": request("causal_conv1d_update", "causal_conv1d_update", CONV, **STEP),
    "ssd-step": request("selective_state_update", "state_update", SSD, **STEP),
    "scan-step": request("selective_state_update", "state_update", {"channels": 6, "state": 4}, **STEP),
    "inner": request("mamba_inner_fn", "mamba_inner", INNER, lengths=(37,), packed=False),
    "inner-norms": request("mamba_inner_fn", "mamba_inner", {**INNER, "norms": True}, lengths=(37,), packed=False),
}
DECODES = {"recurrent", "conv-step", "ssd-step", "scan-step"}
# The same with one thing in the kernel spoilt: (text, by what, the tensor in which it must be seen).
SPOILT = {
    "delta": ("u = beta[:, t, :, None] *", "u = beta[:, t, :, None].detach() *", "gradient of beta"),
    "kda": ("g[:, t, :, :, None].exp()", "g[:, t, :, :, None].exp().detach()", "gradient of g"),
    "recurrent": ("q = q * (q.shape[-1] ** -0.5)", "q = q * 0.9 * (q.shape[-1] ** -0.5)", "output"),
    "conv": ("if seq_idx is not None:\n            cuts", "if False:\n            cuts", "output"),
    "packed-conv": ("return y.split([key, key,", "return (y * 1.02).split([key, key,", "query"),
    "fla-conv": ("if cu_seqlens is not None:\n        ids", "if False:\n        ids", "output"),
    "gated-norm": ("F.silu(g.float())).to", "torch.sigmoid(g.float())).to", "output"),
    "norm": ("(w.float() + offset)", "(w.float().detach() + offset)", "gradient of weight"),
    "loss": (".float(), labels)", ".float(), labels.roll(1))", "gradient of weight"),
    "experts": ("x[a:b] @ weight[e]", "x[a:b] @ weight[e].detach()", "gradient of weight"),
    "flash-varlen": ("enable_gqa=True)[0]", "enable_gqa=True, scale=0.2)[0]", "output"),
    "ssd": ("dt = F.softplus(dt + dt_bias)", "dt = F.softplus(dt + dt_bias.detach())", "gradient of dt_bias"),
    "mamba2": (".unflatten(-1, (ngroups, -1))\n", ".unflatten(-1, (1, -1))\n", "output"),
    "flex": ("attn_mask=seen", "is_causal=True", "output"),
    "conv-step": ("conv_state.copy_(seen[..., 1:])", "conv_state.copy_(seen[..., :-1])", "state"),
    "ssd-step": ("(h * C).sum(-1) + D * xs", "(h * C).sum(-1)", "output"),
    "scan-step": ("h.copy_((steps", "h.copy_((0.9 * steps", "state"),
    "inner": (
        "delta = (dt @ delta_proj_weight.T)",
        "delta = (dt @ delta_proj_weight.T.detach())",
        "gradient of delta_proj_weight",
    ),
    "inner-norms": ("(C, c_rms_weight)", "(C, c_rms_weight.detach())", "gradient of c_rms_weight"),
    "scan": ("u * D[:, None]) *", "u * D[:, None].detach()) *", "gradient of D"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProbeResult]:
    env = observed.environment(tmp_path_factory.mktemp("right"), None, {"right.py": RIGHT})
    return probe_many(env.python, REQUESTS, env.prefix)


# What transformers' loader of hub attention hands out, or does not.
HUB = """
import types, right

def load_and_register_attn_kernel(name):
    if name.endswith("/absent"):
        raise ValueError(f"An error occurred while trying to load from '{name}'")
    if name.endswith("/own-way"):
        return types.SimpleNamespace(flash_attn_forward=None)
    return right
"""
HUB_REQUESTS = {
    name.partition("/")[2]: ProbeRequest(
        symbol=name, package="kernels", module="hub_kernels", op="flash_varlen", cases=REQUESTS["flash-varlen"].cases,
        hub_attention=name,
    )
    for name in ("org/flash-attn2", "org/own-way", "org/absent")
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProbeResult]:
    env = observed.environment(tmp_path_factory.mktemp("hub"), None, {"right.py": RIGHT, "hub_kernels.py": HUB})
    return probe_many(env.python, HUB_REQUESTS, env.prefix)


def test_hub_attention_is_what_transformers_loads(hub: dict[str, ProbeResult]) -> None:
    found = hub["flash-attn2"]
    assert (found.outcome, found.target) == (Outcome.RIGHT, "org/flash-attn2.flash_attn_varlen_func")
    assert hub["absent"].outcome is Outcome.RAISED
    assert "An error occurred while trying to load" in hub["absent"].reason
    assert hub["own-way"].outcome is Outcome.REFERENCE, "no fault of the kernel that it cannot be called from here"


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProbeResult]:
    files, requests = {}, {}
    for name, (old, new, _) in SPOILT.items():
        assert RIGHT.count(old) >= 1, old
        module = f"spoilt_{name.replace('-', '_')}"
        files[f"{module}.py"] = RIGHT.replace(old, new)
        r = REQUESTS[name]
        requests[name] = ProbeRequest(
            symbol=r.symbol,
            package=module,
            module=module,
            op=r.op,
            cases=r.cases,
            trains=r.trains,
            backward=r.backward,
        )
    env = observed.environment(tmp_path_factory.mktemp("spoilt"), None, {**files, "right.py": RIGHT})
    return probe_many(env.python, requests, env.prefix)


@pytest.mark.parametrize("name", REQUESTS)
def test_a_right_kernel_is_right(name: str, right: dict[str, ProbeResult]) -> None:
    expected = Outcome.NO_BACKWARD if name in DECODES else Outcome.RIGHT
    assert right[name].outcome is expected, right[name].reason
    assert right[name].deterministic is True


@pytest.mark.parametrize("name", SPOILT)
def test_one_wrong_thing_is_seen_and_named(name: str, spoilt: dict[str, ProbeResult]) -> None:
    assert spoilt[name].outcome is Outcome.WRONG, spoilt[name]
    wrong = {t.label for c in spoilt[name].cases for t in c.tensors if t.state != "right"}
    assert SPOILT[name][2] in wrong


def test_every_input_and_parameter_has_a_gradient_that_was_compared(right: dict[str, ProbeResult]) -> None:
    names = {name: {t.name for t in r.cases[0].tensors if t.role == "gradient"} for name, r in right.items()}
    assert names["delta"] == {"q", "k", "v", "g", "beta"}
    assert names["conv"] == {"x", "weight", "bias"}
    assert names["mamba2"] == {
        "zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "rmsnorm_weight", "outproj_weight",
    }  # fmt: skip


def test_both_numbers_stand_beside_each_tensor(right: dict[str, ProbeResult]) -> None:
    for name, result in right.items():
        for tensor in result.cases[0].tensors:
            assert tensor.error is not None, (name, tensor)
            assert tensor.plain is not None
            assert tensor.allowed is not None
            assert tensor.error <= tensor.allowed


def test_the_tolerance_follows_the_dtype(right: dict[str, ProbeResult]) -> None:
    """fp32 may lose no more than TF32 products do; the bf16 tolerance would let four times as much pass."""
    low = max(t.allowed or 0.0 for t in right["delta-fp32"].cases[0].tensors)
    high = min(t.allowed or 0.0 for t in right["delta"].cases[0].tensors)
    assert low < high


def test_reasons_are_sentences_about_the_kernel(spoilt: dict[str, ProbeResult]) -> None:
    assert "where plain torch is off by" in spoilt["conv"].reason
    assert Path(spoilt["conv"].file).name == "spoilt_conv.py"
