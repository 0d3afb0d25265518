"""How is an empty kernel cache filled in a minute instead of four? Its compilations are shared by several processes.

    python benchmarks/warm.py [--processes 14] [--variants grouped,repeated,padded,moe] [--tokens 8192]

fla's kernels are tuned at first use: every candidate is compiled, one after the other, and timed. Here each process
compiles its share of the candidates into the same TRITON_CACHE_DIR; then one process times them all, which finds them
compiled, and leaves its choice in the cache too. One JSON line says what it took.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HEADS = {"grouped": (16, 48), "repeated": (48, 48), "padded": (48, 48), "moe": (16, 32)}
"""Key and value heads of the 27B shape, and of the mixture of experts; `padded` is without sample boundaries."""
SIZE, KEYS = 128, 16
PLAIN = ("kwargs", "num_warps", "num_stages")
"""What tells the candidates of one kernel apart."""


def work(variants: list[str], tokens: int) -> None:
    """Forward and backward passes through every fla kernel of a gated delta layer."""
    import torch
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.modules.norm.fused_norm_gate import rms_norm_gated
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    for variant in variants:
        keys, values = HEADS[variant]
        rows = 4 if variant == "padded" else 1
        own = tokens // rows
        edges = torch.tensor([0, own // 4, own // 2, own], device="cuda", dtype=torch.int32)
        boundaries = {} if variant == "padded" else {"cu_seqlens": edges, "cu_seqlens_cpu": edges.cpu()}
        q, k = (torch.randn(rows, own, keys, SIZE, **bf16) for _ in range(2))
        v = torch.randn(rows, own, values, SIZE, **bf16)
        beta = torch.rand(rows, own, values, **bf16)
        g = -torch.rand(rows, own, values, device="cuda", requires_grad=True)
        out, _ = chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True, **boundaries)
        out.sum().backward()
        channels = (2 * KEYS + values) * SIZE
        x = torch.randn(rows, own, channels, **bf16)
        weight = torch.randn(channels, 4, **bf16)
        y = causal_conv1d(x, weight, None, activation="silu", **boundaries)
        (y[0] if isinstance(y, tuple) else y).sum().backward()
        gate = torch.randn_like(v, requires_grad=True)
        rms_norm_gated(v, gate, torch.ones(SIZE, **bf16), None, activation="swish", eps=1e-6).sum().backward()
    torch.cuda.synchronize()


def share(part: int, parts: int) -> None:
    """From here on this process compiles every `parts`-th candidate, times none, and leaves no choice behind."""
    from triton.runtime.autotuner import Autotuner

    whole = Autotuner.prune_configs

    def own(self: Any, kwargs: dict[str, Any]) -> list[Any]:
        configs = whole(self, kwargs)
        # Shares of different kernels begin at different processes, or the first ones would have the most to do.
        offset = (part + len(self.base_fn.__name__)) % parts
        return configs[offset::parts] or configs[:1]

    def once(call: Any, **_: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    def untimed(_self: Any, _key: Any, _configs: Any, bench: Any) -> bool:
        bench()
        return False

    Autotuner.prune_configs = own  # type: ignore[method-assign]
    Autotuner.check_disk_cache = untimed  # type: ignore[method-assign]
    Autotuner.do_bench = property(lambda _: once)  # type: ignore[assignment,method-assign]


def reuse() -> None:
    """A kernel that was tuned for one shape takes that choice for others too, instead of being tuned anew.

    What it decides stays in the cache under the new shape's name, so that later processes find it there.
    """
    from triton.runtime.autotuner import Autotuner

    chosen: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.autotune.json")):
        timings = json.loads(path.read_text(encoding="utf-8"))["configs_timings"]
        chosen.setdefault(path.name.removesuffix(".autotune.json"), min(timings, key=lambda item: item[1])[0])
    whole = Autotuner.check_disk_cache

    def check(self: Any, key: Any, configs: Any, bench: Any) -> bool:
        found = chosen.get(self.base_fn.__name__)
        same = [c for c in configs if found and all(getattr(c, name) == found[name] for name in PLAIN)]

        def instead() -> None:
            if same:
                self.cache[key], self.bench_time, self.configs_timings = same[0], 0.0, {same[0]: [1.0, 1.0, 1.0]}
            else:
                bench()

        return bool(whole(self, key, configs, instead))

    Autotuner.check_disk_cache = check  # type: ignore[method-assign]


def quick() -> None:
    """Shorter timings: enough to tell candidates apart, and a third of the time."""
    import triton.testing
    from triton.runtime.autotuner import Autotuner

    def timed(call: Any, quantiles: Any) -> Any:
        return triton.testing.do_bench(call, warmup=5, rep=20, quantiles=quantiles)

    Autotuner.do_bench = property(lambda _: timed)  # type: ignore[assignment,method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--variants", default="grouped")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a process may compile")
    parser.add_argument("--share", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reuse", action="store_true", help="compile the choices made for other shapes; tune nothing")
    parser.add_argument("--tune", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    variants = options.variants.split(",")
    if options.share:
        share(*options.share)
        work(variants, 1024)
        return
    if options.reuse:
        reuse()
        work(variants, options.tokens)
        return
    if options.tune:
        quick()
        work(variants, options.tokens)
        return
    begun = time.perf_counter()
    command = [sys.executable, __file__, "--variants", options.variants, "--tokens", str(options.tokens)]
    children = [
        subprocess.Popen([*command, "--share", str(part), str(options.processes)], stderr=subprocess.PIPE, text=True)
        for part in range(options.processes)
    ]
    problems = []
    for child in children:
        try:
            _, errors = child.communicate(timeout=max(1.0, options.limit - (time.perf_counter() - begun)))
        except subprocess.TimeoutExpired:
            child.kill()
            errors = "ran past the limit"
        if child.returncode:
            problems.append(errors[-500:])
    compiled = time.perf_counter() - begun
    done = subprocess.run([*command, "--tune"], check=False, capture_output=True, text=True)
    print(
        json.dumps(
            {
                "variants": variants,
                "processes": options.processes,
                "compile_s": compiled,
                "tune_s": time.perf_counter() - begun - compiled,
                "tuned": done.returncode == 0,
                "problems": [*problems, *([done.stderr[-800:]] if done.returncode else [])],
            }
        )
    )


if __name__ == "__main__":
    main()
