"""How a TOML file and dotted overrides become a `Config`, and how one is written out again.

All problems are collected and reported together; an unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import math
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError


def load(path: Path | None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with `section.key=value` overrides applied.

    Raises:
        ConfigError: listing everything that is wrong, in the file and in the overrides.
    """
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
    problems: list[str] = []
    for override in overrides:
        _override(tree, override, problems)
    config: Config = _build(Config, tree, "", problems)
    if not problems:
        problems.extend(_contradictions(config))
    if problems:
        raise ConfigError("the configuration is unusable:\n" + "\n".join(f"  - {problem}" for problem in problems))
    return config


def _override(tree: dict[str, Any], text: str, problems: list[str]) -> None:
    """Puts `section.key=value` into the tree; the value is TOML, or else a plain string."""
    dotted, equals, value = text.partition("=")
    names = dotted.strip().split(".")
    if not equals or not all(names):
        problems.append(f"override {text!r} is not section.key=value")
        return
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    for name in names[:-1]:
        child = tree.setdefault(name, {})
        if not isinstance(child, dict):
            problems.append(f"override {text!r}: {name} is not a section")
            return
        tree = child
    tree[names[-1]] = parsed


def _build(kind: type, tree: dict[str, Any], prefix: str, problems: list[str]) -> Any:
    hints = get_type_hints(kind)
    known = _known_keys()
    values: dict[str, Any] = {}
    for name, value in tree.items():
        dotted = prefix + name
        if name not in hints:
            # A key in the wrong section is as likely as a misspelt one, so both are compared with everything there is.
            candidates = [key for key in known if key.rpartition(".")[2] == name] or [prefix + own for own in hints]
            near = difflib.get_close_matches(dotted, candidates, 1, 0.0 if candidates[0].endswith("." + name) else 0.6)
            problems.append(f"unknown key {dotted}" + (f"; did you mean {near[0]}?" if near else ""))
        elif is_dataclass(hints[name]):
            section = hints[name]
            if isinstance(value, dict):
                values[name] = _build(section, value, f"{dotted}.", problems)
            else:
                problems.append(f"{dotted} is a section of keys, not {value!r}")
        else:
            values[name] = _typed(hints[name], value, dotted, problems)
    return kind(**values)


def _known_keys() -> list[str]:
    return [f"{name}.{key.name}" for name, section in get_type_hints(Config).items() for key in fields(section)]


def _typed(hint: Any, value: Any, dotted: str, problems: list[str]) -> Any:
    """`value` as the type that the field wants; a problem is noted when it is another."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            near = difflib.get_close_matches(str(value), [str(a) for a in arguments], 1)
            choices = ", ".join(str(argument) for argument in arguments)
            problems.append(f"{dotted} = {value!r}; expected one of {choices}" + (f" ({near[0]}?)" if near else ""))
        return value
    if origin is tuple:
        wanted = arguments[0]
        fits = isinstance(value, list) and (arguments[-1] is ... or len(value) == len(arguments))
        if not fits or not all(_is(item, wanted) for item in value):
            size = "any number of" if arguments[-1] is ... else str(len(arguments))
            problems.append(f"{dotted} = {value!r}; expected a list of {size} {wanted.__name__}")
            return ()
        return tuple(wanted(item) for item in value)
    if not _is(value, hint):
        problems.append(f"{dotted} = {value!r}; expected {hint.__name__}")
        return value
    if hint is float and not math.isfinite(value):
        problems.append(f"{dotted} = {value!r}; expected a finite number")
    return hint(value)


def _is(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _contradictions(config: Config) -> Iterator[str]:
    """What is well-typed and still cannot work."""
    if not config.model.path:
        yield "model.path is missing: a folder, a config.json or a hub id"
    if not config.data.path:
        yield "data.path is missing: a file, folder, URL or hub id of conversations"
    if config.batch.tokens < 128 or config.batch.tokens % 128:
        yield f"batch.tokens = {config.batch.tokens}; expected a positive multiple of 128"
    if config.max_length > config.batch.tokens:
        yield f"data.max_length = {config.max_length} does not fit batch.tokens = {config.batch.tokens}"
    if config.data.streaming and not config.train.steps:
        yield "data.streaming needs train.steps: the length of a stream is not known, so neither is the schedule"
    if config.batch.mode != "packed" and config.model.attention == "varlen":
        yield "model.attention = varlen works on packed batches only (batch.mode = packed)"
    positive = {
        "optim.lr": config.optim.lr,
        "batch.window": config.batch.window,
        "optim.loss_chunk": config.optim.loss_chunk,
        "train.epochs": config.train.epochs,
        "checkpoint.keep": config.checkpoint.keep,
        "parallel.layers_per_unit": config.parallel.layers_per_unit,
        "report.every": config.report.every,
        "optim.nonfinite_limit": config.optim.nonfinite_limit,
        "data.synthetic_samples": config.data.synthetic_samples,
        "data.synthetic_median": config.data.synthetic_median,
        "data.shuffle_buffer": config.data.shuffle_buffer,
        "parallel.timeout": config.parallel.timeout,
    }
    yield from (f"{name} = {value}; expected more than 0" for name, value in positive.items() if not value > 0)
    natural = {
        "model.layers": config.model.layers,
        "train.steps": config.train.steps,
        "train.seed": config.train.seed,
        "checkpoint.every": config.checkpoint.every,
        "batch.per_step": config.batch.per_step,
        "parallel.shard": config.parallel.shard,
        "parallel.prefetch": config.parallel.prefetch,
        "optim.clip": config.optim.clip,
        "optim.eps": config.optim.eps,
        "optim.weight_decay": config.optim.weight_decay,
        "data.retries": config.data.retries,
        "report.profile": config.report.profile,
        "report.peak_tflops": config.report.peak_tflops,
        "data.max_bad_rows": config.data.max_bad_rows,
        "data.max_length": config.data.max_length,
    }
    yield from (f"{name} = {value}; expected 0 or more" for name, value in natural.items() if not value >= 0)
    # Outside these torch refuses the optimizer, with a traceback and only once the model is loaded.
    if not all(0 <= beta < 1 for beta in config.optim.betas):
        yield f"optim.betas = {list(config.optim.betas)}; expected two numbers from 0 to below 1"
    parts = {"optim.warmup": config.optim.warmup, "optim.min_lr_ratio": config.optim.min_lr_ratio}
    parts |= {"data.synthetic_trained": config.data.synthetic_trained}
    yield from (f"{name} = {value}; expected 0 to 1" for name, value in parts.items() if not 0 <= value <= 1)


def dump(config: Config, *, comments: bool = True) -> str:
    """The whole configuration as TOML that `load` reads back to an equal one."""
    lines: list[str] = []
    for section_field in fields(config):
        section = getattr(config, section_field.name)
        lines += [f"[{section_field.name}]"]
        hints = get_type_hints(type(section))
        for item in fields(section):
            if comments:
                text = item.metadata["doc"] + _choices(hints[item.name])
                lines += [f"# {line}" for line in textwrap.wrap(text, 110)]
            lines.append(f"{item.name} = {_toml(getattr(section, item.name))}")
        lines.append("")
    return "\n".join(lines)


def _choices(hint: Any) -> str:
    return f" [{' | '.join(str(a) for a in get_args(hint))}]" if get_origin(hint) is Literal else ""


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value)  # a JSON string is a TOML basic string
    return str(value).lower() if isinstance(value, bool) else repr(value)


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as plain values, as it is kept beside checkpoints."""
    return tomllib.loads(dump(config, comments=False))
