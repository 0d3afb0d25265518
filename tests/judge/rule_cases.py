"""For each shipped rule: a machine it is about, machines just outside each of its bounds, and a fact it needs.

A new rule needs a row here; `test_rules.py` says which condition has no machine that misses only that one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    """One rule's machines; `outside` are changes to `inside`."""

    inside: dict[str, Any]
    outside: tuple[dict[str, Any], ...]
    needs: str
    """Without this fact the rule is open."""


def _pkgs(**versions: str) -> dict[str, Any]:
    """Installed distributions; `_` stands for `-`."""
    return {"pkgs": {name.replace("_", "-"): version for name, version in versions.items()}}


GDN, KDA, CONV = "chunk_gated_delta_rule", "chunk_kda", "causal_conv1d_fn"
SPLIT, CHUNK, INNER = "mamba_split_conv1d_scan_combined", "mamba_chunk_scan_combined", "mamba_inner_fn"
FA2 = "flash_attention_2"
_HOPPER = {"gpu": "9.0", "symbols": GDN}
_BLACKWELL = {"gpu": "10.0", "symbols": GDN}
_NOT_HOPPER = ({"gpu": "8.0"}, {"gpu": "10.0"}, {"gpu": ()}, {"symbols": ()}, {"symbols": CONV})


def _window(inside: str, below: str, above: str, kernels: tuple[str, ...], good: tuple[str, ...]) -> Case:
    """A window of `kernels` releases that some transformers releases want."""
    return Case(
        {"transformers": inside, "use_kernels": True, **_pkgs(kernels=kernels[0])},
        (
            {"transformers": below},
            {"transformers": above},
            {"use_kernels": False},
            *(_pkgs(kernels=version) for version in good),
        ),
        "pkgs",
    )


