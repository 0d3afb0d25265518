"""Which model is trained, and on which implementations?

From a config.json to a sharded network whose layers are bound to functions that keep packed samples apart.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from kernelguard_train import (
    attention,
    bindings,
    fused,
    gated_delta,
    guarded,
    loss,
    metrics,
    quantized,
    recompute,
    weights,
)
from kernelguard_train.batches import Batch
from kernelguard_train.config import Config
from kernelguard_train.errors import ModelError
from kernelguard_train.sharding import Parts, shard_model
from kernelguard_train.working import WorkingCopy

log = logging.getLogger("kernelguard_train")


class Network(nn.Module):
    """A causal transformers model that takes a `Batch` and returns the summed loss of its trained tokens."""

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm
        self.copy: WorkingCopy | None = None

    def computing(self) -> AbstractContextManager[None]:
        """Forward and backward passes of one update belong inside; each parameter has its gradient afterwards."""
        return self.copy.active() if self.copy else nullcontext()

    def forward(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        """`scale` times the sum; positions without a label never reach the output layer.

        What the loss would be multiplied with before its gradients are taken belongs into `scale` (see `loss`).
        """
        hidden = self.lm.base_model(**batch.model_inputs()).last_hidden_state
        wanted = hidden.flatten(0, 1).index_select(0, batch.trained_at)
        targets = batch.labels.flatten().index_select(0, batch.trained_at)
        result: torch.Tensor = self.lm.get_output_embeddings()(wanted, targets, scale)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The network, and what was decided on the way, for the log."""

    network: Network
    parts: Parts
    text: Any
    """The text model's transformers configuration."""
    attention: str
    bound: tuple[bindings.Bound, ...]
    notes: tuple[str, ...]

    def facts(self, device: torch.device) -> dict[str, Any]:
        """The layers in their order and what was decided, as `built.json` holds it."""
        kinds = getattr(self.text, "layer_types", None) or getattr(self.text, "layers_block_type", None)
        if not isinstance(kinds, list) or len(kinds) != len(self.parts.layers):
            kinds = ["attention" if hasattr(layer, "self_attn") else "other" for layer in self.parts.layers]
        return {
            "schema": 1,
            "model_type": self.text.model_type,
            "layer_types": [str(kind) for kind in kinds],
            "attention": self.attention,
            "device": device.type,
            "bound": {bound.name: bound.to for bound in self.bound},
            "notes": list(self.notes),
        }


def text_config(config: Config) -> Any:
    """The transformers configuration of the causal model that is trained.

    Raises:
        ModelError: when there is none, or it is not of a causal model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig  # noqa: PLC0415 - slow; the data worker needs none

    try:
        full = AutoConfig.from_pretrained(config.model.path)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path: no usable config.json at {config.model.path}: {error}") from error
    text = full.get_text_config(decoder=True)
    if text is not full and not config.model.text_only:
        raise ModelError(
            f"{full.model_type} is a vision-language model; this trainer feeds it text only (model.text_only=true)"
        )
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{text.model_type} is not a causal language model that transformers knows")
    if config.model.layers:
        keep = config.model.layers
        if keep > text.num_hidden_layers:
            raise ModelError(f"model.layers = {keep}, but the model has {text.num_hidden_layers}")
        text.num_hidden_layers = keep
        for name in ("layer_types", "layers_block_type", "mlp_layer_types"):
            value = getattr(text, name, None)
            if isinstance(value, list) and len(value) > keep:
                setattr(text, name, value[:keep])
    return text


def choose_attention(config: Config, device: torch.device) -> str:
    """The attention implementation by transformers' name."""
    if config.model.attention != "auto":
        return config.model.attention
    packed = config.batch.mode == "packed" and config.model.compute_dtype == "bfloat16"
    return attention.NAME if packed and device.type == "cuda" else "sdpa"


def build(config: Config, mesh: DeviceMesh, device: torch.device) -> Built:
    """The network, sharded over the mesh, with its weights.

    Raises:
        ModelError: when anything about it cannot be had as configured; nothing falls back silently.
    """
    import transformers  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    text = text_config(config)
    chosen = choose_attention(config, device)
    if chosen == attention.NAME:
        attention.register()
    notes = [attention.route_flash(config.model.flash, device), *_apply_liger(config, text, device)]
    if chosen == "flex_attention" and device.type == "cpu":
        raise ModelError("model.attention = flex_attention: torch has no backward pass of it on a CPU")
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(text, dtype=torch.float32, attn_implementation=chosen)
    except (ImportError, ValueError) as error:  # how transformers says that an implementation cannot be used here
        raise ModelError(f"model.attention = {chosen}: {str(error).split('. Please')[0]}") from error
    if config.model.torchao_float8:
        if config.model.fused == "on" or (config.model.fused == "auto" and device.type == "cuda"):
            raise ModelError("model.torchao_float8 needs model.fused = off (the fused layers' own float8 is model.fp8)")
        notes.append(quantized.convert(lm.base_model.layers, config.model.torchao_float8, device))
    fused = _fused_kernels(config, device)
    bound = bindings.bind(lm, fused=fused, convolution=config.model.convolution)
    if fused and Version(transformers.__version__) >= gated_delta.HANDED_ON_SINCE:
        gated_delta.check_heads(lm.modules())
    compiled = device.type == "cuda"
    loss.adopt(
        lm.get_output_embeddings(),
        chunk=config.optim.loss_chunk,
        implementation=config.optim.loss,
        compiled=compiled,
    )
    network = Network(lm)
    compute = getattr(torch, config.model.compute_dtype)
    sharded = mesh.size() > 1 or config.parallel.one_rank == "fsdp"
    parts = shard_model(
        network,
        lm,
        mesh,
        device,
        seed=config.train.seed,
        compute=compute,
        prefetch=config.parallel.prefetch,
        reshard=config.parallel.reshard,
        layers_per_unit=config.parallel.layers_per_unit,
        sharded=sharded,
    )
    notes += _fuse(config, lm, parts, device)
    if config.model.init == "pretrained":
        unused = weights.load(lm, download(config))
        notes.append(f"{unused} tensors of the checkpoint are not part of the text model")
    recompute.apply(parts.layers, "full" if config.model.recompute == "auto" else config.model.recompute)
    notes += compile_parts(parts, config.model.compile, config.model.compile_backend)
    network.train()
    if not sharded:
        network.copy = WorkingCopy(network, compute)
        notes.append(f"one rank: no FSDP; products on a {config.model.compute_dtype} copy, gradients summed in float32")
    return Built(network=network, parts=parts, text=text, attention=chosen, bound=tuple(bound), notes=tuple(notes))


