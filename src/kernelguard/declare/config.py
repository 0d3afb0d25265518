"""Which model is asked about? Reads a config.json from a file, a folder or the hub, with every nested configuration."""

from __future__ import annotations

import codecs
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelguard.declare.values import ModelConfig, SubModel
from kernelguard.errors import InputError

MAX_BYTES = 10 * 1024 * 1024
"""No published config.json comes near this; whatever is larger is something else, a checkpoint most likely."""
MAX_DEPTH = 64
"""Nesting beyond this is not a model configuration."""
_CONFIG = "config.json"
_LAYER_COUNT = re.compile(r"num_(?:hidden_|encoder_|decoder_)?layers|n_layers?|(?:encoder|decoder)_layers")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(?:@[\w./-]{1,200})?")


def read_config(model: str) -> ModelConfig:
    """Reads `model`: the path of a config.json, a folder that holds one, or a hub id (`org/name`, `org/name@revision`).

    Raises:
        InputError: There is no such file, or it is not a model configuration.
        UndeterminedError: It is a hub id, and the hub cannot be asked from here.
    """
    try:
        path = Path(model).expanduser()
        is_local = path.exists() or path.is_symlink()
    except OSError as error:  # a name that is too long, a parent that may not be searched
        raise InputError(
            f"{shown(model)} cannot be looked at: {error.strerror or error}",
            hint="check the path and its permissions",
        ) from error
    except (ValueError, RuntimeError) as error:  # an embedded null byte, the home of a user who does not exist
        raise InputError(
            f"{shown(model)} is not a path: {error}", hint="give a config.json, its folder or a hub id"
        ) from error
    if is_local:
        file = _config_in(path)
        return parse_config(_load(file), source=str(file), folder=file.parent)
    # `examples/qwen` next to a folder `examples` is a mistyped path, not a repository of an organization `examples`.
    if _HUB_ID.fullmatch(model) and not model.endswith(".json") and not path.parent.is_dir():
        from kernelguard.declare.hub import fetch_config  # noqa: PLC0415 - costs 0.2 s, needed only for a hub id

        file, folder = fetch_config(model)
        return parse_config(_load(file), source=model, folder=folder)
    raise _missing(model, path)


def parse_config(raw: object, *, source: str, folder: Path | None = None) -> ModelConfig:
    """Makes a ModelConfig of parsed JSON; `source` is named in error texts.

    Raises:
        InputError: It is not a JSON object with a model_type.
    """
    if not isinstance(raw, dict):
        kind = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(raw), "a number")
        raise InputError(
            f"{source} holds {kind}, but a model configuration is a JSON object",
            hint="give the config.json that lies beside the model's weights",
        )
    if "model_type" not in raw:
        raise InputError(
            f"{source} has no model_type{_what_it_is(raw)}", hint="give the config.json of the model itself"
        )
    model_type = raw["model_type"]
    if not isinstance(model_type, str) or not model_type.strip():
        raise InputError(
            f"{source}: model_type is {shown(json.dumps(model_type))}, but must be a non-empty string",
            hint='for example "model_type": "qwen3_5"',
        )
    architectures = raw.get("architectures")
    names = tuple(a for a in architectures if isinstance(a, str)) if isinstance(architectures, list) else ()
    parts = (
        SubModel(path="", model_type=model_type, raw=raw),
        *_nested(raw, "", source=source),
    )
    _refuse_impossible(raw, "", source=source)
    return ModelConfig(
        source=source,
        model_type=model_type,
        architectures=names,
        parts=parts,
        raw=raw,
        remote_code=tuple(dict.fromkeys(target for part in parts for target in _remote_code(part.raw))),
        folder=folder,
    )


def _nested(raw: Mapping[str, Any], prefix: str, *, source: str, depth: int = 0) -> Iterator[SubModel]:
    """Every configuration inside `raw` that names its own model_type, outer ones first."""
    if depth > MAX_DEPTH:
        raise InputError(
            f"{source} is nested more than {MAX_DEPTH} levels deep", hint="this is not a model configuration"
        )
    for key, value in raw.items():
        if not isinstance(value, dict):
            continue
        path = f"{prefix}.{key}" if prefix else key
        model_type = value.get("model_type")
        if isinstance(model_type, str) and model_type.strip():
            yield SubModel(path=path, model_type=model_type, raw=value)
        yield from _nested(value, path, source=source, depth=depth + 1)


def _refuse_impossible(raw: Mapping[str, Any], prefix: str, *, source: str) -> None:
    """Raise for what no model can be built from: judged as it is, it would have no layer that needs a kernel."""
    for key, value in raw.items():
        if isinstance(value, dict):
            _refuse_impossible(value, f"{prefix}{key}.", source=source)
        elif _LAYER_COUNT.fullmatch(key) and (
            isinstance(value, (str, float, bool)) or (isinstance(value, int) and value < 0)
        ):
            raise InputError(
                f"{source}: {prefix}{key} is {shown(json.dumps(value))}, but must be a whole number from 0",
                hint=f"write how many layers the model has, or leave {key} out",
            )
    listed, layers = raw.get("layer_types"), raw.get("num_hidden_layers")
    if isinstance(listed, list) and isinstance(layers, int) and len(listed) < layers:
        raise InputError(
            f"{source}: {prefix}layer_types lists {len(listed)} layers, but {prefix}num_hidden_layers is {layers}",
            hint="list a type for every layer, or leave layer_types out",
        )


