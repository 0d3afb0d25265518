"""What does an existing training configuration say about the run? Trainer arguments, TRL, axolotl, kernelguard_train.

Only what stands in the file counts as said; what a framework would take by default is said only where its sources
leave no choice. Keys that have nothing to do with kernels are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from kernelguard.declare.training_configs import axolotl, bundled, trainer, trl
from kernelguard.declare.training_configs.files import read_mapping
from kernelguard.declare.training_configs.keys import Keys
from kernelguard.errors import InputError

_HINT = (
    "give Trainer arguments (JSON or YAML), a TRL or an axolotl YAML file; from Python: "
    "json.dump(training_args.to_dict(), open('args.json', 'w'), default=str). Or say it with --intent FILE"
)
# What else is handed over by mistake, by keys that only it has.
_OTHERS = (
    (frozenset({"model_type", "architectures"}), "a model's config.json"),
    (frozenset({"cutoff_len", "finetuning_type"}), "a LLaMA-Factory configuration, which is not read"),
    (frozenset({"finetuning_type", "stage"}), "a LLaMA-Factory configuration, which is not read"),
    (frozenset({"compute_environment", "distributed_type"}), "an accelerate configuration"),
    (frozenset({"train_micro_batch_size_per_gpu"}), "a DeepSpeed configuration"),
    (frozenset({"zero_optimization"}), "a DeepSpeed configuration"),
    (frozenset({"global_step", "log_history"}), "a trainer_state.json"),
)
BUNDLED = "kernelguard_train configuration"
_KINDS = (
    (BUNDLED, bundled),
    ("axolotl configuration", axolotl),
    ("TRL configuration", trl),
    ("Trainer arguments", trainer),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one training configuration says."""

    kind: str
    """Whose it is, for a person."""
    said: Mapping[str, Any]
    """Intent fields that it determines."""
    note: str = ""
    """Why something that one would expect could not be told, one sentence."""
    length: int | None = None
    """Tokens of the rows that are trained on, where the file alone tells."""

    @property
    def bundled(self) -> bool:
        """Whether it is one of the bundled trainer, which can then be started with it."""
        return self.kind == BUNDLED


def read_training_config(path: Path, versions: Mapping[str, Version]) -> Reading:
    """Reads a training configuration.

    Args:
        path: JSON, YAML or, of kernelguard_train, TOML.
        versions: Installed distributions of the environment that will train, where known.

    Raises:
        InputError: It cannot be read, is of no known kind, or keys that matter have impossible values: all are named.
    """
    document = read_mapping(path, "a training configuration", ("JSON", "TOML", "YAML"), _HINT)
    name = kind_of(document)
    if name is None:
        other = next((text for keys, text in _OTHERS if keys <= document.keys()), None)
        what = f"is {other}" if other else "is neither Trainer arguments nor a TRL nor an axolotl configuration"
        raise InputError(f"{path} {what}; its keys begin with {_first(document)}", hint=_HINT)
    module = dict(_KINDS)[name]
    keys = Keys(document, words=module.WORDS)
    said, note = module.read(keys, versions)
    if keys.problems:
        raise InputError(
            f"{path} ({name}): " + "; ".join(dict.fromkeys(keys.problems)), hint="correct these keys, or use --intent"
        )
    length = bundled.length(document) if name == BUNDLED else None
    return Reading(
        kind=name, said={key: value for key, value in said.items() if value is not None}, note=note, length=length
    )


def kind_of(document: Mapping[str, Any]) -> str | None:
    """Which kind of training configuration a mapping is; None: none that is known."""
    if any(keys <= document.keys() for keys, _ in _OTHERS):
        return None
    return next((name for name, module in _KINDS if module.recognises(document)), None)


def _first(document: Mapping[str, Any]) -> str:
    names = [key if len(key) <= 30 else key[:27] + "..." for key in list(document)[:6]]
    return ", ".join(names) if names else "nothing at all: it is empty"
