"""Would cuDNN's attention be faster for packed batches than the flash attention that torch's `varlen_attn` takes?

    PYTHONPATH=train python benchmarks/varlen.py --json OUT.json [--tokens 16384]

Both at the 27B's shape (24 query heads, 4 key and value heads of 256), forward and backward, on samples of the
yardstick's lengths: milliseconds, and how far output and gradients are from float32 attention over each sample alone.
torch decides against cuDNN in a private function; here it is told to take it, which no training run does.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import torch
import yardstick
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from kernelguard_train import attention

HEADS, GROUPS, SIZE = 24, 4, 256


def own_lengths(tokens: int) -> list[int]:
    """The yardstick's samples, the last one cut."""
    found: list[int] = []
    for length in yardstick.lengths():
        found.append(min(length, tokens - sum(found)))
        if sum(found) == tokens:
            return found
    raise AssertionError


def timed(action: Any, repeats: int = 20) -> float:
    """Mean milliseconds."""
    for _ in range(3):
        action()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        action()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def reference(tensors: list[torch.Tensor], lengths: list[int], slope: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients in float32, sample by sample."""
    leaves = [t.detach().float().requires_grad_() for t in tensors]
    parts = []
    for start, length in zip(itertools.accumulate([0, *lengths]), lengths, strict=False):
        q, k, v = (t[start : start + length].transpose(0, 1)[None] for t in leaves)
        parts.append(scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    out = torch.cat(parts)
    out.backward(slope.float())
    return [out.detach(), *(t.grad for t in leaves)]  # type: ignore[list-item]


def attend(tensors: list[torch.Tensor], edges: torch.Tensor, longest: int, *, cudnn: bool) -> torch.Tensor:
    """One call through torch's `varlen_attn`."""
    q, k, v = tensors
    if cudnn:  # it wants as many key heads as query heads, and causal said in its own way
        k, v = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (k, v))
        out: torch.Tensor = varlen._varlen_attn(q, k, v, edges, edges, longest, longest, True)[0]  # noqa: SLF001
        return out
    own: torch.Tensor = attention.adapted(varlen.varlen_attn)(q, k, v, edges, longest, SIZE**-0.5)
    return own


def measure(tokens: int, *, cudnn: bool) -> dict[str, Any]:
    """One row."""
    torch.manual_seed(0)
    lengths = own_lengths(tokens)
    edges = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    tensors = [
        torch.randn(tokens, heads, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]
    slope = torch.randn(tokens, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
    row: dict[str, Any] = {"backend": "cuDNN" if cudnn else "flash", "tokens": tokens, "samples": len(lengths)}
    varlen._should_use_cudnn = lambda _: cudnn  # type: ignore[assignment]  # noqa: SLF001
    try:
        out = attend(tensors, edges, max(lengths), cudnn=cudnn)
        found = [out.detach(), *torch.autograd.grad(out, tensors, slope)]
        for name, own, wanted in zip("oqkv", found, reference(tensors, lengths, slope), strict=True):
            row[f"error_{name}"] = float((own.float() - wanted).norm() / wanted.norm())

        def both() -> None:
            torch.autograd.grad(attend(tensors, edges, max(lengths), cudnn=cudnn), tensors, slope)

        row["ms"] = timed(both)
    except Exception as error:  # noqa: BLE001 - the reason is the result
        row["problem"] = f"{type(error).__name__}: {error}"[:600]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=16_384)
    options = parser.parse_args()
    rows = []
    for cudnn in (False, True):
        rows.append(measure(options.tokens, cudnn=cudnn))
        print(json.dumps(rows[-1]), flush=True)
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    options.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