def _remote_code(raw: Mapping[str, Any]) -> Iterator[str]:
    """The targets of `auto_map`, each `file.Class` or `repo--file.Class`."""
    auto_map = raw.get("auto_map")
    for target in auto_map.values() if isinstance(auto_map, dict) else ():
        for name in target if isinstance(target, list) else [target]:
            if isinstance(name, str):
                yield name


def _config_in(path: Path) -> Path:
    """The config.json that `path` means."""
    if path.is_symlink() and not path.exists():
        raise InputError(
            f"{path} is a link to {path.readlink()}, which does not exist", hint="restore the link's target"
        )
    if not path.is_dir():
        return path
    file = path / _CONFIG
    try:
        found = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise InputError(f"the folder {path} cannot be read: {error.strerror}", hint=f"chmod u+rx {path}") from error
    if _CONFIG in found:
        return _config_in(file) if file.is_symlink() else file
    other = [name for name in found if name.endswith(".json")]
    holds = (
        f"it holds {', '.join(other[:4])}" if other else "it is empty" if not found else "and no other JSON file either"
    )
    below = sorted(child.parent.name for child in path.glob(f"*/{_CONFIG}"))
    hint = f"give {path / below[0]}" if below else "give the folder that holds the model's config.json"
    raise InputError(f"the folder {path} has no config.json; {holds}", hint=hint)


def _load(file: Path) -> object:
    """The parsed JSON of `file`, every way of being unreadable told apart."""
    if file.is_dir():
        raise InputError(f"{file} is a folder, but config.json must be a file", hint="remove the folder of that name")
    try:
        if not file.is_file():
            raise InputError(f"{file} is not a regular file", hint="give a config.json")
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise InputError(
                f"{file} has {size / 1024 / 1024:.0f} MB, but a config.json has a few kB",
                hint="give the config.json, not the weights",
            )
        data = file.read_bytes()
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}", hint=f"chmod u+r {file}") from error
    if not data.strip():
        raise InputError(f"{file} is empty", hint="fetch it again")
    if data.startswith(codecs.BOM_UTF8):
        raise InputError(
            f"{file} begins with a byte order mark, with which transformers does not read it",
            hint=f"sed -i '1s/^\\xef\\xbb\\xbf//' {shlex.quote(str(file))}",
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not text: byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8",
            hint="give the config.json, not the weights",
        ) from error
    try:
        return json.loads(text, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{file} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}", hint=_json_hint(text)
        ) from error
    except RecursionError as error:
        raise InputError(f"{file} is nested too deeply", hint="this is not a model configuration") from error
    except _ConstantError as error:
        raise InputError(
            f"{file} is not JSON: {error} is no JSON number", hint="write the number out, or null"
        ) from error
    except ValueError as error:  # an integer of more than 4300 digits
        raise InputError(
            f"{file} has a number that cannot be read: {error}", hint="this is not a model configuration"
        ) from error


class _ConstantError(ValueError):
    """The file has NaN or Infinity, which Python reads and JSON does not know."""


def _no_constant(name: str) -> object:
    # transformers itself writes `Infinity` into some configs (time_step_limit of the Mamba-2 family), so that one is
    # read; NaN has no meaning in any configuration.
    if name == "NaN":
        raise _ConstantError(name)
    return float(name)


def _json_hint(text: str) -> str:
    start = text.lstrip()[:40]
    if start.startswith("version https://git-lfs"):
        return "this is a Git LFS pointer; run: git lfs pull"
    if start.startswith("<"):
        return "this is a web page, not the file; download the raw file"
    return "check the file at that place"


def _what_it_is(raw: Mapping[str, Any]) -> str:
    """A guess at which other well-known JSON file this is, for the error text."""
    if "weight_map" in raw:
        return "; it is an index of weight files"
    if "peft_type" in raw:
        return "; it is the configuration of a PEFT adapter"
    if "tokenizer_class" in raw or "added_tokens_decoder" in raw:
        return "; it is the configuration of a tokenizer"
    if "image_processor_type" in raw or "feature_extractor_type" in raw:
        return "; it is the configuration of a processor"
    if "_class_name" in raw or "_diffusers_version" in raw:
        return "; it is the configuration of a diffusers pipeline"
    return (
        f"; its keys are {', '.join(shown(key) for key in sorted(map(str, raw))[:5])}"
        if raw
        else "; it is an empty object"
    )


def _missing(model: str, path: Path) -> InputError:
    """What to say about a path that does not exist: the nearest thing that does."""
    import difflib  # noqa: PLC0415 - only for an error text, and it costs 10 ms

    parent = path.parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    wanted = path.relative_to(parent).parts[0] if path != parent else path.name
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        names = []
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.6)
    hint = "give a config.json, a folder that holds one, or a hub id such as Qwen/Qwen3-0.6B"
    if near:
        return InputError(f"{shown(model)} does not exist; {parent} has {near[0]}", hint=f"give {parent / near[0]}")
    if path.parent.is_dir():
        return InputError(f"{shown(model)} does not exist; {parent} has nothing of a similar name", hint=hint)
    return InputError(f"{shown(model)} does not exist; {parent} does, but has no {wanted}", hint=hint)


def shown(text: str) -> str:
    """User input, shortened for an error line, without control characters."""
    clean = "".join(c if c.isprintable() else "?" for c in text)
    return clean if len(clean) <= 120 else f"{clean[:117]}..."


__all__ = ["MAX_BYTES", "parse_config", "read_config", "shown"]
