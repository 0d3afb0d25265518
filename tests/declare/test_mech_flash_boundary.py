"""Which attention layers keep `position_ids` from flash attention: what is read is what arrives in real releases."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kernelguard.declare import declare, find_tree, parse_config
from kernelguard.declare.modes import FlashBoundary
from observed import transformers_base

pytestmark = pytest.mark.observed
_ARRIVES = """
import json, sys, torch
from transformers import CONFIG_MAPPING, AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
torch.set_num_threads(1)
seen = []
def record(module, query, key, value, attention_mask=None, **kwargs):
    seen.append((kwargs.get("position_ids") is not None, kwargs.get("cu_seq_lens_q") is not None))
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    made = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return made.transpose(1, 2).contiguous(), None
AttentionInterface.register("recorded", record)
AttentionMaskInterface.register("recorded", lambda *_, **__: None)
answers = {}
try:
    # Before it was written over: a class of its own calls transformers' flash attention by name.
    import transformers.models.olmoe.modeling_olmoe as olmoe
    olmoe.OLMOE_ATTENTION_CLASSES["recorded"] = olmoe.OlmoeFlashAttention2
    def flash(query, key, value, *args, **kwargs):
        made, _ = record(None, *(x.transpose(1, 2) for x in (query, key, value)), **kwargs)
        return made
    olmoe._flash_attention_forward = flash
except AttributeError:
    pass
for name, settings in json.loads(sys.argv[1]).items():
    config = CONFIG_MAPPING[name](vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="recorded")
    seen.clear()
    cuts = torch.tensor([0, 6, 12], dtype=torch.int32)
    signals = {"cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts, "max_length_q": 6, "max_length_k": 6}
    positions = torch.tensor([[0, 1, 2, 3, 4, 5] * 2])
    model(torch.randint(3, 64, (1, 12)), position_ids=positions, use_cache=False, **signals)
    answers[name] = [all(told) for told in zip(*seen)]
print(json.dumps(answers))
"""
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_CONFIGS: dict[str, dict[str, Any]] = {
    "persimmon": _SMALL,
    "llama": _SMALL,
    "mistral": _SMALL | {"num_key_value_heads": 1},
    "gemma2": _SMALL | {"num_key_value_heads": 1, "head_dim": 16},
    "qwen3": _SMALL | {"num_key_value_heads": 1, "head_dim": 16},
    "phi": _SMALL,
    "olmoe": _SMALL | {"num_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2},
}
KEPT = {"4.57.6": {"persimmon", "olmoe", "granitemoe"}, "5.17.0": {"persimmon"}, "5.24.0": {"persimmon"}}


def kept(version: str, name: str, settings: dict[str, Any]) -> list[FlashBoundary]:
    tree = find_tree(transformers_base(version).site / "transformers")
    found = declare(parse_config({"model_type": name, **settings}, source=name), tree)
    return [fact for fact in found.modes if isinstance(fact, FlashBoundary)]


@pytest.mark.parametrize("version", list(KEPT))
def test_what_is_read_is_what_arrives(version: str) -> None:
    site = transformers_base(version)
    done = subprocess.run(
        [str(site.python), "-c", _ARRIVES, json.dumps(_CONFIGS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    arrives = json.loads(done.stdout.splitlines()[-1])
    for name, settings in _CONFIGS.items():
        positions, boundaries = arrives[name]
        facts = kept(version, name, settings)
        assert bool(facts) is not positions, (name, facts)
        assert all(fact.hands_on or not boundaries for fact in facts), (name, facts)
    assert {name for name, (positions, _) in arrives.items() if not positions} == KEPT[version]


def test_the_layer_is_named() -> None:
    (fact,) = kept("5.24.0", "persimmon", _SMALL)
    assert (fact.attention, fact.file) == ("PersimmonAttention", "models/persimmon/modeling_persimmon.py")
    assert fact.path == ""
