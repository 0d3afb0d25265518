"""What do transformers' TrainingArguments say, as JSON or YAML (also beside ModelArguments, as the scripts take them)?

Read in transformers 4.57.6 and 5.0.0 to 5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from kernelguard.declare.training_configs.keys import Keys
from kernelguard.declare.values import Phase

WORDS = False
# Fields of TrainingArguments whose names other programs do not use.
_MARKERS = frozenset(
    {"output_dir", "overwrite_output_dir", "per_device_train_batch_size", "per_device_eval_batch_size"}
    | {"num_train_epochs", "gradient_accumulation_steps", "use_liger_kernel", "liger_kernel_config", "torch_compile"}
    | {"torch_compile_backend", "torch_compile_mode", "bf16", "fp16", "lr_scheduler_type", "gradient_checkpointing"}
    | {"remove_unused_columns", "dataloader_num_workers", "save_strategy", "eval_strategy", "evaluation_strategy"}
    | {"logging_strategy", "report_to", "warmup_ratio", "ddp_find_unused_parameters", "neftune_noise_alpha"}
)
# trainer.py:755 of 5.0.0, :646 of 5.24.0: `self.model.config.use_cache = self.args.use_cache`, whose default is False
# (training_args.py:971). 4.57.6 has no such argument and leaves the model's own setting.
_SETS_USE_CACHE = Version("5.0")


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether these are TrainingArguments. DeepSpeed's `bf16` is a table, theirs is not."""
    return any(not isinstance(document[key], (Mapping, list)) for key in _MARKERS & document.keys())


def read(keys: Keys, versions: Mapping[str, Version]) -> tuple[dict[str, Any], str]:
    """Nothing on packing: that is done by a collator, which is code (`DataCollatorWithFlattening`), not a setting."""
    said: dict[str, Any] = {"phase": Phase.TRAINING, **model_arguments(keys)}
    said["dtype"] = mixed_precision(keys) or said["dtype"]
    said["compile"] = keys.flag("torch_compile")
    if keys.given("torch_compile_backend", "torch_compile_mode"):
        said["compile"] = True  # training_args.py:1621 of 5.24.0
    said["liger"] = keys.flag("use_liger_kernel")
    said["use_cache"] = keys.flag("use_cache")
    transformers = versions.get("transformers")
    if said["use_cache"] is None and transformers is not None and transformers >= _SETS_USE_CACHE:
        said["use_cache"] = False
    return said, ""


def mixed_precision(keys: Keys) -> str | None:
    """The dtype that autocast gives to kernels, whatever the weights are loaded in; None: not switched on."""
    bf16, fp16 = keys.flag("bf16"), keys.flag("fp16")
    if bf16 and fp16:
        keys.problem("bf16 and fp16 are both on, but at most one can be (TrainingArguments refuses both)")
    if bf16 or fp16:
        return "bfloat16" if bf16 else "float16"
    return None


def model_arguments(keys: Keys) -> dict[str, Any]:
    """What is handed to from_pretrained; the scripts also take some of it at top level."""
    said: dict[str, Any] = {}
    inner = Keys(keys.table("model_init_kwargs"), words=keys.words, prefix="model_init_kwargs.")
    for source in (keys, inner):
        for name in ("attn_implementation", "experts_implementation"):
            said[name] = source.text(name) or said.get(name)
        for name in ("use_kernels", "trust_remote_code"):
            flag = source.flag(name)
            said[name] = said.get(name) if flag is None else flag
        loaded_in = source.dtype("dtype") or source.dtype("torch_dtype")
        said["dtype"] = loaded_in or said.get("dtype")
    keys.problems += inner.problems
    return said
