"""Which linear layers compute in float8 through torchao, when asked?

torchao's own float8 training: weights stay float32, each product casts its operands with one scale per tensor. It goes
with FSDP; the trainer's own fused layers (`model.fused`, with `model.fp8`) are the other way and exclude this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from kernelguard_train.errors import ModelError

_MULTIPLE = 16
"""What both sizes of a matrix have to be a multiple of for the hardware's float8 products."""


def suits(module: nn.Module, _name: str = "") -> bool:
    """Whether torchao can convert a linear layer."""
    if not isinstance(module, nn.Linear):
        return False
    return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0


def convert(layers: Sequence[Any], names: Sequence[str], device: torch.device) -> str:
    """Converts the linear layers of the named submodules of every decoder layer in place; returns what was done.

    On a CPU the products are emulated: as inexact as on a GPU, and slower than without.

    Raises:
        ModelError: when torchao is missing, the GPU has no float8, or a name holds nothing that can be converted.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # noqa: PLC0415 - optional, slow
        from torchao.float8.float8_linear import Float8Linear  # noqa: PLC0415
    except ImportError as error:
        raise ModelError(f"model.torchao_float8: torchao cannot be imported: {error}: pip install torchao") from error
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ModelError(
            f"model.torchao_float8: {torch.cuda.get_device_name(device)} has no float8 products (Ada, Hopper or later)"
        )
    options = Float8LinearConfig(emulate=device.type != "cuda")
    for name in names:
        found = [layer for layer in layers if hasattr(layer, name)]
        if not any(suits(module) for layer in found for module in getattr(layer, name).modules()):
            children = ", ".join(child for child, _ in layers[0].named_children())
            raise ModelError(
                f"model.torchao_float8: no layer has a submodule {name} with linear layers of multiples of "
                f"{_MULTIPLE}; they have {children}"
            )
        for layer in found:
            setattr(
                layer,
                name,
                convert_to_float8_training(getattr(layer, name), module_filter_fn=suits, config=options),
            )
    count = sum(isinstance(module, Float8Linear) for layer in layers for module in layer.modules())
    emulated = ", emulated" if options.emulate else ""
    return f"torchao float8{emulated}: {count} linear layers in {', '.join(names)}"
