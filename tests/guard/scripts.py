"""Training scripts of others, as people write them, and the interpreter with Trainer and TRL that they run in."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import observed
from observed import Interpreter

TRL = "1.16.0"
ACCELERATE = "1.15.0"


@cache
def trl_base() -> Interpreter:
    """trl, accelerate and datasets, beside the shared torch and transformers 5.24.0."""
    prefix = observed.CACHE / f"trl-{TRL}"
    sees = (observed.transformers_base("5.24.0").site, observed.torch_base().site)
    with observed._locked(prefix.name):
        if not (prefix / "complete").exists():
            env = Interpreter(prefix) if prefix.exists() else observed.make_venv(prefix, sees=sees)
            subprocess.run(
                [sys.executable, "-m", "pip", "--python", str(env.python), "install", "--quiet", f"trl=={TRL}",
                 f"accelerate=={ACCELERATE}"],
                check=True, env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            )  # fmt: skip
            (prefix / "complete").touch()
    return Interpreter(prefix)


MODEL = """
import sys
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

RAW = {
    "model_type": "qwen3_5_text", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"], "eos_token_id": 1, "pad_token_id": 0, "use_cache": False,
}
torch.manual_seed(0)
config = CONFIG_MAPPING["qwen3_5_text"].from_dict(dict(RAW))
model = AutoModelForCausalLM.from_config(config)
"""

PLAIN = (
    MODEL
    + """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model.train()
for step in range(3):
    ids = torch.randint(2, 64, (1, 12))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("trained", step + 1)
"""
)

TWO_LINES = """
import kernelguard.guard as guard
guard.before_training()
""" + PLAIN.replace("model.train()\n", "model.train()\nguard.watch(model, optimizer)\n")

TRAINER = (
    MODEL
    + """
from transformers import Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        ids = torch.arange(2, 14) + index
        return {"input_ids": ids, "labels": ids}

callbacks = []
if "--callback" in sys.argv:
    import kernelguard.guard as guard
    callbacks = [guard.TrainerGuard()]
arguments = TrainingArguments(
    output_dir="out", per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, report_to=[],
    save_steps=1, use_cpu=True, disable_tqdm=True, dataloader_num_workers=0,
    resume_from_checkpoint="out/checkpoint-1" if "--resume" in sys.argv else None,
)
trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=callbacks)
trainer.train(resume_from_checkpoint=arguments.resume_from_checkpoint)
print("trained", trainer.state.global_step)
hooks = sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in trainer.model.modules())
from torch.optim import optimizer
print("left", hooks + len(optimizer._global_optimizer_post_hooks) + len(optimizer._global_optimizer_pre_hooks))
"""
)

SFT = (
    MODEL
    + """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, 64)}}
raw = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
rows = Dataset.from_list([{"text": " ".join(f"w{2 + (i * 7 + j) % 60}" for j in range(5 + i % 4))} for i in range(32)])
packed = "--packed" in sys.argv
arguments = SFTConfig(
    output_dir="out", max_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True,
    save_strategy="no", max_length=24, bf16=False, packing=packed, padding_free=packed or None,
)
callbacks = []
if "--callback" in sys.argv:
    import kernelguard.guard as guard
    callbacks = [guard.TrainerGuard()]
trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=callbacks)
trainer.train()
print("trained", trainer.state.global_step)
"""
)
