"""Small configurations of real architectures, as config.json would hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN_LINEAR = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}

QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "architectures": ["Qwen3_5ForCausalLM"],
    **_QWEN_LINEAR,
}

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    **_QWEN_LINEAR,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

MAMBA2: dict[str, Any] = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "state_size": 16,
    "num_heads": 8,
    "head_dim": 16,
    "expand": 2,
    "n_groups": 1,
    "num_hidden_layers": 2,
}

BAMBA: dict[str, Any] = {
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_indices": [2],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
}

JAMBA: dict[str, Any] = {
    "model_type": "jamba",
    "architectures": ["JambaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
}

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    """The configuration as a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
