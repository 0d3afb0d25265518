"""What do a run's first steps compile and tune? Exactly that, made ahead of it: `--warm-up`.

Two steps of the same configuration, in one process, with as few layers as hold one of each kind, random weights and
made-up samples. Nothing of the run itself is written. What Triton compiles and tunes stays in its cache, and what
torch.compile makes comes beside it as one file (`compiled`). The run that finds both starts in seconds: kernels are
compiled for shapes, and those are the run's.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernelguard_train.config import CheckpointConfig, Config, ReportConfig
from kernelguard_train.errors import ConfigError
from kernelguard_train.model import text_config
from kernelguard_train.sharding import find_parts

STEPS = 2
"""The second one finds the optimizer's state, which the first one makes."""
_LEAST = 2
"""The first layer's input is the embedding's output; another layer's is a layer's."""


def shortened(config: Config, output: Path) -> Config:
    """The configuration of the two steps, which write below `output`.

    Raises:
        ConfigError: under torchrun with several ranks.
        ModelError: as `text_config` and `find_parts`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--warm-up is one process: what it compiles serves every rank; start it without torchrun")
    return replace(
        config,
        model=replace(config.model, init="random", layers=layers_of_each_kind(text_config(config))),
        data=replace(config.data, path="synthetic", workers=0, streaming=False, synthetic_samples=config.batch.window),
        # Where gradients are added up over several batches, the second one adds.
        batch=replace(config.batch, per_step=min(config.batch.per_step, 2)),
        train=replace(config.train, output=str(output), steps=STEPS, resume="never"),
        checkpoint=CheckpointConfig(every=0, at_end=False, export=False),
        report=ReportConfig(every=1, progress=False),
    )


def layers_of_each_kind(text: Any) -> int:
    """How many layers from the first on hold one of each kind that the model has.

    Two are of one kind when they hold the same modules with the same shapes and settings that are words or switches
    (`layer_type`, `is_sliding`); their number among the layers is none.
    """
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow, and `--help` answers without it

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(text)
    kinds = [_kind(layer) for layer in find_parts(lm).layers]
    return min(max(_LEAST, *(kinds.index(kind) + 1 for kind in set(kinds))), len(kinds))


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    modules = []
    for name, module in layer.named_modules():
        shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
        words = {key: value for key, value in vars(module).items() if isinstance(value, str | bool)}
        modules.append((name, type(module), shapes, tuple(sorted(words.items())), getattr(module, "sliding_window", 0)))
    return tuple(modules)
