"""The yardstick: the published baseline loop, at the published layer shapes, on one GPU.

It is the loop that the 6x result starts from: transformers' own model, SDPA attention, padded
two-dimensional batches of at most 8192 tokens, full activation checkpointing, FSDP2, fused AdamW,
and *no* fused kernel installed (run it with a PYTHONPATH that holds neither fla nor causal_conv1d).
The model is Qwen3.5-27B's text tower cut to N of its 64 layers (one in four is full attention).

    python yardstick.py --layers 8 --steps 3 --warmup 1

It prints one JSON line. The project's trainer must report the same fields for its own run, measured
in the same call on the same machine, so that the ratio of the two `tokens_per_s` is the result:

  tokens_per_s   real (unpadded) tokens of whole steps, optimizer included, per second
  mfu            6 * P * tokens_per_s / 989e12, P = parameters that take part in a matmul
                 (the embedding table is left out, lm_head counts; attention and delta-rule FLOPs
                 are left out, so this understates a little)
  lengths        lognormal, median 1175, sigma 0.33, clipped to 64..8192, seed 0: mean about 1240, as
                 UltraChat-200k has, and padded batches 64 % full, as published (packing: 36 % fewer batches)

Seen on one H200 (torch 2.11+cu130, transformers 5.17) with a wider spread (sigma 0.65, batches 52 % full):
8 layers, 1863 tokens/s, MFU 4.9 %; the CPU needs 4.5 s to queue what the GPU runs in 1.0 s. By fill alone
that is about 2300 tokens/s, 6 %, with the lengths used here. The published 32-GPU figure is 4.6 %.
"""

import argparse
import itertools
import json
import math
import os
import random
import time

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

PEAK_BF16 = 989e12
VOCABULARY, HIDDEN = 248_320, 5_120
MAX_TOKENS = 8_192
DEVICE = "cuda"
TOY = {}


def shrink() -> None:
    """Toy sizes, for a machine without a GPU."""
    global VOCABULARY, HIDDEN, MAX_TOKENS, DEVICE
    VOCABULARY, HIDDEN, MAX_TOKENS, DEVICE = 600, 64, 2048, "cpu"
    TOY.update(
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_value_heads=4,
        linear_num_key_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_hidden_layers=4,
    )


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def config_27b(layers: int) -> Qwen3_5TextConfig:
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=17_408,
        num_hidden_layers=layers,
        num_attention_heads=24,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_value_heads=48,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        use_cache=False,
    )
    return Qwen3_5TextConfig(**{**sizes, **TOY})


def lengths(seed: int = 0):
    draw = random.Random(seed)
    while True:
        yield int(min(MAX_TOKENS, max(64, draw.lognormvariate(math.log(1175), 0.33))))


def padded_batches(stream):
    rows, longest = [], 0
    for n in stream:
        if rows and max(longest, n) * (len(rows) + 1) > MAX_TOKENS:
            yield rows, longest
            rows, longest = [], 0
        rows.append(n)
        longest = max(longest, n)


def concatenated_blocks(stream):
    """The published recipe: samples one after the other, cut every MAX_TOKENS tokens wherever that falls."""
    left = 0
    while True:
        lengths, room = [], MAX_TOKENS
        while room:
            left = left or next(stream)
            taken = min(left, room)
            lengths.append(taken)
            room -= taken
            left -= taken
        yield lengths


def packed_inputs(lengths):
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE)
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()[None].to(DEVICE)
    return {
        "position_ids": positions,
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "seq_idx": numbers,
        "max_length_q": max(lengths),
        "max_length_k": max(lengths),
    }


def main(arguments=None, out=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU: a test of this script")
    parser.add_argument("--profile", help="record one further step into this file")
    parser.add_argument(
        "--recipe",
        action="store_true",
        help="the published fast recipe in the same loop: fused kernels, samples concatenated and cut, varlen attention",
    )
    args = parser.parse_args(arguments)

    for key, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1").items():
        os.environ.setdefault(key, value)
    torch.manual_seed(0)
    if args.tiny:
        shrink()
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"))

    if args.recipe:
        from kernelguard_train import attention, bindings

        if not args.tiny:
            attention.register()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = Qwen3_5ForCausalLM(config_27b(args.layers))
    if args.recipe:
        model.config._attn_implementation = "sdpa" if args.tiny else attention.NAME
        for bound in bindings.bind(model, fused=not args.tiny, convolution="auto"):
            print(bound)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    matmul_parameters = sum(p.numel() for p in model.parameters()) - VOCABULARY * HIDDEN
    model.train()

    batches = concatenated_blocks(lengths()) if args.recipe else padded_batches(lengths())

    def packed_step() -> int:
        own = next(batches)
        ids = torch.randint(0, VOCABULARY, (1, MAX_TOKENS)).to(DEVICE)
        loss = model(input_ids=ids, labels=ids, use_cache=False, **packed_inputs(own)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(own)

    def padded_step() -> int:
        rows, longest = next(batches)
        ids = torch.randint(0, VOCABULARY, (len(rows), longest))
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for i, n in enumerate(rows):
            mask[i, :n] = 1
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids.to(DEVICE), attention_mask=mask.to(DEVICE), labels=labels.to(DEVICE)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(rows)

    step = packed_step if args.recipe else padded_step
    for _ in range(args.warmup):
        step()
    synchronize()
    start = time.perf_counter()
    tokens = sum(step() for _ in range(args.steps))
    synchronize()
    seconds = time.perf_counter() - start
    result = {
        "loop": "recipe" if args.recipe else "baseline",
        "layers": args.layers,
        "steps": args.steps,
        "tokens_per_s": tokens / seconds,
        "step_s": seconds / args.steps,
        "mfu": 6 * matmul_parameters * tokens / seconds / PEAK_BF16,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if DEVICE == "cuda" else 0.0,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if DEVICE == "cuda" else None,
    }
    print(json.dumps(result), flush=True)
    if out is not None:
        out.write_text(json.dumps(result))
    if args.profile:
        from pathlib import Path

        from kernelguard_train.profiling import Recorder

        recorder = Recorder(Path(args.profile))
        recorder.start()
        recorder.finish(batches=1, tokens=step())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
