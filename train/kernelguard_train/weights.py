"""How does each rank get its part of the weights, without any rank ever holding them all?

Each rank opens the safetensors files and reads the rows that it owns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from kernelguard_train.errors import ModelError

_FLOATS = ("F64", "F32", "BF16", "F16")
_FUSED_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)$")


def own_rows(parameter: torch.Tensor) -> tuple[int, int]:
    """The rows `[start, end)` of a parameter that this rank holds: FSDP2 gives each rank ceil(rows / ranks)."""
    rows = parameter.shape[0] if parameter.ndim else 1
    if not isinstance(parameter, DTensor):
        return 0, rows
    mesh = parameter.device_mesh
    axis = next((i for i, placement in enumerate(parameter.placements) if placement.is_shard(0)), None)
    if axis is None:
        return 0, rows
    share = -(-rows // mesh.size(axis))
    start = min(mesh.get_local_rank(axis) * share, rows)
    return start, min(start + share, rows)


class Checkpoint:
    """The tensors of a folder of safetensors files, readable by rows."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            files = [folder / name for name in sorted(listed)]
        if not files:
            raise ModelError(f"{folder} holds no safetensors file (model.init=random draws the weights instead)")
        self.places: dict[str, Any] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{file} cannot be read: {error}") from error
            self.places.update(dict.fromkeys(handle.keys(), handle))

    def find(self, name: str) -> str | None:
        """The key that holds a parameter of the text model: its own name, or that of a vision-language checkpoint."""
        inner = name.removeprefix("model.")
        for key in (name, f"model.language_model.{inner}", f"language_model.{name}", f"language_model.model.{inner}"):
            if key in self.places:
                return key
        return None

    def rows(self, key: str, shape: Sequence[int], start: int, end: int) -> torch.Tensor:
        """Rows of one tensor.

        Raises:
            ModelError: when its shape or type is not what the model needs.
        """
        part = self.places[key].get_slice(key)
        if part.get_shape() != list(shape):
            raise ModelError(f"{key} is {part.get_shape()} in {self.folder}; the model needs {list(shape)}")
        if part.get_dtype() not in _FLOATS:
            raise ModelError(
                f"{key} is {part.get_dtype()}: train from an unquantized checkpoint ({', '.join(_FLOATS)})"
            )
        tensor: torch.Tensor = part[start:end] if shape else part[:]
        return tensor

    def experts(self, name: str, shape: Sequence[int], start: int, end: int) -> torch.Tensor | None:
        """Experts that the file has one by one and the model as one tensor; None when that is not the case."""
        match = _FUSED_EXPERTS.match(name)
        if not match:
            return None
        parts = ("gate_proj", "up_proj") if match[2] == "gate_up_proj" else ("down_proj",)
        keys = [[self.find(f"{match[1]}.{e}.{part}.weight") for part in parts] for e in range(start, end)]
        if any(key is None for row in keys for key in row):
            return None
        one = (shape[1] // len(parts), *shape[2:])
        made = [torch.cat([self.rows(str(key), one, 0, one[0]) for key in row]) for row in keys]
        return torch.stack(made) if made else torch.empty(0, *shape[1:])


def _wanted(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters (a tied one once) and the buffers that checkpoints hold."""
    yield from model.named_parameters()
    kept = model.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in model.named_buffers() if name in kept)


@torch.no_grad()
def load(model: nn.Module, folder: Path) -> int:
    """Reads this rank's part of every parameter; returns how many tensors of the files were not needed.

    Raises:
        ModelError: listing every parameter that the files lack.
    """
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack)
        missing = []
        used = set()
        for name, parameter in _wanted(model):
            start, end = own_rows(parameter)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            key = checkpoint.find(name)
            if key is not None:
                values = checkpoint.rows(key, parameter.shape, start, end)
                used.add(key)
            elif (stacked := checkpoint.experts(name, parameter.shape, start, end)) is not None:
                values = stacked
            else:
                missing.append(name)
                continue
            local.copy_(values)
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ModelError(f"{folder} lacks {shown}")
        return len(checkpoint.places) - len(used)
