"""How is the model spread over the ranks?

FSDP2 in units: the embedding, each decoder layer, and the final norm with the output layer. One unit at a time is made
real, initialised and sharded, so that no rank holds more than a unit and its own shards.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from kernelguard_train.errors import ConfigError, ModelError


def make_mesh(device: torch.device, world: int, shard: int) -> DeviceMesh:
    """All ranks share one copy, or, with fewer to a copy, groups of neighbours hold one each (HSDP).

    Raises:
        ConfigError: when the ranks do not divide into such groups.
    """
    shard = shard or world
    if world % shard:
        raise ConfigError(f"parallel.shard = {shard} does not divide the {world} ranks")
    if shard == world:
        return init_device_mesh(device.type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device.type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The modules of a causal model that become units."""

    embedding: nn.Module
    layers: Sequence[nn.Module]
    ending: tuple[nn.Module, ...]
    """Final norm and output layer, in the order they run."""
    tied: bool
    """Embedding and output layer are one parameter, and so one unit."""


def find_parts(lm: Any) -> Parts:
    """The units of a transformers causal model.

    Raises:
        ModelError: when it is built in another way.
    """
    base, embedding, head = lm.base_model, lm.get_input_embeddings(), lm.get_output_embeddings()
    layers = getattr(base, "layers", None)
    if not isinstance(layers, nn.ModuleList) or embedding is None or head is None:
        raise ModelError(f"{type(lm).__name__} has no layers, embedding and output layer where they are expected")
    rest = [c for c in base.children() if c is not layers and c is not embedding and any(True for _ in c.parameters())]
    return Parts(embedding=embedding, layers=list(layers), ending=(*rest, head), tied=head.weight is embedding.weight)


@torch.no_grad()
def _materialise(module: nn.Module, lm: Any, device: torch.device, seed: int, names: dict[nn.Module, str]) -> None:
    """Makes a meta module real, with weights that depend on the seed and its name, not on the number of ranks."""
    module.to_empty(device=device)
    state = torch.get_rng_state(), (torch.cuda.get_rng_state() if device.type == "cuda" else None)
    for part in module.modules():
        torch.manual_seed(seed * 1_000_003 + zlib.crc32(names[part].encode()))
        lm._init_weights(part)  # noqa: SLF001 - transformers has no public way to initialise one module
        unknown = [n for n in part._non_persistent_buffers_set if not hasattr(part, "original_inv_freq")]  # noqa: SLF001
        if unknown:
            raise ModelError(f"{names[part]} ({type(part).__name__}) has buffers that no checkpoint holds: {unknown}")
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])


def shard_model(
    network: nn.Module,
    lm: Any,
    mesh: DeviceMesh,
    device: torch.device,
    *,
    seed: int,
    compute: torch.dtype,
    prefetch: int,
    reshard: bool = True,
    layers_per_unit: int = 1,
    sharded: bool = True,
) -> Parts:
    """Makes `network`, which holds the meta model `lm`, real and, unless told otherwise, sharded."""
    parts = find_parts(lm)
    names = {module: name for name, module in lm.named_modules()}
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    if compute == torch.float32:
        policy = MixedPrecisionPolicy()

    def unit(*modules: nn.Module, reshard: bool) -> None:
        for module in modules:
            _materialise(module, lm, device, seed, names)
        if sharded:
            fully_shard(list(modules), mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)

    for first in range(0, len(parts.layers), layers_per_unit):
        unit(*parts.layers[first : first + layers_per_unit], reshard=reshard)
    if parts.tied:
        # One parameter cannot be in two units: embedding and ending belong to the root, gathered for the whole step.
        for module in (parts.embedding, *parts.ending):
            _materialise(module, lm, device, seed, names)
        parts.ending[-1].weight = parts.embedding.weight
    else:
        unit(parts.embedding, reshard=True)
        # It is the first that backward needs again.
        unit(*parts.ending, reshard=False)
    for module in lm.modules():  # what belongs to no unit: rotary embeddings
        if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            _materialise(module, lm, device, seed, names)
    if sharded:
        fully_shard(network, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        _prefetch(parts, prefetch, layers_per_unit)
    return parts


def _prefetch(parts: Parts, depth: int, layers_per_unit: int) -> None:
    """Gathers the next units while one computes, forward and backward."""
    first = parts.layers[::layers_per_unit]  # the layers of a unit share its state
    order = [*first] if parts.tied else [parts.embedding, *first, parts.ending[0]]
    units: list[FSDPModule] = [module for module in order if isinstance(module, FSDPModule)]
    for place, module in enumerate(units):
        module.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + depth])
        module.set_modules_to_backward_prefetch(units[max(0, place - depth) : place][::-1])
