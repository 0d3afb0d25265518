"""What does a configuration of the bundled trainer (kernelguard_train) say?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version

from kernelguard.declare.training_configs.keys import Keys
from kernelguard.declare.values import Phase

WORDS = False
_TABLES = frozenset({"model", "data", "batch", "optim", "train", "parallel", "checkpoint"})
_TOKENS = 8192
"""kernelguard_train/config.py, BatchConfig.tokens."""
# kernelguard_train/batches.py, Batch.model_inputs: what a packed batch hands to the model.
_SIGNALS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


def recognises(document: Mapping[str, Any]) -> bool:
    """Whether at least two of its tables are there, and nothing but tables."""
    return len(_TABLES & document.keys()) >= 2 and all(isinstance(value, Mapping) for value in document.values())


def length(document: Mapping[str, Any]) -> int | None:
    """Tokens of the rows that it trains on; None: what stands there is no number.

    A packed row is filled to `batch.tokens`, another one is a single sample.
    """
    data, batch = (document.get(name) or {} for name in ("data", "batch"))
    tokens = batch.get("tokens", _TOKENS)
    longest = 0 if batch.get("mode", "packed") == "packed" else data.get("max_length", 0)
    return next((n for n in (longest, tokens) if isinstance(n, int) and not isinstance(n, bool) and n > 0), None)


def read(keys: Keys, versions: Mapping[str, Version]) -> tuple[dict[str, Any], str]:
    """All of it: here the defaults are known, since configuration and trainer come from one hand."""
    del versions
    model = Keys(keys.table("model"), words=False, prefix="model.")
    batch = Keys(keys.table("batch"), words=False, prefix="batch.")
    packed = (batch.choice("mode", ("packed", "padded", "sorted")) or "packed") == "packed"
    attention = model.text("attention")
    train = Keys(keys.table("train"), words=False, prefix="train.")
    on_gpu = train.text("device") != "cpu"
    chosen = "varlen" if packed and on_gpu else "sdpa"  # kernelguard_train/model.py, choose_attention
    liger = model.choice("liger", ("auto", "on", "off"))
    fused = model.choice("fused", ("auto", "on", "off")) or "auto"
    kernels = model.choice("kernels", ("auto", "fused", "reference")) or "auto"
    # kernelguard_train/gated_delta.py: the fused layer takes packed batches only, and does not repeat heads.
    layers = packed and on_gpu and fused != "off" and kernels != "reference"
    convolution = model.choice("convolution", ("auto", "causal_conv1d", "fla")) or "auto"
    said: dict[str, Any] = {
        "phase": Phase.TRAINING,
        "dtype": model.dtype("compute_dtype") or "bfloat16",
        "packed": packed,
        "signals": _SIGNALS if packed else None,
        "attn_implementation": chosen if attention in {None, "auto"} else attention,
        "liger": None if liger in {None, "auto"} else liger == "on",
        "compile": bool(model.document.get("compile")),
        "use_cache": False,
        "grouped_heads": layers,
        "own_convolution": layers and convolution == "auto",
        "trust_remote_code": False,  # kernelguard_train builds transformers' own classes only
    }
    keys.problems += model.problems + batch.problems + train.problems
    return said, ""
