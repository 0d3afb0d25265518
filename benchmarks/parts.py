"""How fast does each part of a step run on this GPU alone, and how fast could it?

    python benchmarks/parts.py --tokens 8192 --json parts.json [--only gemm,loss]

Ceilings are measured, not read off a data sheet: the best large bf16 product and the largest copy. Each part is timed
at the 27B's shapes with CUDA events, and stands beside its lower bound: operations over the one ceiling, bytes that
must move over the other, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

HIDDEN, INNER, VOCABULARY, CHANNELS = 5120, 17_408, 248_320, 10_240
MATRICES = {"gate or up": (INNER, HIDDEN), "down": (HIDDEN, INNER), "qkv": (CHANNELS, HIDDEN), "z": (6144, HIDDEN),
            "attention q": (12_288, HIDDEN), "out": (HIDDEN, 6144)}  # fmt: skip
LIMIT_S = 100.0


def timed(action: Callable[[], Any], repeats: int = 10) -> float:
    """Median milliseconds of one call."""
    for _ in range(2):
        action()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        action()
        mark.record()
    torch.cuda.synchronize()
    spans = sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))  # noqa: RUF007
    return spans[len(spans) // 2]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype).mul_(0.1).requires_grad_(grad)


class Table:
    """Rows, written as they come: a limit that ends the run loses nothing."""

    def __init__(self, path: Path, tokens: int) -> None:
        self.path, self.tokens = path, tokens
        self.rows: list[dict[str, Any]] = []
        self.ceilings: dict[str, float] = {}

    def add(self, part: str, ms: float | None, *, flops: float = 0.0, moved: float = 0.0, note: str = "") -> None:
        row: dict[str, Any] = {"part": part, "ms": ms, "note": note}
        if ms and flops:
            row["tflops"] = flops / ms / 1e9
        if ms and moved:
            row["tb_s"] = moved / ms / 1e9
        if self.ceilings:
            bound = max(flops / self.ceilings["tflops"] / 1e9, moved / self.ceilings["tb_s"] / 1e9)
            row |= {"bound_ms": bound, "gap": ms / bound if ms and bound else None}
        self.rows.append(row)
        self.save()
        shown = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print(json.dumps(shown), flush=True)

    def attempt(self, part: str, action: Callable[[], Any], **amounts: Any) -> None:
        """A row, or why there is none: another torch or package may lack what is measured."""
        try:
            ms = timed(action)
        except Exception as error:  # noqa: BLE001 - the reason goes into the table, word for word
            self.add(part, None, note=f"{type(error).__name__}: {error}"[:300])
        else:
            self.add(part, ms, **amounts)

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"gpu": torch.cuda.get_device_name(), "tokens": self.tokens, "ceilings": self.ceilings}
        self.path.write_text(json.dumps({**content, "rows": self.rows}, indent=1) + "\n", encoding="utf-8")


def ceilings(table: Table) -> None:
    size = 8192
    a, b = random(size, size), random(size, size)
    ms = timed(lambda: a @ b, 20)
    source = torch.empty(2**32, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), 10)
    table.ceilings = {"tflops": 2 * size**3 / ms / 1e9, "tb_s": 2 * 2**32 / copy / 1e9}
    print(json.dumps(table.ceilings), flush=True)
    # Sustained: half a second of products, as training does; the clock sinks under load.
    begun = time.perf_counter()
    rounds = 0
    while time.perf_counter() - begun < 1.5:
        for _ in range(50):
            a @ b
        rounds += 50
        torch.cuda.synchronize()
    table.ceilings["tflops_sustained"] = 2 * size**3 * rounds / (time.perf_counter() - begun) / 1e12
    table.save()


def gemm(table: Table) -> None:
    tokens = table.tokens
    for name, (rows, columns) in MATRICES.items():
        weight, x, dy = random(rows, columns), random(tokens, columns), random(tokens, rows)
        flops = 2.0 * tokens * rows * columns
        total = torch.zeros(rows, columns, device="cuda")
        table.attempt(f"{name}: forward", lambda: functional.linear(x, weight), flops=flops)
        table.attempt(f"{name}: input gradient", lambda: dy @ weight, flops=flops)
        table.attempt(f"{name}: weight gradient, bf16", lambda: dy.T @ x, flops=flops)
        table.attempt(f"{name}: weight gradient, added in float32", lambda: accumulate(total, dy, x), flops=flops)
    exact = torch.zeros(256, 320, device="cuda")
    dy, x = random(512, 256), random(512, 320)
    accumulate(exact, dy, x)
    accumulate(exact, dy, x)
    wanted = 2 * dy.double().T @ x.double()
    error = float((exact.double() - wanted).norm() / wanted.norm())
    table.add("float32 sum of bf16 products, against float64", None, note=f"relative error {error:.1e}")


def accumulate(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    torch.ops.aten.addmm.dtype_out(total, dy.T, x, torch.float32, beta=1.0, alpha=1.0, out=total)


def loss(table: Table) -> None:
    from kernelguard_train.kernels import cross_entropy
    from kernelguard_train.loss import _chunk

    chunk = 4096
    weight, hidden = random(VOCABULARY, HIDDEN), random(chunk, HIDDEN)
    targets = torch.randint(0, VOCABULARY, (chunk,), device="cuda")
    flops = 2.0 * chunk * VOCABULARY * HIDDEN
    logits = hidden @ weight.T
    moved = 3.0 * 2 * logits.numel()
    table.attempt(f"logits of {chunk}", lambda: hidden @ weight.T, flops=flops)
    compiled = torch.compile(_chunk, dynamic=True)
    table.attempt("cross entropy, compiled", lambda: compiled(logits, targets), moved=moved)
    wanted_loss, wanted = _chunk(logits[:64].float(), targets[:64])
    found_loss, gradient = cross_entropy(logits[:64].clone(), targets[:64])
    error = float((gradient.float() - wanted).norm() / wanted.norm())
    difference = abs(float(found_loss - wanted_loss)) / float(wanted_loss)
    note = f"relative error {difference:.1e}, gradient {error:.1e}"
    table.add("cross entropy, own kernel, against eager float32", None, note=note)
    table.attempt("cross entropy, own kernel", lambda: cross_entropy(logits, targets), moved=moved)
    gradient = compiled(hidden @ weight.T, targets)[1]
    table.attempt("logits' gradient to hidden", lambda: gradient @ weight, flops=flops)
    total = torch.zeros(VOCABULARY, HIDDEN, device="cuda")
    table.attempt("logits' gradient to weight, float32", lambda: accumulate(total, gradient, hidden), flops=flops)
    table.attempt("logits' gradient to weight, bf16", lambda: gradient.T @ hidden, flops=flops)


def delta(table: Table) -> None:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    tokens = table.tokens
    edges = [*range(0, tokens, 1300), tokens]
    edges = torch.tensor(edges, device="cuda", dtype=torch.int32)
    first: list[torch.Tensor] = []
    for backend in ("0", "1"):
        os.environ["FLA_FLASH_QLA"] = backend
        torch.manual_seed(0)
        for keys in (16,):
            bf16 = torch.bfloat16
            q, k = (random(1, tokens, keys, 128, grad=True) for _ in range(2))
            v = random(1, tokens, 48, 128, grad=True)
            beta = torch.rand(1, tokens, 48, device="cuda", dtype=bf16, requires_grad=True)
            g = (-torch.rand(1, tokens, 48, device="cuda")).requires_grad_()
            options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": edges}
            if backend == "0":
                options["cu_seqlens_cpu"] = edges.cpu()
            dy = random(1, tokens, 48, 128)
            moved = 2.0 * tokens * 128 * (2 * keys + 2 * 48)
            name = f"delta rule, {'flash-qla if installed' if backend == '1' else 'fla'}, {keys} key heads"

            def forward() -> torch.Tensor:
                return chunk_gated_delta_rule(q, k, v, g, beta, **options)[0]

            def both() -> None:
                forward().backward(dy)

            begun = time.perf_counter()
            table.attempt(f"{name}: forward", forward, moved=moved)
            table.attempt(
                f"{name}: both", both, moved=3.5 * moved, note=f"first use {time.perf_counter() - begun:.0f} s"
            )
            for tensor in (q, k, v, g, beta):
                tensor.grad = None
            both()
            found = [forward().detach(), q.grad, k.grad, v.grad, g.grad, beta.grad]
            if keys == 16:
                first = first or found
                note = "off by " + ", ".join(apart(a, b) for a, b in zip(found, first, strict=True))
                table.add(f"{name}: against the first one above", None, note=note)


def apart(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{float((a.float() - b.float()).norm() / b.float().norm()):.1e}"


def small(table: Table) -> None:
    from kernelguard_train.attention import adapted
    from kernelguard_train.fused import swiglu, swiglu_backward

    tokens = table.tokens
    edges = torch.tensor([*range(0, tokens, 1300), tokens], device="cuda", dtype=torch.int32)
    gate, up, slope = random(tokens, INNER), random(tokens, INNER), random(tokens, INNER)
    forward, backward = torch.compile(swiglu, dynamic=False), torch.compile(swiglu_backward, dynamic=False)
    table.attempt("SwiGLU forward", lambda: forward(gate, up), moved=2.0 * 3 * gate.numel())
    table.attempt("SwiGLU backward", lambda: backward(slope, gate, up), moved=2.0 * 6 * gate.numel())

    def conv(kind: str) -> None:
        torch.manual_seed(0)
        x = random(1, tokens, CHANNELS, grad=True)
        weight = random(CHANNELS, 4, grad=True)
        dy = random(1, tokens, CHANNELS)
        index = torch.bucketize(torch.arange(tokens, device="cuda"), edges[1:], right=True).int()[None]
        if kind == "own":
            from kernelguard_train.kernels import packed_convolution

            slopes = [part.contiguous() for part in dy.split([2048, 2048, CHANNELS - 4096], dim=-1)]

            def both() -> None:
                torch.autograd.backward(packed_convolution(x, weight, index, 2048), slopes)
        elif kind == "fla":
            from fla.modules.causal_conv1d import causal_conv1d

            cpu = edges.cpu()

            def both() -> None:
                causal_conv1d(x, weight, None, activation="silu", cu_seqlens=edges, cu_seqlens_cpu=cpu)[0].backward(dy)
        else:
            from causal_conv1d import causal_conv1d_fn

            def both() -> None:
                y = causal_conv1d_fn(x.transpose(1, 2), weight, None, seq_idx=index, activation="silu")
                y.transpose(1, 2).backward(dy)

        both()
        table.attempt(f"convolution, {kind}: both", both, moved=2.0 * 5 * x.numel())
        x.grad = weight.grad = None
        both()
        compare(f"convolution, {kind}", reference.setdefault("conv", (x.grad, weight.grad)), (x.grad, weight.grad))

    reference: dict[str, Any] = {}

    def compare(name: str, expected: Any, found: Any) -> None:
        note = "gradients off by " + ", ".join(apart(a, b) for a, b in zip(found, expected, strict=True))
        table.add(f"{name}: against the first one above", None, note=note)

    for kind in ("fla", "causal-conv1d", "own"):
        try:
            conv(kind)
        except ImportError as error:
            table.add(f"convolution, {kind}", None, note=str(error))
    from fla.modules.norm.fused_norm_gate import rms_norm_gated

    o, z = random(1, tokens, 48, 128, grad=True), random(1, tokens, 48, 128, grad=True)
    ones, dy = torch.ones(128, device="cuda", dtype=torch.bfloat16, requires_grad=True), random(1, tokens, 48, 128)
    table.attempt(
        "gated norm: both",
        lambda: rms_norm_gated(o, z, ones, None, activation="swish", eps=1e-6).backward(dy),
        moved=2.0 * 8 * o.numel(),
    )
    from liger_kernel.transformers.rms_norm import LigerRMSNormForQwen3Next

    norm = LigerRMSNormForQwen3Next(HIDDEN).to("cuda", torch.bfloat16)
    x, dy = random(1, tokens, HIDDEN, grad=True), random(1, tokens, HIDDEN)
    table.attempt("norm, liger: both", lambda: norm(x).backward(dy), moved=2.0 * 5 * x.numel())

    from torch.nn.attention import varlen

    attend = adapted(varlen.varlen_attn)
    q = random(tokens, 24, 256, grad=True)
    k, v = (random(tokens, 4, 256, grad=True) for _ in range(2))
    dy = random(tokens, 24, 256)
    lengths = edges.diff().float()
    pairs = float((lengths**2).sum()) / 2
    flops = 4.0 * 24 * 256 * pairs
    longest = int(lengths.max())
    table.attempt("attention: forward", lambda: attend(q, k, v, edges, longest, 256**-0.5), flops=flops)
    table.attempt("attention: both", lambda: attend(q, k, v, edges, longest, 256**-0.5).backward(dy), flops=3.5 * flops)


def update(table: Table) -> None:
    weight = torch.nn.Parameter(torch.randn(500_000_000, device="cuda"))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    table.attempt("AdamW, 0.5 B parameters", optimizer.step, moved=28.0 * weight.numel())
    narrow = torch.empty_like(weight, dtype=torch.bfloat16)
    table.attempt("bf16 copy, 0.5 B", lambda: narrow.copy_(weight.detach()), moved=6.0 * weight.numel())
    table.attempt("norm, 0.5 B", lambda: torch.linalg.vector_norm(weight.grad), moved=4.0 * weight.numel())


def fp8(table: Table) -> None:
    from kernelguard_train import float8

    tokens = table.tokens
    quantizer = float8.Quantizer(compiled=True)
    for name in ("gate or up", "down"):
        rows, columns = MATRICES[name]
        weight, x, dy = random(rows, columns), random(tokens, columns), random(tokens, rows)
        flops = 2.0 * tokens * rows * columns
        table.attempt(
            f"float8 cast [{tokens}, {columns}]", lambda: quantizer.cast(x, float8.FORWARD), moved=5.0 * x.numel()
        )
        narrow, turned, factor = quantizer.weight(torch.nn.Parameter(weight))
        inputs, slope = quantizer.cast(x, float8.FORWARD), quantizer.cast(dy, float8.BACKWARD)
        run = float8.product
        table.attempt(f"float8 {name}: forward", lambda: run(inputs, (narrow, factor), x.dtype, fast=True), flops=flops)
        for fast in (True, False):
            table.attempt(
                f"float8 {name}: input gradient, {'fast' if fast else 'exact'} sums",
                lambda: run(slope, (turned, factor), x.dtype, fast=fast),
                flops=flops,
            )
        found, wanted = run(inputs, (narrow, factor), x.dtype, fast=True), functional.linear(x, weight)
        error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
        table.add(f"float8 {name}: against bf16", None, note=f"relative error {error:.1e}")


PARTS = {"gemm": gemm, "loss": loss, "delta": delta, "small": small, "update": update, "fp8": fp8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--only", default=",".join(PARTS), help="of the parts; any other word: the ceilings alone")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    table = Table(options.json, options.tokens)
    ceilings(table)
    for name in (name for name in options.only.split(",") if name in PARTS):
        try:
            PARTS[name](table)
        except Exception as error:  # noqa: BLE001 - the other parts are still to be measured
            table.add(name, None, note=f"{type(error).__name__}: {error}"[:400])
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
