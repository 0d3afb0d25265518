"""How does the trained model leave? As a bf16 folder that `from_pretrained` loads, with configuration and tokenizer.

Tensors are gathered one at a time, and rank 0 holds no more than one file's worth.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from kernelguard_train.config import Config
from kernelguard_train.errors import CheckpointError
from kernelguard_train.ranks import Ranks
from kernelguard_train.samples import load_tokenizer

FILE_BYTES = 4 << 30


def _files(shapes: dict[str, tuple[int, ...]], limit: int) -> list[list[str]]:
    """Names of tensors, in order, grouped into files of at most `limit` bytes of bf16."""
    files: list[list[str]] = []
    used = 0
    for name, shape in shapes.items():
        size = 2
        for dimension in shape:
            size *= dimension
        if not files or used + size > limit:
            files.append([])
            used = 0
        files[-1].append(name)
        used += size
    return files


@torch.no_grad()
def export(lm: Any, text: Any, config: Config, ranks: Ranks, limit: int = FILE_BYTES) -> Path:
    """Writes `output/model`, replacing an older one only when all of the new one is there. All ranks call it.

    Raises:
        CheckpointError: on all ranks, when rank 0 cannot write it.
    """
    target = Path(config.train.output) / "model"
    partial = target.with_name(".model.partial")
    problem = ""
    tensors = lm.state_dict()
    tied = text.tie_word_embeddings and "lm_head.weight" in tensors
    if tied:
        del tensors["lm_head.weight"]
    files = _files({name: tuple(tensor.shape) for name, tensor in tensors.items()}, limit)
    places: dict[str, str] = {}
    if ranks.first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    for number, names in enumerate(files, 1):
        held: dict[str, torch.Tensor] = {}
        label = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
        for name in names:
            tensor = tensors[name]
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if ranks.first:
                held[name] = whole.to("cpu", torch.bfloat16).contiguous()
                places[name] = label
        if ranks.first and not problem:
            try:
                save_file(held, partial / label, metadata={"format": "pt"})
            except Exception as error:  # noqa: BLE001 - safetensors has exceptions of its own; all ranks must hear of it
                problem = f"{type(error).__name__}: {error}"
    if ranks.first and not problem:
        try:
            _finish(partial, target, text, config, places if len(files) > 1 else {})
        except OSError as error:
            problem = str(error)
    if ranks.total(bool(problem))[0]:
        raise CheckpointError(f"the model could not be written to {target}: {problem or 'on rank 0'}")
    return target


def _finish(partial: Path, target: Path, text: Any, config: Config, places: dict[str, str]) -> None:
    if places:
        size = sum((partial / name).stat().st_size for name in set(places.values()))
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    text.dtype = torch.bfloat16
    text.save_pretrained(partial)
    if config.data.path != "synthetic":
        load_tokenizer(config).save_pretrained(partial)
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)
