"""What is kept from the forward pass, and what is computed again in the backward pass?

A ladder of three rungs for each decoder layer: `full` keeps only its input, `selective` also keeps what is expensive
to compute (every other matrix product, attention), `none` keeps everything. `auto` measures what each rung costs in one
layer of each kind, and gives as many layers as possible the cheapest rung to compute that memory allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kernelguard_train.errors import ModelError

Rung = Literal["full", "selective", "none"]
RUNGS: tuple[Rung, ...] = ("none", "selective", "full")
_HEADROOM = 0.92
"""Part of the device's memory that may be planned for: fragments and communication buffers need the rest."""


@functools.cache
def _saved_ops() -> frozenset[Any]:
    """Attention kernels: never computed twice."""
    names = (
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_cudnn_attention.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "torch_attn._varlen_attn.default",
    )
    found = set()
    for name in names:
        space, operation, overload = name.split(".")
        packet = getattr(getattr(torch.ops, space), operation, None)
        if packet is not None:
            found.add(getattr(packet, overload))
    return frozenset(found)


def _selective_contexts() -> Any:
    counts = {"forward": 0, "recompute": 0}
    saved = _saved_ops()

    def policy(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in saved:
            return CheckpointPolicy.MUST_SAVE
        if operation == torch.ops.aten.mm.default:
            phase = "recompute" if context.is_recompute else "forward"
            counts[phase] += 1
            # Every other product: half of the recomputing for half of the memory.
            return CheckpointPolicy.MUST_SAVE if counts[phase] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]


def set_rung(layer: nn.Module, rung: Rung) -> None:
    """Puts one decoder layer on a rung.

    Raises:
        ModelError: when the layer is not one that transformers can checkpoint.
    """
    if not hasattr(layer, "gradient_checkpointing"):
        raise ModelError(f"{type(layer).__name__} cannot be recomputed by transformers; set model.recompute=none")
    extra: dict[str, Any] = {"context_fn": _selective_contexts} if rung == "selective" else {}
    target: Any = layer
    target.gradient_checkpointing = rung != "none"
    target._gradient_checkpointing_func = functools.partial(  # noqa: SLF001 - the attribute transformers looks up
        checkpoint, use_reentrant=False, **extra
    )


def apply(layers: Sequence[nn.Module], rung: Rung) -> None:
    """Puts every layer on the same rung."""
    for layer in layers:
        if rung != "none" or hasattr(layer, "gradient_checkpointing"):
            set_rung(layer, rung)


def ladder(kinds: Sequence[str], cost: dict[tuple[str, Rung], int], budget: int) -> list[Rung]:
    """A rung for each layer, given the bytes that each kind of layer keeps on each rung.

    Layers move from `full` to `selective` to `none` from the last to the first, since what the last layers keep is
    freed first in the backward pass, as long as the sum of what they keep beyond `full` fits the budget.
    """
    chosen: list[Rung] = ["full"] * len(kinds)
    left = budget
    for before, after in (("full", "selective"), ("selective", "none"), ("full", "none")):
        for place in range(len(kinds) - 1, -1, -1):
            if chosen[place] != before:
                continue
            extra = cost[kinds[place], after] - cost[kinds[place], before]  # type: ignore[index]
            if extra <= left:
                left -= max(0, extra)
                chosen[place] = after  # type: ignore[call-overload]
    return chosen


def kind_of(layer: nn.Module) -> str:
    """What tells layers of different cost apart: the names of their parts."""
    return "+".join(name for name, _ in layer.named_children())


def decide(
    kinds: Sequence[str], cost: dict[tuple[str, Rung], int], budget: int, worst: Callable[[list[int]], list[int]]
) -> list[Rung]:
    """The same rungs on every rank: by the largest cost and the smallest budget that any of them measured.

    Ranks that recompute different layers would gather their weights at different moments, and wait for each other.
    `worst` gives the largest of each number over all ranks.
    """
    *costs, spent = worst([*cost.values(), -budget])
    return ladder(kinds, dict(zip(cost, costs, strict=True)), max(0, -spent))


def choose(
    layers: Sequence[nn.Module],
    run: Callable[[], None],
    device: torch.device,
    reserve: int,
    worst: Callable[[list[int]], list[int]],
) -> list[Rung]:
    """Measures and sets a rung for every layer; `run` is one forward and backward pass.

    Args:
        layers: The decoder layers.
        run: A pass over a batch of full size. Gradients it leaves stay allocated, as they will be in training.
        device: A CUDA device.
        reserve: Bytes that will be allocated later: the optimizer's state.
        worst: The largest of each number over all ranks.
    """
    kinds = [kind_of(layer) for layer in layers]
    cost: dict[tuple[str, Rung], int] = {}
    for rung in RUNGS:
        for kind in dict.fromkeys(kinds):
            place = kinds.index(kind)
            apply(layers, "full")
            set_rung(layers[place], rung)
            cost[kind, rung] = _kept_by(layers[place], run)
    apply(layers, "full")
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    total = torch.cuda.get_device_properties(device).total_memory
    others = total - torch.cuda.mem_get_info(device)[0] - torch.cuda.memory_reserved(device)
    budget = int(total * _HEADROOM) - others - torch.cuda.max_memory_allocated(device) - reserve
    chosen = decide(kinds, cost, budget, worst)
    for layer, rung in zip(layers, chosen, strict=True):
        set_rung(layer, rung)
    return chosen


def _kept_by(layer: nn.Module, run: Callable[[], None]) -> int:
    """Bytes that one layer keeps between forward and backward."""
    marks: list[int] = []

    def mark(*_: Any) -> None:
        marks.append(torch.cuda.memory_allocated())

    # Inside FSDP's own hooks: after the weights are gathered, and before they are let go.
    hooks = [layer.register_forward_pre_hook(mark), layer.register_forward_hook(mark, prepend=True)]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return marks[1] - marks[0]
