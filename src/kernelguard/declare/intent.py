"""What will the run do that a config.json does not say? From flags, an intent file or a training configuration.

Flags win over a file, a file over what is assumed. What nobody said is listed, because a verdict rests on it too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelguard import data
from kernelguard.declare.values import Intent, Phase
from kernelguard.errors import InputError

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from packaging.version import Version

SCHEMA = 1
"""Version of the intent file that is read."""
SETTINGS = tuple(field.name for field in fields(Intent) if field.name not in {"assumed", "source"})
"""What can be said about a run."""
SIGNALS = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keyword arguments of a model's forward that can tell where samples begin."""

_SWITCHES = (
    "packed",
    "use_kernels",
    "liger",
    "compile",
    "use_cache",
    "grouped_heads",
    "own_convolution",
    "trust_remote_code",
)
_EXAMPLE = 'for example: packed = true, and on the next line: signals = ["position_ids", "cu_seq_lens_q", "seq_idx"]'


@dataclass(frozen=True, slots=True, kw_only=True)
class _Voice:
    """One source and what it says."""

    name: str
    said: Mapping[str, Any]
    note: str = ""

    @property
    def words(self) -> str:
        return f"{self.name} ({self.note})" if self.note else self.name


def resolve_intent(
    flags: Mapping[str, Any],
    intent_file: Path | None = None,
    train_config: Path | None = None,
    *,
    versions: Mapping[str, Version] | None = None,
) -> Intent:
    """What the run will do, who said so, and what nobody said.

    Args:
        flags: What was said on the command line, as values by their name in `Intent`; None counts as not said.
        intent_file: TOML or JSON in the form of schemas/intent.schema.json.
        train_config: Trainer arguments, a TRL or axolotl configuration, or one of kernelguard_train.
        versions: Installed distributions of the environment that will train, where known: which boundary signals
            TRL sends depends on its release.

    Raises:
        InputError: A flag or a file is unusable, or they contradict each other.
    """
    if intent_file is not None and train_config is not None:
        raise InputError(
            f"--intent {intent_file} and --train-config {train_config} both say what the run will do",
            hint="give one of them; single settings can be given as flags beside it",
        )
    voices = [_Voice(name="command line", said=_checked({k: v for k, v in flags.items() if v is not None}))]
    if intent_file is not None:
        voices.append(_Voice(name=f"intent file {intent_file}", said=read_intent_file(intent_file)))
    if train_config is not None:
        from kernelguard.declare.training_configs import read_training_config  # noqa: PLC0415 - only with such a file

        reading = read_training_config(train_config, versions or {})
        voices.append(_Voice(name=f"{reading.kind} {train_config}", said=reading.said, note=reading.note))
    return _together([voice for voice in voices if voice.said or voice.name != "command line"])


def read_intent_file(path: Path) -> dict[str, Any]:
    """The settings of an intent file, as values of `Intent`.

    Raises:
        InputError: It cannot be read or is not in the form of schemas/intent.schema.json; every problem is named.
    """
    from kernelguard.declare.training_configs.files import read_mapping  # noqa: PLC0415 - only with such a file

    document = read_mapping(path, "an intent file", ("JSON", "TOML"), _EXAMPLE)
    schema = document.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema > SCHEMA:
        raise InputError(
            f"{path} has a newer schema than this kernelguard, which reads up to schema {SCHEMA}",
            hint="pip install --upgrade kernelguard-preflight",
        )
    problems = list(_violations(document))
    if problems:
        from kernelguard.declare.training_configs import kind_of  # noqa: PLC0415 - only for this message

        kind = kind_of(document)
        raise InputError(
            f"{path} is no intent file: " + "; ".join(problems),
            hint=f"these look like the {kind}: give it with --train-config" if kind else f"keys: {', '.join(SETTINGS)}",
        )
    return _typed({key: value for key, value in document.items() if key in SETTINGS})


