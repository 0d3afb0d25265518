"""What does a training configuration say about kernels? Trainer arguments, TRL, axolotl, kernelguard_train."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from kernelguard.declare.documents import read_document
from kernelguard.errors import InputError

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfigReading:
    """What one training configuration says."""

    kind: str
    """Whose configuration it is, for the report."""
    said: Mapping[str, Any]
    """Intent fields that it determines."""


# Keys that only one of them has; any one is enough.
_AXOLOTL = frozenset(
    {"base_model", "micro_batch_size", "sample_packing", "sequence_len", "datasets", "flash_attention"}
)
_TRL = frozenset(
    {"packing", "packing_strategy", "padding_free", "model_init_kwargs", "dataset_text_field", "assistant_only_loss"}
    | {"completion_only_loss", "eval_packing", "max_prompt_length"}
)
_TRAINER = frozenset(
    {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "max_steps", "learning_rate"}
    | {"output_dir", "optim", "lr_scheduler_type", "bf16", "fp16", "torch_compile", "use_liger_kernel", "save_steps"}
    | {"gradient_checkpointing", "weight_decay", "logging_steps", "warmup_ratio", "report_to", "deepspeed", "fsdp"}
)
_OWN = frozenset({"model", "data", "batch", "optim", "train"})
# The version from which TRL's padding-free collator sends cu_seq_lens_q and seq_idx; before, position_ids only
# (trl/trainer/sft_trainer.py, DataCollatorForLanguageModeling.torch_call of 1.15.0 and 1.16.0).
_TRL_SENDS_BOUNDARIES = Version("1.16.0")
# axolotl/utils/schemas/config.py (0.19.0): the boolean switches that `attn_implementation` replaced.
_AXOLOTL_ATTENTION = {
    "flash_attention": "flash_attention_2",
    "sdp_attention": "sdpa",
    "flex_attention": "flex_attention",
    "xformers_attention": "xformers",
    "sage_attention": "sage",
    "eager_attention": "eager",
}


def read_train_config(path: Path, versions: Mapping[str, Version]) -> TrainConfigReading:
    """What a training configuration says; keys that have nothing to do with kernels are ignored.

    Raises:
        InputError: It cannot be read, or is none of the known kinds.
    """
    document = read_document(path, "a training configuration")
    keys = set(document)
    readers: tuple[tuple[str, bool, Callable[[Document, Mapping[str, Version]], dict[str, Any]]], ...] = (
        ("kernelguard_train", _is_own(document), _own),
        ("axolotl", "base_model" in keys or len(keys & _AXOLOTL) >= 2, _axolotl),
        ("TRL", bool(keys & _TRL), _trl),
        ("transformers Trainer", len(keys & _TRAINER) >= 2, _trainer),
    )
    for kind, matches, reader in readers:
        if matches:
            return TrainConfigReading(kind=kind, said=reader(document, versions))
    raise InputError(
        f"{path} is no training configuration that is known here; its keys are {', '.join(sorted(keys)[:6])}.",
        hint="give Trainer arguments (JSON or YAML), a TRL or axolotl YAML, or use --intent with an intent file",
    )


def _trainer(document: Document, versions: Mapping[str, Version]) -> dict[str, Any]:
    del versions
    said: dict[str, Any] = {"phase": "training"}
    if _on(document, "bf16"):
        said["dtype"] = "bfloat16"
    elif _on(document, "fp16"):
        said["dtype"] = "float16"
    compiles = _on(document, "torch_compile") or any(
        document.get(k) for k in ("torch_compile_backend", "torch_compile_mode")
    )
    if compiles or "torch_compile" in document:
        said["compile"] = compiles
    if "use_liger_kernel" in document:
        said["liger"] = _on(document, "use_liger_kernel")
    # TrainingArguments.use_cache is False unless set, and the Trainer writes it into the model's configuration
    # (trainer.py:646 of 5.24.0, `config.use_cache = args.use_cache`).
    said["use_cache"] = _on(document, "use_cache")
    return said


def _trl(document: Document, versions: Mapping[str, Version]) -> dict[str, Any]:
    said = _trainer(document, versions)
    # SFTConfig turns bf16 on unless fp16 is set (trl/trainer/base_config.py).
    if "bf16" not in document and not _on(document, "fp16"):
        said["dtype"] = "bfloat16"
    packing = _on(document, "packing")
    # Best-fit packing implies the padding-free collator (trl/trainer/sft_trainer.py:916 of 1.16.0).
    strategy = document.get("packing_strategy", "bfd")
    padding_free = _on(document, "padding_free") or (packing and strategy in {"bfd", "bfd_split"})
    said["packed"] = packing or padding_free
    if padding_free:
        trl = versions.get("trl")
        if trl is not None:
            before = ("position_ids",)
            after = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
            said["signals"] = after if trl >= _TRL_SENDS_BOUNDARIES else before
    elif packing:
        said["signals"] = ()  # "wrapped" cuts the stream of tokens; nothing tells samples apart
    said.update(_model_kwargs(document.get("model_init_kwargs")))
    # TRL scripts also take the ModelConfig's own keys at top level.
    said.update(_model_kwargs(document))
    return said


def _model_kwargs(given: object) -> dict[str, Any]:
    """What keyword arguments of from_pretrained say."""
    if not isinstance(given, Mapping):
        return {}
    said: dict[str, Any] = {}
    for key in ("attn_implementation", "experts_implementation"):
        if isinstance(given.get(key), str):
            said[key] = given[key]
    dtype = given.get("dtype", given.get("torch_dtype"))
    if dtype in {"bfloat16", "float16", "float32"}:
        said["dtype"] = dtype
    for key in ("use_kernels", "use_cache"):
        if isinstance(given.get(key), bool):
            said[key] = given[key]
    return said


def _axolotl(document: Document, versions: Mapping[str, Version]) -> dict[str, Any]:
    del versions
    said: dict[str, Any] = {"phase": "training"}
    if document.get("bf16") in {True, "auto", "full", "true"} or _on(document, "bfloat16"):
        said["dtype"] = "bfloat16"
    elif _on(document, "fp16") or _on(document, "float16"):
        said["dtype"] = "float16"
    elif document.get("bf16") is False:
        said["dtype"] = "float32"
    # Which boundaries reach a layer is decided by axolotl's own patches of the model classes (0.19.0 has them for
    # qwen3_5, qwen3_next, falcon_h1, granitemoehybrid, nemotron_h, ... in monkeypatch/models), not by its collator
    # alone, which sends position_ids. So the signals stay unsaid.
    said["packed"] = _on(document, "sample_packing") or _on(document, "batch_flattening")
    if isinstance(document.get("attn_implementation"), str):
        said["attn_implementation"] = document["attn_implementation"]
    else:
        named = [value for key, value in _AXOLOTL_ATTENTION.items() if _on(document, key)]
        if named:
            said["attn_implementation"] = named[0]
    if isinstance(document.get("experts_implementation"), str):
        said["experts_implementation"] = document["experts_implementation"]
    plugins = document.get("plugins")
    has_plugin = isinstance(plugins, list) and any("liger" in str(plugin).lower() for plugin in plugins)
    flags = [k for k in document if k.startswith("liger_") and document[k]]
    said["liger"] = has_plugin and bool(flags)
    if "torch_compile" in document:
        said["compile"] = document["torch_compile"] in {True, "auto"}
    if isinstance(document.get("use_kernels"), bool):
        said["use_kernels"] = document["use_kernels"]
    said["use_cache"] = False
    return said


def _is_own(document: Document) -> bool:
    return {"model", "data"} <= set(document) and all(isinstance(document.get(k, {}), dict) for k in _OWN)


def _own(document: Document, versions: Mapping[str, Version]) -> dict[str, Any]:
    del versions
    model, batch = document.get("model", {}), document.get("batch", {})
    packed = batch.get("mode", "packed") == "packed"
    said: dict[str, Any] = {
        "phase": "training",
        "dtype": model.get("compute_dtype", "bfloat16"),
        "packed": packed,
        "use_cache": False,
        "compile": bool(model.get("compile")),
    }
    if packed:
        # kernelguard_train/batches.py, Batch.model_inputs
        said["signals"] = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
    if model.get("attention", "auto") != "auto":
        said["attn_implementation"] = model["attention"]
    if model.get("liger", "auto") != "auto":
        said["liger"] = model["liger"] == "on"
    return said


def _on(document: Document, key: str) -> bool:
    """A switch that is on; YAML and the command line also know it as text."""
    value = document.get(key)
    return value is True or (isinstance(value, str) and value.lower() in {"true", "yes", "on", "1"})
