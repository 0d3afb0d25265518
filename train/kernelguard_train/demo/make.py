"""Writes the demo's model folder: a tiny Qwen3.5 configuration and a tokenizer, both made here, nothing downloaded.

`python -m kernelguard_train.demo.make FOLDER`
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

CHATS = Path(__file__).with_name("chats.jsonl")
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
TOKENS = 600
"""Vocabulary of the demo's tokenizer: 256 bytes, the special tokens, and merges learnt from the chats."""


def tiny_qwen(vocabulary: int = TOKENS) -> dict[str, object]:
    """A Qwen3.5 in miniature, with both of its kinds of layer."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "tie_word_embeddings": False,
    }


def save_tokenizer(folder: Path) -> None:
    """Trains a byte-level tokenizer on the bundled chats and saves it with a marked chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rows = [json.loads(line) for line in CHATS.read_text(encoding="utf-8").splitlines()]
    texts = [turn["content"] for row in rows for turn in row["messages"]]
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENS,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",  # noqa: S106 - a token of text, not a password
        pad_token="<|endoftext|>",  # noqa: S106
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = TEMPLATE.read_text(encoding="utf-8")
    fast.save_pretrained(folder)


def main(folder: Path) -> None:
    """Writes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(tiny_qwen(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
