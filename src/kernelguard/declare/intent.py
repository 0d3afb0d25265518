"""What will the user's run do that a config.json does not say? Flags, an intent file, a training configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from packaging.version import Version

from kernelguard import data
from kernelguard.declare.documents import nearest, read_document
from kernelguard.declare.values import Intent, Phase
from kernelguard.errors import InputError

_NOT_SETTINGS = frozenset({"assumed", "source"})
SETTINGS = tuple(field.name for field in fields(Intent) if field.name not in _NOT_SETTINGS)
"""What can be said, by flag or in an intent file."""


def resolve_intent(
    flags: Mapping[str, Any],
    intent_file: Path | None = None,
    train_config: Path | None = None,
    *,
    versions: Mapping[str, Version] | None = None,
) -> Intent:
    """Puts the intent together: flags win over the intent file, that over the training configuration.

    Args:
        flags: What was said on the command line, by Intent field name; nothing that was not said.
        intent_file: TOML or JSON in the form of schemas/intent.schema.json.
        train_config: Trainer arguments, a TRL or axolotl configuration, or one of kernelguard_train.
        versions: Installed distributions of the environment that will train, where known: which boundary signals
            TRL's collator sends depends on its version.

    Raises:
        InputError: A file cannot be used; every problem of it is named.
    """
    said: dict[str, Any] = {}
    sources: list[str] = []
    if train_config is not None:
        from kernelguard.declare.train_configs import read_train_config  # noqa: PLC0415 - needed only with such a file

        found = read_train_config(train_config, versions or {})
        said.update(found.said)
        sources.append(f"{train_config} ({found.kind})")
    if intent_file is not None:
        said.update(read_intent_file(intent_file))
        sources.append(str(intent_file))
    if flags:
        said.update(_checked_flags(flags))
        sources.append("command line")
    intent = replace(Intent(), **_typed(said), source=", ".join(reversed(sources)) or "nothing was said")
    return replace(intent, assumed=tuple(name for name in SETTINGS if name not in said))


def read_intent_file(path: Path) -> dict[str, Any]:
    """The settings of an intent file.

    Raises:
        InputError: It cannot be read, or is not in the form of the schema; every problem is named.
    """
    document = read_document(path, "an intent file")
    return _checked(document, str(path))


def _checked(document: dict[str, Any], source: str) -> dict[str, Any]:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - costs 60 ms, needed only when something was said

    schema = json.loads(data.schema("intent").read_text(encoding="utf-8"))
    plain = {k: list(v) if isinstance(v, (tuple, set)) else v for k, v in document.items()}
    problems = []
    for error in Draft202012Validator(schema).iter_errors(plain):
        where = ".".join(map(str, error.absolute_path))
        if error.validator == "additionalProperties":
            unknown = [key for key in plain if key not in schema["properties"]]
            problems += [f"unknown key {key!r}{nearest(key, SETTINGS)}" for key in map(str, unknown)]
        elif error.validator == "enum":
            options = ", ".join(map(str, error.validator_value))
            problems.append(
                f"{where} is {error.instance!r}{nearest(str(error.instance), error.validator_value)}; one of {options}"
            )
        else:
            problems.append(f"{where}: {error.message}" if where else error.message)
    if problems:
        raise InputError(
            f"{source} does not say an intent: {'; '.join(sorted(set(problems)))}.",
            hint=f"the keys are {', '.join(SETTINGS)}",
        )
    return {key: value for key, value in plain.items() if key != "schema"}


def _checked_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags are typed already; only names can be wrong. The schema validator costs 60 ms, too much for a flag."""
    schema = json.loads(data.schema("intent").read_text(encoding="utf-8"))
    known = schema["properties"]["signals"]["items"]["enum"]
    wrong = [name for name in flags.get("signals") or () if name not in known]
    if wrong:
        raise InputError(
            f"{', '.join(wrong)} is no boundary signal{nearest(wrong[0], known)}.",
            hint=f"the signals are {', '.join(known)}",
        )
    unknown = [key for key in flags if key not in SETTINGS]
    if unknown:
        raise InputError(
            f"{', '.join(unknown)} is no setting of a run.", hint=f"the settings are {', '.join(SETTINGS)}"
        )
    return dict(flags)


def _typed(said: Mapping[str, Any]) -> dict[str, Any]:
    typed = dict(said)
    if "phase" in typed:
        typed["phase"] = Phase(typed["phase"])
    if typed.get("signals") is not None:
        typed["signals"] = tuple(dict.fromkeys(typed["signals"]))
    return typed


__all__ = ["SETTINGS", "read_intent_file", "resolve_intent"]
