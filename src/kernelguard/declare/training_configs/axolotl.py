"""What does an axolotl YAML say?

Read in axolotl 0.19.0 (where lines are cited), 0.15.0, 0.12.2 and 0.8.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from kernelguard.declare.training_configs.keys import Keys
from kernelguard.declare.values import Phase

WORDS = True
# The switches that `attn_implementation` replaced, the winning one first (utils/schemas/enums.py:125).
_ATTENTION = {
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "flex_attention": "flex_attention",
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "eager_attention": "eager",
}
# Attention that `batch_flattening: auto` takes for capable of packed rows (utils/schemas/enums.py:142).
_VARLEN = frozenset({"flash_attention_2", "flash_attention_3", "flash_attention_4", "flash_attention_torch"}) | {
    "flex_attention", "xformers", "sage", "kernels-community/flash-attn2", "kernels-community/flash-attn3",
    "kernels-community/sage-attention",
}  # fmt: skip
# The flags of LigerArgs (integrations/liger/args.py).
_LIGER = (
    "liger_rope",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_layer_norm",
    "liger_swiglu",
    "liger_glu_activation",
    "liger_cross_entropy",
    "liger_fused_linear_cross_entropy",
)
_LIGER_PLUGIN = "axolotl.integrations.liger."
_KERNELS_PLUGIN = "axolotl.integrations.kernels."
# Plugins that bring no collator of their own (of 0.19.0's only kd does, integrations/kd/__init__.py:56).
_PLAIN_PLUGINS = (_LIGER_PLUGIN, _KERNELS_PLUGIN, "axolotl.integrations.cut_cross_entropy.")
_ALONE = frozenset({"base_model", "sample_packing", "eval_sample_packing", "batch_flattening", *_ATTENTION, *_LIGER})
_TOGETHER = frozenset(
    {"micro_batch_size", "sequence_len", "val_set_size", "num_epochs", "datasets", "dataset_prepared_path"}
)


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether there is a key that only axolotl has, a plugin of it, or two keys that hardly anyone else combines."""
    return (
        bool(_ALONE & document.keys())
        or len(_TOGETHER & document.keys()) >= 2
        or any(name.startswith("axolotl.") for name in _plugins(document))
    )


def read(keys: Keys, versions: Mapping[str, Version]) -> tuple[dict[str, Any], str]:
    """What the configuration determines once axolotl's own validators have gone over it."""
    del versions
    # The cache is switched off on every model configuration (loaders/utils.py:64; models.py:116 of 0.8.1).
    said: dict[str, Any] = {"phase": Phase.TRAINING, "use_cache": False, "dtype": _dtype(keys)}
    said["attn_implementation"] = _attention(keys)
    said["trust_remote_code"] = keys.flag("trust_remote_code")
    plugins = _plugins(keys.document)
    flags = [keys.flag(name) for name in _LIGER]
    if any(name.startswith(_LIGER_PLUGIN) for name in plugins):
        said["liger"] = any(flags)
    elif any(flag is not None for flag in flags):
        said["liger"] = False  # without the plugin nobody reads them
    # `auto` is on with torch 2.5.1 or newer (utils/schemas/config.py:2123), which every release read here requires.
    compiles = keys.auto_flag("torch_compile")
    said["compile"] = compiles == "auto" or compiles if compiles is not None else None
    said |= _kernels(keys, plugins)
    note = _packing(keys, plugins, said)
    return said, note


def _packing(keys: Keys, plugins: tuple[str, ...], said: dict[str, Any]) -> str:
    """Sets `packed` and `signals`; returns why signals stay open, if they do."""
    packing, flattening = keys.flag("sample_packing"), keys.auto_flag("batch_flattening")
    if packing:
        said["packed"] = True
        # The batches carry position_ids (utils/collators/batching.py), but what reaches a kernel is decided by patches
        # of the model classes that derive more from them: monkeypatch/models has qwen3_5, qwen3_next, falcon_h1,
        # granitemoehybrid, nemotron_h and others in 0.19.0. transformers' own code says nothing about such a run.
        return (
            "with sample_packing axolotl sends position_ids and patches models to derive the other boundaries, so what "
            "reaches a kernel cannot be read from transformers"
        )
    if flattening == "auto":  # utils/schemas/validation.py:1104
        size = keys.document.get("micro_batch_size")
        flattening = said["attn_implementation"] in _VARLEN and isinstance(size, int) and size > 1
    if flattening:
        said["packed"] = True
        if not all(name.startswith(_PLAIN_PLUGINS) for name in plugins) or keys.given("rl", "reward_model"):
            return "a plugin or a reward trainer brings its own collator, whose boundary signals are not known"
        # DataCollatorWithFlattening with nothing switched on (core/builders/causal.py:595; trainer_builder.py:915 of
        # 0.8.1), which gives position_ids only (transformers data/data_collator.py:1304 of 5.24.0, :2115 of 4.57.6).
        # The patches named above are for sample_packing alone (loaders/patch_manager.py:574).
        said["signals"] = ("position_ids",)
    elif packing is False or flattening is False:
        said["packed"] = False
    return ""


def _dtype(keys: Keys) -> str | None:
    """As resolve_dtype in utils/config/__init__.py:163; `auto`, the default, asks the GPU."""
    bf16 = keys.auto_flag("bf16", "full")
    bfloat16, fp16, float16 = (keys.flag(name) for name in ("bfloat16", "fp16", "float16"))
    if bf16 in {True, "full"} or bfloat16:
        return "bfloat16"
    if fp16 or float16:
        return "float16"
    return "float32" if bf16 is False else None


def _attention(keys: Keys) -> str | None:
    named = keys.text("attn_implementation")
    switched = [name for name in _ATTENTION if keys.flag(name)]
    if keys.flag("gemma4_hybrid_attn_impl") and not named and not switched:
        return "flash_attention_2"  # utils/schemas/config.py:1557
    if named is not None and any(_ATTENTION[name] != named for name in switched):
        keys.problem(f"attn_implementation is {named!r}, but {', '.join(switched)} is on as well")
    return named or (_ATTENTION[switched[0]] if switched else None)


def _kernels(keys: Keys, plugins: tuple[str, ...]) -> dict[str, Any]:
    """Experts and `use_kernels`; with the kernels plugin both have defaults (integrations/kernels/args.py:287, 333)."""
    experts, use_kernels = keys.text("experts_implementation"), keys.flag("use_kernels")
    if any(name.startswith(_KERNELS_PLUGIN) for name in plugins):
        backend = keys.text("expert_backend")
        for name, flag in (("scattermoe", "use_scattermoe"), ("sonicmoe", "use_sonicmoe")):
            if (keys.flag(flag) or backend == name) and experts is None:
                experts = name
        experts = experts or "eager"
        use_kernels = True if use_kernels is None else use_kernels
    return {"experts_implementation": experts, "use_kernels": use_kernels}


def _plugins(document: Mapping[str, Any]) -> tuple[str, ...]:
    plugins = document.get("plugins")
    return tuple(name for name in plugins if isinstance(name, str)) if isinstance(plugins, list) else ()