CASES: dict[str, Case] = {
    "fla-hopper-dqkwg": Case(
        {**_HOPPER, "triton": "3.4.0", **_pkgs(fla_core="0.4.2")},
        (
            *_NOT_HOPPER,
            {"triton": "3.3.1"},
            {"triton": "3.7.1"},
            {"triton": None},
            {"phase": "decoding"},
            _pkgs(fla_core="0.5.0"),
            _pkgs(),
        ),
        "triton",
    ),
    "fla-hopper-dqkwg-raise": Case(
        {**_HOPPER, "triton": "3.7.1", **_pkgs(fla_core="0.5.1")},
        (
            *_NOT_HOPPER,
            {"triton": "3.3.1"},
            {"phase": "decoding"},
            _pkgs(fla_core="0.4.2"),
            _pkgs(fla_core="0.5.2"),
            _pkgs(fla_core="0.5.1", tilelang="0.1.12"),
        ),
        "pkgs",
    ),
    "fla-hopper-dqkwg-raise2": Case(
        {**_HOPPER, "triton": "3.7.0", **_pkgs(fla_core="0.6.0")},
        (
            *_NOT_HOPPER,
            {"triton": "3.3.1"},
            {"triton": "3.7.1"},
            {"phase": "decoding"},
            _pkgs(fla_core="0.5.1"),
            _pkgs(fla_core="0.6.0", tilelang="0.1.12"),
        ),
        "triton",
    ),
    "fla-hopper-delta-wy": Case(
        {"gpu": "9.0", "symbols": "chunk_delta_rule", "triton": "3.4.0", **_pkgs(fla_core="0.5.1")},
        (
            {"gpu": "10.0"},
            {"symbols": GDN},
            {"triton": "3.3.1"},
            {"phase": "decoding"},
            _pkgs(fla_core="0.5.2"),
        ),
        "gpu",
    ),
    "fla-hopper-state-bwd": Case(
        {"gpu": "9.0", "symbols": "chunk_gla", "triton": "3.7.1", "ptxas": "12.8", **_pkgs(fla_core="0.5.2")},
        (
            {"gpu": "10.0"},
            {"symbols": GDN},
            {"triton": "3.7.0"},
            {"triton": "3.8.0"},
            {"ptxas": "12.6"},
            {"ptxas": "13.1"},
            {"phase": "decoding"},
            _pkgs(fla_core="0.6.0"),
        ),
        "ptxas",
    ),
    "fla-hopper-gla-wgmma": Case(
        {"gpu": "9.0", "symbols": "chunk_gla", "triton": "3.6.0", **_pkgs(fla_core="0.5.2")},
        (
            {"gpu": "10.0"},
            {"symbols": GDN},
            {"triton": "3.5.1"},
            {"triton": "3.8.0"},
            {"phase": "decoding"},
            _pkgs(fla_core="0.6.0"),
        ),
        "triton",
    ),
    "triton-hopper-ptxas129": Case(
        {**_HOPPER, "ptxas": "12.9.86"},
        ({"gpu": "8.0"}, {"symbols": CONV}, {"ptxas": "12.8"}, {"ptxas": "13.0"}),
        "ptxas",
    ),
    "triton-320-hopper-abort": Case(
        {**_HOPPER, "triton": "3.2.0", **_pkgs(fla_core="0.2.2")},
        ({"gpu": "8.0"}, {"symbols": CONV}, {"triton": "3.1.0"}, {"triton": "3.3.0"}, _pkgs()),
        "triton",
    ),
    "fla-blackwell-fwdh-race": Case(
        {**_BLACKWELL, "gpu": "12.0", "triton": "3.7.1", **_pkgs(fla_core="0.5.1")},
        ({"gpu": "9.0"}, {"gpu": "8.9"}, {"symbols": CONV}, {"triton": "3.8.0"}, _pkgs(fla_core="0.5.2")),
        "pkgs",
    ),
    "fla-blackwell-fwdo-race": Case(
        {**_BLACKWELL, "gpu": "10.3", "triton": "3.7.1", **_pkgs(fla_core="0.5.2")},
        (
            {"gpu": "9.0"},
            {"symbols": KDA},
            {"triton": "3.8.0"},
            _pkgs(fla_core="0.5.1"),
            _pkgs(fla_core="0.6.0"),
        ),
        "triton",
    ),
    "fla-blackwell-bwd-hang": Case(
        {**_BLACKWELL, **_pkgs(fla_core="0.5.1")},
        ({"gpu": "9.0"}, {"symbols": KDA}, {"phase": "decoding"}, _pkgs(fla_core="0.5.2")),
        "gpu",
    ),
    "fla-blackwell-hoist-tmem": Case(
        {**_BLACKWELL, **_pkgs(fla_core="0.4.0")},
        ({"gpu": "9.0"}, {"symbols": KDA}, {"phase": "decoding"}, _pkgs(fla_core="0.4.1")),
        "pkgs",
    ),
    "fla-blackwell-sm120-undetected": Case(
        {**_BLACKWELL, "gpu": "12.0", **_pkgs(fla_core="0.5.0")},
        ({"gpu": "10.0"}, {"symbols": CONV}, _pkgs(fla_core="0.5.1")),
        "gpu",
    ),
    "fla-blackwell-913": Case(
        {**_BLACKWELL, "triton": "3.7.0", **_pkgs(fla_core="0.5.0")},
        (
            {"gpu": "9.0"},
            {"symbols": KDA},
            {"triton": "3.6.0"},
            {"triton": "3.7.1"},
            _pkgs(fla_core="0.4.2"),
            _pkgs(fla_core="0.5.2"),
        ),
        "triton",
    ),
    "fla-grouped-values": Case(
        {"symbols": GDN, "grouped_values": True, "transformers": "5.23.0", **_pkgs(fla_core="0.4.2")},
        ({"symbols": KDA}, {"grouped_values": False}, {"transformers": "5.22.2"}, _pkgs(fla_core="0.5.0")),
        "grouped_values",
    ),
    "fla-one-head-count": Case(
        {
            "symbols": GDN,
            "grouped_values": True,
            "grouped_heads": True,
            "transformers": "5.22.2",
            **_pkgs(fla_core="0.4.2"),
        },
        (
            {"symbols": KDA},
            {"grouped_values": False},
            {"grouped_heads": False},
            {"transformers": "5.23.0"},
            _pkgs(fla_core="0.5.0"),
        ),
        "grouped_values",
    ),
    "fla-old-triton": Case(
        {"symbols": GDN, "triton": "3.2.0", **_pkgs(fla_core="0.5.1")},
        ({"symbols": CONV}, {"triton": "3.3.0"}, _pkgs(fla_core="0.5.0")),
        "triton",
    ),
    "fla-old-torch": Case(
        {"symbols": GDN, "torch": "2.6.0", **_pkgs(fla_core="0.5.0")},
        ({"symbols": CONV}, {"torch": "2.7.0"}, _pkgs(fla_core="0.4.2")),
        "torch",
    ),
    "fla-version-mismatch": Case(
        {"symbols": GDN, **_pkgs(fla_core="0.5.2", flash_linear_attention="0.6.0")},
        (
            {"symbols": CONV},
            _pkgs(fla_core="0.6.0", flash_linear_attention="0.6.0"),
            _pkgs(fla_core="0.6.0+cu1", flash_linear_attention="0.6.0"),
            _pkgs(fla_core="0.6.0"),
        ),
        "pkgs",
    ),
    "transformers-nested-fla": Case(
        {"symbols": GDN, "transformers": "5.16.1", "executed": False},
        ({"symbols": CONV}, {"transformers": "5.14.1"}, {"transformers": "5.17.0"}, {"executed": True}),
        "transformers",
    ),
    "transformers-gdn-packing": Case(
        {"symbols": GDN, "transformers": "5.8.1", "packed": True},
        ({"symbols": KDA}, {"transformers": "5.9.0"}, {"packed": False}),
        "transformers",
    ),
    "transformers-falcon-mamba-helper": Case(
        {"model_types": "falcon_mamba", "transformers": "5.5.4", "executed": False},
        (
            {"model_types": "mamba"},
            {"transformers": "4.57.6"},
            {"transformers": "5.15.0"},
            {"executed": True},
            _pkgs(kernels="0.12.0"),
        ),
        "pkgs",
    ),
    "falcon-mamba-plain-inner": Case(
        {"model_types": "falcon_mamba", "symbols": INNER, "transformers": "5.15.0", **_pkgs(mamba_ssm="2.2.2")},
        (
            {"model_types": "mamba"},
            {"symbols": ()},
            {"transformers": "5.14.1"},
            {"phase": "decoding"},
            _pkgs(mamba_ssm="2.2.3.post2"),
        ),
        "pkgs",
    ),
    "transformers-fla-minimum": Case(
        {"symbols": GDN, "transformers": "5.14.1", **_pkgs(flash_linear_attention="0.2.1")},
        ({"symbols": KDA}, {"transformers": "5.15.0"}, _pkgs(flash_linear_attention="0.2.2")),
        "pkgs",
    ),
    "kernels-window-5.2": _window("5.12.1", "5.1.0", "5.13.0", ("0.9.0",), ("0.10.2",)),
    "kernels-window-5.13": _window("5.14.1", "5.12.1", "5.15.0", ("0.15.1", "0.16.0"), ("0.15.2", "0.15.9")),
    "kernels-window-5.15": _window("5.17.0", "5.14.1", "5.18.0", ("0.15.2", "0.17.0"), ("0.16.0", "0.16.2")),
    "kernels-window-5.18": _window("5.19.0", "5.17.0", "5.20.0", ("0.16.2", "0.18.0"), ("0.17.0", "0.17.2")),
    "kernels-window-5.20": _window("5.22.2", "5.19.0", "5.23.0", ("0.17.1", "0.18.0"), ("0.17.2",)),
    "kernels-window-5.23": _window("5.24.0", "5.22.2", "5.25.0", ("0.17.2", "0.19.0"), ("0.18.2",)),
    "use-kernels-switched-off": Case(
        {"use_kernels": True, "env": {"USE_HUB_KERNELS": "NO"}, **_pkgs(kernels="0.18.2")},
        (
            {"use_kernels": False},
            {"transformers": "4.57.6"},
            {"env": {"USE_HUB_KERNELS": "yes"}},
            {"env": {}},
        ),
        "env",
    ),
    "mamba-switch-without-effect": Case(
        {"settings": "use_mamba_kernels=False", "model_types": "jamba", "transformers": "5.15.0"},
        (
            {"settings": "use_mamba_kernels=True"},
            {"settings": ()},
            {"transformers": "5.14.1"},
            {"model_types": "mamba2"},
            {"model_types": "zamba"},
            {"model_types": "zamba", "transformers": "5.17.0"},
        ),
        "settings",
    ),
    "mxfp4-dequantized": Case(
        {"quantization": "mxfp4", "phase": "decoding", "triton": "3.3.1", **_pkgs(kernels="0.18.2")},
        ({"quantization": "fp8"}, {"phase": "training"}, {"triton": "3.4.0"}),
        "triton",
    ),
    "liger-qwen35-rope": Case(
        {"liger": True, **_pkgs(liger_kernel="0.7.0")},
        ({"liger": False}, {"model_types": "qwen3_next"}, _pkgs(liger_kernel="0.8.0")),
        "pkgs",
    ),
    "cc1d-sm103-cubin": Case(
        {
            "symbols": CONV,
            "gpu": "10.3",
            "cuda": "13.0",
            "via": {"causal-conv1d": "source"},
            **_pkgs(causal_conv1d="1.7.0"),
        },
        (
            {"symbols": GDN},
            {"gpu": "10.0"},
            {"cuda": "12.9"},
            {"via": {"causal-conv1d": "release-wheel"}},
            _pkgs(),
        ),
        "via",
    ),
    "cc1d-cu13-wheel-sm103": Case(
        {"symbols": CONV, "gpu": "10.3", "cuda": "13.0", **_pkgs(causal_conv1d="1.6.1")},
        ({"symbols": GDN}, {"gpu": "10.0"}, {"cuda": "12.9"}, _pkgs(causal_conv1d="1.6.0")),
        "cuda",
    ),
    "cc1d-arm-x86-so": Case(
        {"machine": "aarch64", "via": {"causal-conv1d": "sdist"}, **_pkgs(causal_conv1d="1.6.1")},
        ({"machine": "x86_64"}, {"via": {"causal-conv1d": "source"}}, _pkgs(causal_conv1d="1.6.2.post1")),
        "machine",
    ),
    "cc1d-161-tag-split": Case(
        {"via": {"causal-conv1d": "sdist"}, **_pkgs(causal_conv1d="1.6.1")},
        (
            {"via": {"causal-conv1d": "index-wheel"}},
            _pkgs(causal_conv1d="1.6.0"),
            _pkgs(causal_conv1d="1.6.2.post1"),
        ),
        "via",
    ),
    "cc1d-seq-idx-overrun": Case(
        {"symbols": CONV, "packed": True, **_pkgs(causal_conv1d="1.6.2.post1")},
        ({"symbols": GDN}, {"packed": False}, _pkgs(causal_conv1d="1.7.0")),
        "pkgs",
    ),
    "mamba-220-gradients": Case(
        {"symbols": CHUNK, **_pkgs(mamba_ssm="2.2.0")},
        ({"symbols": SPLIT}, {"phase": "decoding"}, _pkgs(mamba_ssm="2.1.0"), _pkgs(mamba_ssm="2.2.1")),
        "pkgs",
    ),
    "mamba-chunk-scan-overrun": Case(
        {"symbols": SPLIT, **_pkgs(mamba_ssm="2.2.2")},
        ({"symbols": INNER}, {"phase": "decoding"}, _pkgs(mamba_ssm="1.2.2"), _pkgs(mamba_ssm="2.2.3.post2")),
        "pkgs",
    ),
    "mamba-conv1d-arity": Case(
        {"symbols": INNER, **_pkgs(mamba_ssm="2.2.4", causal_conv1d="1.5.1")},
        (
            {"symbols": CHUNK},
            {"phase": "decoding"},
            _pkgs(mamba_ssm="2.2.5", causal_conv1d="1.5.1"),
            _pkgs(mamba_ssm="2.2.4", causal_conv1d="1.5.0.post8"),
        ),
        "pkgs",
    ),
    "mamba-needs-conv1d-cpp-functions": Case(
        {"symbols": SPLIT, **_pkgs(mamba_ssm="2.2.5", causal_conv1d="1.5.0.post8")},
        (
            {"symbols": CHUNK},
            {"phase": "decoding"},
            _pkgs(mamba_ssm="2.2.4", causal_conv1d="1.5.0.post8"),
            _pkgs(mamba_ssm="2.2.5", causal_conv1d="1.5.1"),
        ),
        "pkgs",
    ),
    "mamba-seq-idx-layout": Case(
        {"symbols": SPLIT, "packed": True, **_pkgs(mamba_ssm="2.2.6.post3")},
        ({"symbols": CHUNK}, {"packed": False}, _pkgs(mamba_ssm="2.2.4"), _pkgs(mamba_ssm="2.3.0")),
        "pkgs",
    ),
    "mamba-fla-tilelang": Case(
        {"symbols": CHUNK, **_pkgs(mamba_ssm="2.3.2.post1", flash_linear_attention="0.5.1", tilelang="0.1.9")},
        (
            {"symbols": CONV},
            _pkgs(mamba_ssm="2.3.1", flash_linear_attention="0.5.1", tilelang="0.1.9"),
            _pkgs(mamba_ssm="2.3.3", flash_linear_attention="0.5.1", tilelang="0.1.9"),
            _pkgs(mamba_ssm="2.3.2.post1", flash_linear_attention="0.5.0", tilelang="0.1.9"),
            _pkgs(mamba_ssm="2.3.2.post1", flash_linear_attention="0.5.1", tilelang="0.1.8"),
            _pkgs(mamba_ssm="2.3.2.post1", flash_linear_attention="0.5.1"),
        ),
        "pkgs",
    ),
    "mamba-fa4-tvmffi": Case(
        _pkgs(mamba_ssm="2.3.2.post1", flash_attn_4="4.0.0b31"),
        (
            _pkgs(mamba_ssm="2.3.1", flash_attn_4="4.0.0b31"),
            _pkgs(mamba_ssm="2.3.2.post1", flash_attn_4="4.0.0b30"),
        ),
        "pkgs",
    ),
    "tilelang-tvmffi": Case(
        {"symbols": INNER, **_pkgs(tilelang="0.1.11", apache_tvm_ffi="0.1.12", mamba_ssm="2.3.2.post1")},
        (
            {"symbols": CONV},
            _pkgs(tilelang="0.1.12", apache_tvm_ffi="0.1.12", mamba_ssm="2.3.2.post1"),
            _pkgs(tilelang="0.1.11", apache_tvm_ffi="0.1.11", mamba_ssm="2.3.2.post1"),
            _pkgs(tilelang="0.1.11", apache_tvm_ffi="0.1.12", mamba_ssm="2.3.1"),
        ),
        "pkgs",
    ),
    "tilelang-018-tvmffi": Case(
        {"symbols": GDN, "gpu": "9.0", **_pkgs(tilelang="0.1.8", apache_tvm_ffi="0.1.10", fla_core="0.6.0")},
        (
            {"symbols": CONV},
            {"gpu": "8.0"},
            _pkgs(tilelang="0.1.7", apache_tvm_ffi="0.1.10", fla_core="0.6.0"),
            _pkgs(tilelang="0.1.9", apache_tvm_ffi="0.1.10", fla_core="0.6.0"),
            _pkgs(tilelang="0.1.8", apache_tvm_ffi="0.1.9", fla_core="0.6.0"),
            _pkgs(tilelang="0.1.8", apache_tvm_ffi="0.1.12", fla_core="0.6.0"),
        ),
        "pkgs",
    ),
    "fa2-pre-ampere": Case(
        {"attention": FA2, "gpu": "7.5", **_pkgs(flash_attn="2.8.3.post2")},
        (
            {"attention": "sdpa"},
            {"gpu": "8.0"},
            _pkgs(flash_attn="1.0.9"),
            _pkgs(flash_attn="2.8.4"),
        ),
        "gpu",
    ),
    "fa2-head-dim": Case(
        {"attention": FA2, "head_dim": ("257",), **_pkgs(flash_attn="2.8.3")},
        (
            {"attention": ()},
            {"head_dim": ("256", "72")},
            _pkgs(flash_attn="1.0.9"),
            _pkgs(flash_attn="2.8.4"),
        ),
        "head_dim",
    ),
    "fa2-head-dim-backward": Case(
        {"attention": FA2, "head_dim": ("256",), "gpu": "8.9", **_pkgs(flash_attn="2.5.4")},
        (
            {"attention": "eager"},
            {"head_dim": ("192",)},
            {"gpu": "8.0"},
            {"phase": "decoding"},
            _pkgs(flash_attn="1.0.9"),
            _pkgs(flash_attn="2.5.5"),
        ),
        "gpu",
    ),
    "fa2-sm121": Case(
        {"attention": FA2, "gpu": "12.1", **_pkgs(flash_attn="2.8.3.post2")},
        ({"attention": "sdpa"}, {"gpu": "12.0"}, _pkgs(flash_attn="2.8.4")),
        "gpu",
    ),
    "fa-cu13-guess": Case(
        {"cuda": "13.0", "via": {"flash-attn": "sdist"}, **_pkgs(flash_attn="2.8.3")},
        ({"cuda": "12.9"}, {"via": {"flash-attn": "source"}}, _pkgs(flash_attn="2.8.3.post1")),
        "via",
    ),
    "fa-placeholder": Case(_pkgs(flash_attn_3="0.0.0"), (_pkgs(flash_attn_3="3.0.0b1"), _pkgs()), "pkgs"),
    "fa-two-owners": Case(
        {"attention": FA2, **_pkgs(flash_attn="2.8.3", sgl_kernel="0.3.0")},
        ({"attention": "sdpa"}, _pkgs(flash_attn="2.8.3"), _pkgs(sgl_kernel="0.3.0")),
        "pkgs",
    ),
    "torch-no-blackwell": Case(
        {"cuda": "12.6", "gpu": "12.0"}, ({"cuda": "12.8"}, {"cuda": None}, {"gpu": "9.0"}), "cuda"
    ),
    "torch-cuda13-old-gpu": Case({"cuda": "13.0", "gpu": "7.0"}, ({"cuda": "12.9"}, {"gpu": "7.5"}), "gpu"),
    "cuda13-driver": Case(
        {"cuda": "13.0", "driver": "575.57.08"},
        ({"cuda": "12.9"}, {"driver": "580"}, {"driver": "580.65.06"}, {"gpu_seen_working": True}),
        "driver",
    ),
    "cuda12-driver": Case(
        {"cuda": "12.8", "driver": "520.61.05"},
        ({"cuda": "11.8"}, {"cuda": "13.0"}, {"driver": "525.60.13"}, {"gpu_seen_working": True}),
        "driver",
    ),
    "triton-sm121a": Case(
        {"symbols": GDN, "ptxas": "12.8", "gpu": "12.1"},
        ({"symbols": CONV}, {"ptxas": "12.9"}, {"gpu": "12.0"}),
        "ptxas",
    ),
    "glibc-232": Case(
        {"glibc": "2.31", "via": {"causal-conv1d": "release-wheel"}, **_pkgs(causal_conv1d="1.5.1")},
        (
            {"glibc": "2.32"},
            {"via": {"causal-conv1d": "source"}},
            _pkgs(causal_conv1d="1.5.0.post8"),
        ),
        "via",
    ),
    "cxx17-sdists-torch214": Case(
        {"torch": "2.14.0", "via": {"mamba-ssm": "source"}, **_pkgs(mamba_ssm="2.3.2.post1")},
        ({"torch": "2.13.1"}, {"via": {"mamba-ssm": "release-wheel"}}, _pkgs(mamba_ssm="2.3.3")),
        "torch",
    ),
    "kernelguard-name-taken": Case(_pkgs(kernelguard="0.3.2"), (_pkgs(kernelguard_preflight="0.1.0"),), "pkgs"),
}
