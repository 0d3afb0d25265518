"""TRL's SFTTrainer with packing, at the yardstick's shapes and lengths: what a user has without this project's trainer.

    python benchmarks/beside_trl.py --layers 8 --steps 5 --warmup 3 [--pack 8192] [--tiny]

Its settings are those its documentation names for speed: packing by best fit, padding-free batches, bf16 autocast on
float32 weights, gradient checkpointing, fused AdamW, Liger's kernels where they are installed. torch has no varlen
attention that transformers knows, and flash-attn is not there: without it TRL's packed samples need `sdpa`'s mask.
It prints the yardstick's JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yardstick
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Called by the trainer."""
        yardstick.synchronize()
        self.ended.append(time.perf_counter())


class Counting:
    """The trainer's own collator; what each batch really held, without padding."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator
        self.tokens: list[int] = []

    def __call__(self, rows: list[dict[str, Any]]) -> Any:
        """A batch of these rows."""
        self.tokens.append(sum(len(row["input_ids"]) for row in rows))
        return self.collator(rows)


def tokenizer() -> Any:
    """TRL asks for one although the samples are token ids already."""
    raw = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))  # noqa: S106 - no password
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")  # noqa: S106


def main(arguments: list[str] | None = None, out: Path | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--pack", type=int, default=8192, help="tokens of a pack")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU: a test of this script")
    options = parser.parse_args(arguments)
    if options.tiny:
        yardstick.shrink()
        options.pack = 512
    on_gpu = yardstick.DEVICE == "cuda"
    torch.manual_seed(0)
    with torch.device(yardstick.DEVICE):
        model = Qwen3_5ForCausalLM(yardstick.config_27b(options.layers))
    matmul_parameters = sum(p.numel() for p in model.parameters()) - yardstick.VOCABULARY * yardstick.HIDDEN
    steps = options.steps + options.warmup
    # Best fit leaves packs a little short, so there are more samples than the steps need.
    samples, total = [], 0
    for length in yardstick.lengths():
        own = min(length, options.pack)
        samples.append({"input_ids": torch.randint(2, yardstick.VOCABULARY, (own,)).tolist()})
        total += own
        if total > 2 * steps * options.pack:
            break
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=1, gradient_accumulation_steps=1,
            learning_rate=1e-5, adam_beta2=0.95, weight_decay=0.0, bf16=on_gpu, use_cpu=not on_gpu,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch", gradient_checkpointing=True,
            max_length=options.pack, packing=True, report_to=[], save_strategy="no", logging_strategy="no",
            disable_tqdm=True, dataloader_num_workers=0,
        )  # fmt: skip
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=Dataset.from_list(samples), processing_class=tokenizer(),
            callbacks=[clock],
        )  # fmt: skip
        counting = trainer.data_collator = Counting(trainer.data_collator)
        trainer.train()
    seconds = clock.ended[-1] - clock.ended[options.warmup - 1]
    tokens = sum(counting.tokens[options.warmup : steps])
    result = {
        "loop": "trl",
        "layers": options.layers,
        "steps": options.steps,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / options.steps,
        "mfu": 6 * matmul_parameters * tokens / seconds / yardstick.PEAK_BF16,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
    }
    print(json.dumps(result), flush=True)
    if out is not None:
        out.write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