def _together(voices: list[_Voice]) -> Intent:
    """The intent that the voices make, the first one winning."""
    said: dict[str, Any] = {}
    for voice in reversed(voices):
        said |= voice.said
    assumed = [name for name in SETTINGS if name not in said]
    if said.get("signals"):
        _weigh_signals(voices, said)
    if not said.get("packed", False):
        assumed = [name for name in assumed if name != "signals"]
    source = "; ".join(voice.words for voice in voices) or "nothing was said"
    return Intent(**said, assumed=tuple(assumed), source=source)


def _weigh_signals(voices: list[_Voice], said: dict[str, Any]) -> None:
    """Signals are of packed batches: who gives them says packed, unless packing is switched off."""
    if "packed" not in said:
        said["packed"] = True  # still listed as assumed: nobody said it in so many words
    if said["packed"]:
        return
    signals = next(n for n, voice in enumerate(voices) if "signals" in voice.said)
    packed = next(n for n, voice in enumerate(voices) if "packed" in voice.said)
    if packed < signals:
        del said["signals"]  # `--no-packed` over a file that describes a packed run
        return
    where = voices[signals].name
    off = "itself says" if packed == signals else f"{voices[packed].name} says"
    raise InputError(
        f"{where} gives the boundary signals {', '.join(said['signals'])} of packed batches, but {off} packed = false",
        hint="--packed if samples share a row, else leave the signals out",
    )


def _checked(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags come typed; a schema validator would cost each call 0.1 s for the little that can be wrong."""
    problems = [f"unknown setting {name!r}{_nearest(name, SETTINGS)}" for name in flags if name not in SETTINGS]
    if "phase" in flags and flags["phase"] not in tuple(Phase):
        problems.append(f"phase {flags['phase']!r} is none of {', '.join(Phase)}")
    problems += [
        f"{n} is {flags[n]!r}, not true or false" for n in _SWITCHES if not isinstance(flags.get(n, True), bool)
    ]
    signals = flags.get("signals", ())
    if isinstance(signals, (tuple, list)):
        problems += [f"{s!r} is no boundary signal{_nearest(str(s), SIGNALS)}" for s in signals if s not in SIGNALS]
    else:
        problems.append(f"signals is {signals!r}, not a list of names")
    if problems:
        raise InputError("; ".join(problems), hint=f"signals: {', '.join(SIGNALS)}. Settings: {', '.join(SETTINGS)}")
    return _typed(flags)


def _typed(said: Mapping[str, Any]) -> dict[str, Any]:
    typed = dict(said)
    if "phase" in typed:
        typed["phase"] = Phase(typed["phase"])
    if "signals" in typed:
        typed["signals"] = tuple(dict.fromkeys(typed["signals"]))
    return typed


def _violations(document: Mapping[str, Any]) -> Iterator[str]:
    """Everything that is wrong with an intent file, one sentence each."""
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - costs 0.1 s, only when a file is given

    schema = json.loads(data.schema("intent").read_text(encoding="utf-8"))
    known = tuple(schema["properties"])
    yield from (f"unknown key {_short(repr(key))}{_nearest(key, known)}" for key in document if key not in known)
    found = Draft202012Validator(schema).iter_errors(document)
    for error in sorted(found, key=lambda error: [str(part) for part in error.absolute_path]):
        if error.validator != "additionalProperties":
            yield _sentence(error)


def _sentence(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    if error.validator == "enum" and isinstance(options := error.validator_value, list):
        text = f"{_short(repr(error.instance))} is none of {', '.join(options)}"
        return f"{where}: {text}{_nearest(str(error.instance), options)}"
    return f"{where}: {_short(error.message)}" if where else _short(error.message)


def _nearest(word: str, known: tuple[str, ...] | list[str]) -> str:
    from kernelguard.declare.training_configs.files import nearest  # noqa: PLC0415 - only for a message

    return nearest(word, known)


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
