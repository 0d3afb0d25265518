"""Did the model get the attention, experts, quantization and cache that the run asked for? Sub-models included.

Rows 9, 11, 12, 16 and 18 of the catalogue in docs/guard.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from kernelguard.guard.expectation import Expectation, Finding
from kernelguard.guard.live_functions import configurations

FUSE_ALL = frozenset({"mamba_split_conv1d_scan_combined", "mamba_inner_fn"})
"""Kernels that do the convolution and the scan in one, in training and without a cache only."""


def sub_models(model: Any) -> tuple[tuple[str, Any], ...]:
    """(name, module) of every part with attention of its own choosing: transformers' models, also nested ones."""
    return tuple(
        (name or type(part).__name__, part)
        for name, part in model.named_modules()
        if any(base.__name__ == "PreTrainedModel" for base in type(part).__mro__)
    )


def language_part(model: Any) -> tuple[Any, Any]:
    """The innermost sub-model that holds the token embedding, and the embedding (None: there is none)."""
    parts = [part for _, part in sub_models(model)]
    for part in parts:
        try:
            embedding = part.get_input_embeddings()
        except (AttributeError, NotImplementedError):
            continue
        if embedding is not None:
            holders = [p for p in parts if any(inner is embedding for inner in p.modules())]
            return (holders[-1] if holders else part), embedding
    return (parts[0] if parts else model), None


def judge_attention(model: Any, expected: Expectation) -> Iterator[Finding]:
    """Another attention than the one that was asked for, in the model or in a part of it (row 9)."""
    parts = sub_models(model)
    if not parts:
        return
    top = str(getattr(parts[0][1].config, "_attn_implementation", "") or "")
    asked = expected.attention or top
    told: set[tuple[str, str]] = set()
    for name, part in parts:
        got = str(getattr(part.config, "_attn_implementation", "") or "")
        kind = str(getattr(part.config, "model_type", ""))
        if not got or same_attention(got, asked) or (kind, got) in told:
            continue
        told.add((kind, got))
        # The run's own choice is a claim about the model that trains; a part that differs from the rest is not one.
        status = "fail" if expected.attention and _trains(part) else "warn"
        yield Finding("attention", status, f"{name} runs {got} attention, {asked} was asked for",
                      "set attn_implementation for every sub-model, or ask for what the model supports")  # fmt: skip
    if not expected.attention and top == "eager":
        yield Finding("attention", "warn", "attention runs as eager PyTorch code", "attn_implementation='sdpa'")


def same_attention(got: str, asked: str) -> bool:
    """Whether two names stand for one implementation: the hub's build of FlashAttention 2 is FlashAttention 2."""
    return _family(got) == _family(asked)


def _family(name: str) -> str:
    bare = name.rpartition("|")[2].lower().replace("-", "_").partition("@")[0]
    for number in "234":
        if f"flash_attention_{number}" in bare or f"flash_attn{number}" in bare or f"flash_attn_{number}" in bare:
            return f"flash_attention_{number}"
    return bare


def _trains(part: Any) -> bool:
    return any(p.requires_grad for p in part.parameters())


def judge_experts(model: Any, expected: Expectation) -> Iterator[Finding]:
    """Experts that run one by one in a Python loop (row 11)."""
    told = set()
    for name, part in sub_models(model):
        config = part.config
        got = getattr(config, "_experts_implementation", None)
        if got is None or not _has_experts(part) or got in told:
            continue
        told.add(got)
        if expected.experts and got != expected.experts:
            yield Finding("experts", "fail", f"{name} runs {got} experts, {expected.experts} was asked for",
                          "set experts_implementation")  # fmt: skip
        elif got == "eager" and not expected.experts:
            yield Finding("experts", "fail", f"{name} runs its experts one by one in a Python loop (eager)",
                          "experts_implementation='grouped_mm'")  # fmt: skip
        if got == "grouped_mm":
            yield from _grouped_falls_back(part, expected)


def _has_experts(part: Any) -> bool:
    return any(type(layer).__name__.endswith("Experts") for layer in part.modules())


def _grouped_falls_back(part: Any, expected: Expectation) -> Iterator[Finding]:
    """What makes grouped_mm run its Python loop without a word."""
    import torch

    if expected.device != "cuda" or not torch.cuda.is_available():
        return
    capability = torch.cuda.get_device_capability()
    if capability < (8, 0):
        text = f"grouped_mm needs compute capability 8.0, this GPU has {capability[0]}.{capability[1]}"
        yield Finding("experts", "fail", text)
    dtypes = {p.dtype for m in part.modules() if type(m).__name__.endswith("Experts") for p in m.parameters()}
    if expected.compiled and dtypes - {torch.bfloat16}:
        text = f"grouped_mm of a compiled model needs bfloat16 weights, the experts have {', '.join(map(str, dtypes))}"
        yield Finding("experts", "fail", text, "load the experts in bfloat16, or leave torch.compile off")


def judge_quantization(model: Any) -> Iterator[Finding]:
    """A quantized checkpoint that was silently turned back into bf16 (row 12)."""
    for config in configurations(model):
        quantization = getattr(config, "quantization_config", None)
        if quantization is None:
            continue
        method = str(_get(quantization, "quant_method") or "")
        if "mxfp4" not in method.lower():
            continue
        layers = any(type(layer).__name__.startswith("Mxfp4") for layer in model.modules())
        if _get(quantization, "dequantize") is True or not layers:
            what = "the mxfp4 checkpoint was turned back into bf16: four times its memory, and none of its kernels"
            yield Finding("dequantized", "fail", what, "triton >= 3.4, a usable kernels package, capability >= 7.5")
        return


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, dict) else getattr(thing, name, None)


def judge_cache(symbols: Iterable[str], *, mixer_got_cache: bool) -> Iterator[Finding]:
    """A cache in training makes Mamba go around its fused kernels (row 16)."""
    if not mixer_got_cache:
        return
    fix = "config.use_cache = False, on the sub-configurations too"
    fused = sorted(FUSE_ALL.intersection(symbols))
    if fused:
        what = f"a cache is passed while training: {fused[0]} runs only without one"
        yield Finding("cache-in-training", "fail", what, fix)
    else:
        yield Finding("cache-in-training", "warn", "a cache is filled while training, which nothing reads", fix)


def judge_export(model: Any) -> Iterator[Finding]:
    """An exported model runs the PyTorch form of every kernel (row 18)."""
    import torch

    exporting = getattr(torch.compiler, "is_exporting", None)
    if exporting is not None and exporting():
        yield Finding("export", "fail", "the model is being exported: every kernel is replaced by its PyTorch form")
    exported = [name for name, part in model.named_modules() if isinstance(part, torch.fx.GraphModule)]
    if exported:
        what = f"{exported[0] or 'the model'} is an exported graph: no function in it can be read"
        yield Finding("export", "unknown", what, "train the model itself")