def download(config: Config) -> Path:
    """The folder with the weights; a hub id is downloaded by the first rank of each node."""
    path = Path(config.model.path)
    if path.is_dir():
        return path
    if path.is_file():
        raise ModelError(f"model.path: {path} is a config.json alone; set model.init=random to draw the weights")
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - hub ids only

    # The hub client locks each file, so ranks of one node that come later wait and then find it.
    return Path(snapshot_download(config.model.path, allow_patterns=["*.safetensors", "*.json"]))


def _apply_liger(config: Config, text: Any, device: torch.device) -> list[str]:
    """Liger's norms and SwiGLU in place of the model's; must come before the model is made."""
    wanted, model_type = config.model.liger, text.model_type
    if wanted == "off" or (wanted == "auto" and device.type != "cuda"):
        return []
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN  # noqa: PLC0415 - optional
    except ImportError as error:
        if wanted == "on":
            raise ModelError(
                f"model.liger = on, but it cannot be imported: {error}: pip install liger-kernel"
            ) from error
        return [f"liger is not used: {error}"]
    patch: Callable[..., None] | None = MODEL_TYPE_TO_APPLY_LIGER_FN.get(model_type)
    if patch is None:
        if wanted == "on":
            raise ModelError(f"model.liger = on, but liger has nothing for {model_type}")
        return [f"liger is not used: it has nothing for {model_type}"]
    # Rotary embeddings stay (theirs assume full rotation for some models), and the loss is the trainer's own.
    wishes = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    # In a mixture of experts `swiglu` means liger's expert kernels, which tune 16 or 32 candidates each at the first
    # step; with them that step was not over after 85 s on an H200. Transformers' grouped products stay instead.
    wishes |= {"rms_norm": True, "swiglu": not metrics.expert_count(text)}
    known = {name: wish for name, wish in wishes.items() if name in inspect.signature(patch).parameters}
    patch(**known)
    return [f"liger: {patch.__name__}({', '.join(f'{name}={wish}' for name, wish in known.items())})"]


def _fused_kernels(config: Config, device: torch.device) -> bool:
    """Whether linear-attention layers run on fused kernels, and not on the reference."""
    return device.type == "cuda" if config.model.kernels == "auto" else config.model.kernels == "fused"


def _fuse(config: Config, lm: Any, parts: Parts, device: torch.device) -> list[str]:
    """Fused layers in place of the model's, as configured."""
    wanted = config.model.fused
    kernels = _fused_kernels(config, device)
    if wanted == "off" or (wanted == "auto" and not (kernels and device.type == "cuda")):
        if config.model.fp8:
            raise ModelError("model.fp8 needs model.fused = on")
        return []
    compiled = device.type == "cuda"
    dynamic = config.batch.mode != "packed"
    notes = [fused.adopt(parts.layers, parts.embedding, compiled=compiled, dynamic=dynamic, fp8=config.model.fp8)]
    # The reference takes as many key heads as value heads, and a row that is not packed has no boundaries.
    if kernels and config.batch.mode == "packed":
        notes.append(
            gated_delta.adopt(
                parts.layers,
                compiled=compiled,
                dynamic=dynamic,
                own_convolution=config.model.convolution == "auto" and guarded.admits("packed_convolution"),
                project=None if config.model.fp8 else fused.project,
            )
        )
        if compiled and gated_delta.compile_rotation(lm, dynamic=dynamic):
            notes.append("compiled rotary embedding")
    return [f"fused: {note}" for note in notes if note]


def compile_parts(parts: Parts, names: tuple[str, ...], backend: str) -> list[str]:
    """Compiles the named submodules of every layer in place; fla's operations, which break graphs, stay outside.

    Raises:
        ModelError: when no layer has a submodule of that name.
    """
    for name in names:
        found = [getattr(layer, name) for layer in parts.layers if hasattr(layer, name)]
        if not found:
            children = ", ".join(child for child, _ in parts.layers[0].named_children())
            raise ModelError(f"model.compile: no layer has a submodule {name}; they have {children}")
        for module in found:
            module.compile(backend=backend)
    return [f"compiled in every layer: {', '.join(names)}"] if names else []
