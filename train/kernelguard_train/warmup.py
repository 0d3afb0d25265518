"""What do a run's first steps compile and tune? That, made ahead of it: `--warm-up`.

Two steps of the same configuration, in one process, with as few layers as hold one of each kind, random weights and
made-up samples. Nothing of the run itself is written. What Triton compiles and tunes stays in its cache, and what
torch.compile makes comes beside it (`compiled`). The run that finds both starts in seconds: kernels are compiled for
shapes, and those of packed batches are the run's. Rows that are not packed are as wide as their longest sample, which
only the run's own data tell.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernelguard_train.config import CheckpointConfig, Config, ReportConfig
from kernelguard_train.errors import ConfigError, ModelError
from kernelguard_train.model import text_config
from kernelguard_train.sharding import find_parts

STEPS = 2
"""The second one finds the optimizer's state, which the first one makes."""
_LEAST = 2
"""The first layer's input is the embedding's output; another layer's is a layer's."""
_NUMBERS = re.compile(r"idx|index|layer_id|number")
"""Settings that tell which layer it is, and not what kind."""


def shortened(config: Config, output: Path) -> Config:
    """The configuration of the two steps, which write below `output`.

    Raises:
        ConfigError: under torchrun with several ranks.
        ModelError: as `text_config` and `find_parts`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("--warm-up is one process, whose kernels serve every rank; start it without torchrun")
    return replace(
        config,
        model=replace(config.model, init="random", layers=layers_of_each_kind(config)),
        data=replace(config.data, path="synthetic", workers=0, streaming=False, synthetic_samples=config.batch.window),
        # Where gradients are added up over several batches, the second one adds.
        batch=replace(config.batch, per_step=min(config.batch.per_step, 2)),
        parallel=replace(config.parallel, shard=0),
        train=replace(config.train, output=str(output), steps=STEPS, resume="never"),
        checkpoint=CheckpointConfig(every=0, at_end=False, export=False),
        report=ReportConfig(every=1, progress=False),
    )


def layers_of_each_kind(config: Config) -> int:
    """How many layers from the first on hold one of each kind that the model has; all of them where fewer make none.

    Two are of one kind when they hold the same modules with the same shapes and settings (`layer_type`, `is_sliding`,
    `use_rope`) except for those that number the layers.

    Raises:
        ModelError: the model cannot be made, or is built in another way.
    """
    kinds = [_kind(layer) for layer in find_parts(_on_meta(config)).layers]
    least = min(max(_LEAST, *(kinds.index(kind) + 1 for kind in set(kinds))), len(kinds))
    try:
        _on_meta(replace(config, model=replace(config.model, layers=least)))
    except ModelError:  # what a later layer shares with an earlier one is missing then
        return len(kinds)
    return least


def _on_meta(config: Config) -> Any:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow, and `--help` answers without it

    text = text_config(config)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(text, attn_implementation="eager")
    except (ImportError, ValueError) as error:
        raise ModelError(f"{text.model_type} with {text.num_hidden_layers} layers cannot be made: {error}") from error


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    modules = []
    for name, module in layer.named_modules():
        shapes = tuple((key, tuple(p.shape)) for key, p in module.named_parameters(recurse=False))
        settings = tuple(
            (key, value)
            for key, value in sorted(vars(module).items())
            if isinstance(value, str | int | None) and not _NUMBERS.search(key)
        )
        modules.append((name, type(module), shapes, settings))
    return tuple(modules)
