"""Asks an exported model a question, as any user of transformers would.

`python -m kernelguard_train.demo.ask FOLDER QUESTION`
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def ask(folder: Path, question: str) -> str:
    """The model's answer, without sampling."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(
        **prompt,
        max_new_tokens=30,
        do_sample=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    answer: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return answer


if __name__ == "__main__":
    sys.stdout.write(f"{sys.argv[2]}\n{ask(Path(sys.argv[1]), sys.argv[2])}\n")
