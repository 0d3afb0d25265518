"""Can a step be captured as a CUDA graph, and what would that win? One batch, again and again.

    python benchmarks/rung.py GO OUT --loop graph.py -- CONFIG.toml [section.key=value...]

Forward and backward pass of one packed batch are timed as they are, then captured and replayed; the update stays
outside the graph in both. Both rates hold for that one batch only: a graph keeps the boundaries that it was recorded
with (docs/training/why-not-cuda-graphs.md), so this is what capturing could win, not a way to train. Where the capture
is refused, the reason is the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kernelguard_train import configfile, metrics, ranks
from kernelguard_train.model import build
from kernelguard_train.optim import clip_gradients, gradient_norm, make_optimizer
from kernelguard_train.sharding import make_mesh
from kernelguard_train.stream import Position, load_steps

WARMUP, TIMED = 3, 4


class Step:
    """One batch's forward and backward pass, and the update."""

    def __init__(self, config: Any, own: Any) -> None:
        self.config = config
        self.built = build(config, make_mesh(own.device, 1, 0), own.device)
        self.network = self.built.network
        self.optimizer = make_optimizer(self.network, config.optim, own.device)
        steps = load_steps(
            config, self.built.text.vocab_size, rank=0, world=1, start=Position(), device=own.device
        )  # fmt: skip
        self.batch = next(iter(steps)).batches[0].to(own.device)
        self.loss = torch.zeros((), device=own.device)

    def passes(self) -> None:
        """Forward and backward pass; afterwards each parameter has its gradient."""
        with self.network.computing():
            loss = self.network(self.batch, 1 / max(1, len(self.batch.trained_at)))
            loss.backward()
            self.loss.copy_(loss.detach())

    def update(self) -> float:
        """What the trainer does with the gradients, which stay where they are; the loss."""
        norm, loss = torch.stack([gradient_norm(self.network.parameters()), self.loss]).tolist()
        clip_gradients(self.network.parameters(), norm, self.config.optim.clip)
        self.optimizer.step()
        return float(loss)


def timed(step: Step, passes: Callable[[], None], times: int) -> tuple[float, float]:
    """Seconds of one step, and the last loss."""
    begun, loss = time.perf_counter(), 0.0
    for _ in range(times):
        passes()
        loss = step.update()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times, loss


def measure(step: Step, device: torch.device) -> dict[str, Any]:
    """Both rates, or the eager one and why there is no other."""
    tokens = step.batch.tokens
    side = torch.cuda.Stream() if device.type == "cuda" else None
    with torch.cuda.stream(side) if side else nullcontext():
        # Here and in the capture on one stream: autograd remembers the stream that a parameter was first used on.
        timed(step, step.passes, WARMUP)
        eager, loss = timed(step, step.passes, TIMED)
    found: dict[str, Any] = {"eager_tokens_per_s": tokens / eager, "eager_loss": loss, "steps": TIMED}
    if side is None:
        return found | {"problem": "not captured: there is no CUDA device"}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has memory of its own
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=side):
            step.passes()
    except Exception as error:  # noqa: BLE001 - whatever refuses it is what was asked for
        return found | {"problem": f"not captured: {type(error).__name__}: {error}"[:600]}
    timed(step, graph.replay, 1)
    seconds, loss = timed(step, graph.replay, TIMED)
    return found | {"tokens_per_s": tokens / seconds, "step_s": seconds, "graph_loss": loss}


def main(arguments: list[str], out: Path) -> None:
    config = configfile.load(Path(arguments[0]), arguments[1:])
    torch.manual_seed(config.train.seed)
    own = ranks.start(config)
    step = Step(config, own)
    on_gpu = own.device.type == "cuda"
    found = {"loop": "graph", **measure(step, own.device), "torch": torch.__version__}
    found["gpu"] = torch.cuda.get_device_name() if on_gpu else None
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    if on_gpu and "tokens_per_s" in found:
        layers, output = metrics.matmul_parameters(step.network.lm, step.built.text)
        operations = 6 * (layers * step.batch.tokens + output * len(step.batch.trained_at))
        peak = metrics.peak_tflops(found["gpu"], config.report.peak_tflops)
        if peak:
            found["mfu"] = operations / found["step_s"] / peak / 1e12
    print(json.dumps(found), flush=True)
    out.write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()
