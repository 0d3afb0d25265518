"""What does a TRL configuration (SFTConfig, or the YAML of `trl sft`) say?

Read in TRL 0.15.2, 0.19.1, 0.21.0, 0.23.1, 0.26.2, 0.29.0, 1.0.0, 1.5.0, 1.10.0, 1.13.0 to 1.16.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from kernelguard.declare.training_configs import trainer
from kernelguard.declare.training_configs.keys import Keys

WORDS = False
_SFT = frozenset({"packing", "packing_strategy", "eval_packing", "assistant_only_loss", "completion_only_loss"})
_MARKERS = _SFT | {"padding_free", "model_init_kwargs", "dataset_text_field", "dataset_kwargs", "dataset_num_proc"}
# `ffd` and `bfd-requeue` are former names (0.19.1, sft_config.py:336 of 1.16.0).
_STRATEGIES = ("bfd", "bfd_split", "wrapped", "ffd", "bfd-requeue")
# The padding-free collator, DataCollatorForLanguageModeling.torch_call in trl/trainer/sft_trainer.py: 1.16.0 adds the
# boundaries to the batch in lines 211 to 218; 1.15.0 (lines 205 to 209) and those before have `position_ids` alone.
_ALL = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_SENDS_ALL = Version("1.16.0")
# Up to 0.22 they were only sent with flash attention (0.21.0, sft_trainer.py:490), in 0.23.1 always (line 242).
_SENDS_POSITIONS = Version("0.23.1")
# 0.23.1 (sft_trainer.py:1095) to 1.16.0 (:1564): `inputs["use_cache"] = False` in every step.
_SETS_USE_CACHE = Version("0.23.1")


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether a key is there that only TRL has."""
    return bool(_MARKERS & document.keys())


def read(keys: Keys, versions: Mapping[str, Version]) -> tuple[dict[str, Any], str]:
    """As Trainer arguments, and packing."""
    said, _ = trainer.read(keys, versions)
    version = versions.get("trl")
    if keys.flag("bf16") is None and not keys.flag("fp16"):
        # SFTConfig turns bf16 on unless one of the two is set (sft_config.py:252 of 0.19.1, base_config.py:108 of
        # 1.16.0), whatever the dtype that the weights are loaded in.
        said["dtype"] = "bfloat16"
    if said["liger"] is None:
        said["liger"] = keys.flag("use_liger")  # its name in 0.15.2
    # A `use_cache` in the file means transformers 5, and the SFTTrainer that goes with it switches it off in each step.
    sft = bool(_SFT & keys.document.keys())
    if sft and (keys.given("use_cache") or (version is not None and version >= _SETS_USE_CACHE)):
        said["use_cache"] = False
    note = ""
    packing, padding_free = keys.flag("packing"), keys.flag("padding_free")
    wrapped = keys.choice("packing_strategy", _STRATEGIES) == "wrapped"
    if packing or padding_free:
        said["packed"] = True  # padding-free batches are samples side by side in one row as well
    elif packing is False or padding_free is False:
        said["packed"] = False
    if packing and wrapped:
        # The stream of tokens is cut anywhere (_pack_wrapped in trl/data_utils.py): no release knows where samples
        # begin any more, so none can tell a kernel, with or without padding_free.
        said["signals"] = ()
    elif said.get("packed"):
        # Any other strategy implies the padding-free collator (sft_trainer.py:916 of 1.16.0, :402 of 0.19.1).
        said["signals"] = _signals(version)
        if said["signals"] is None:
            which = f"TRL {version}" if version is not None else "this TRL"
            note = (
                f"which boundary signals {which} sends is not known: position_ids alone up to 1.15, all of them from "
                "1.16 on, so say it with --signals"
            )
    return said, note


def _signals(version: Version | None) -> tuple[str, ...] | None:
    if version is None or version < _SENDS_POSITIONS:
        return None
    return _ALL if version >= _SENDS_ALL else ("position_ids",)
