"""Whose attention is masked by sample: what is read from real releases equals what a packed batch does in them."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from kernelguard.declare import declare, find_tree, parse_config
from kernelguard.declare.modes import SampleMask
from observed import transformers_base

pytestmark = pytest.mark.observed
_LEAKS = """
import json, sys, torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
answers = {}
for name, settings in json.loads(sys.argv[1]).items():
    config = CONFIG_MAPPING[name](vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    ids = torch.randint(3, 64, (1, 12))
    other = ids.clone()
    other[:, :6] = torch.randint(3, 64, (1, 6))
    positions = torch.tensor([[0, 1, 2, 3, 4, 5] * 2])
    with torch.no_grad():
        first, second = (model(x, position_ids=positions, use_cache=False).logits[:, 6:] for x in (ids, other))
    answers[name] = bool((first - second).abs().max() > 1e-5)
print(json.dumps(answers))
"""
_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_EXPERTS = {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "num_experts_per_tok": 2}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt_oss": _SMALL | _EXPERTS | {"num_local_experts": 4},
    "opt": _SMALL | {"ffn_dim": 32, "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "llama": _SMALL | {"intermediate_size": 32},
    "mixtral": _SMALL | _EXPERTS | {"num_local_experts": 4},
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "roformer": _SMALL | {"intermediate_size": 32, "embedding_size": 32, "is_decoder": True},
    "gemma3_text": _SMALL | {"num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32},
}


def _blind(version: str, **config: Any) -> list[SampleMask]:
    tree = find_tree(transformers_base(version).site / "transformers")
    return [f for f in declare(parse_config(config, source="test"), tree).modes if isinstance(f, SampleMask)]


def test_what_is_read_is_what_a_packed_batch_does() -> None:
    python = transformers_base("5.24.0")
    env = {"PYTHONPATH": str(transformers_base("5.24.0").site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(python.python), "-c", _LEAKS, json.dumps(_CONFIGS)], capture_output=True, text=True, check=True, env=env
    )
    leaks = json.loads(done.stdout.splitlines()[-1])
    assert leaks["gpt_oss"]
    assert leaks["opt"]
    assert not leaks["llama"]
    read = {name: bool(_blind("5.24.0", model_type=name, **config)) for name, config in _CONFIGS.items()}
    assert read == leaks


@pytest.mark.parametrize(("version", "blind"), [("5.5.4", True), ("5.24.0", False)])
def test_each_release_is_read_by_itself(version: str, blind: bool) -> None:
    assert bool(_blind(version, model_type="falcon")) is blind


def test_a_mask_that_is_made_under_another_name_is_read_where_it_is_called() -> None:
    assert not _blind("5.24.0", model_type="blt")
    assert [f.is_library_mask for f in _blind("5.24.0", model_type="roformer")] == [True]


def test_a_model_that_asks_for_no_mask_is_not_understood() -> None:
    assert [f.is_library_mask for f in _blind("5.24.0", model_type="openai-gpt")] == [False]
    # Nothing attends there.
    assert not _blind("5.24.0", model_type="mamba2")


def test_a_composite_is_read_by_its_text_part() -> None:
    assert [f.path for f in _blind("5.24.0", model_type="blip-2", text_config={"model_type": "opt"})] == ["text_config"]
    assert not _blind("5.24.0", model_type="llava", text_config={"model_type": "llama"})
