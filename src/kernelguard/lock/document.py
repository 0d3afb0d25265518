"""A lock as a file: TOML with a digest of itself, refused when it was edited or is newer."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.lock.values import (
    SCHEMA,
    HubFilePin,
    HubPin,
    Lock,
    LockedModel,
    LockedPath,
    LockedTarget,
    LockedTorch,
    Pin,
    Role,
    SourcePin,
)

_HEADER = """\
# Written by `kernelguard lock`. The digest is over everything below it: change the target and lock again instead of
# editing this file.
"""


def to_document(lock: Lock) -> dict[str, Any]:
    """The lock as plain values, its digest included."""
    body: dict[str, Any] = {
        "schema": SCHEMA,
        "admits_launch": lock.admits_launch,
        "transformers": lock.transformers,
        "base_image": lock.base_image,
        "notes": list(lock.notes),
        "model": {"source": lock.model.source, "model_type": lock.model.model_type, "sha256": lock.model.sha256},
        "intent": dict(lock.intent),
        "target": {
            "spec": lock.target.spec,
            "python": lock.target.python,
            "machine": lock.target.machine,
            "glibc": lock.target.glibc,
            "driver": lock.target.driver,
            "gpus": list(lock.target.gpus),
            "capabilities": list(lock.target.capabilities),
        },
        "torch": {
            "version": lock.torch.version,
            "cuda": lock.torch.cuda,
            "channel": lock.torch.channel,
            "cxx11_abi": lock.torch.cxx11_abi,
            "triton": lock.torch.triton,
        },
        "fast_path": [_without_none(_fields(path)) for path in lock.fast_paths],
        "pin": [_without_none(_fields(pin)) for pin in lock.pins],
        "hub": [{**_fields(pin), "files": [_fields(f) for f in pin.files]} for pin in lock.hub],
        "source": [_fields(pin) for pin in lock.sources],
    }
    return {"digest": digest(body), **body}


def digest(body: Mapping[str, Any]) -> str:
    """`sha256:` and the digest of a lock's values, the digest itself left out."""
    plain = {key: value for key, value in body.items() if key != "digest"}
    text = json.dumps(plain, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def dumps(lock: Lock) -> str:
    """The text of the lock file. The same lock gives the same text."""
    return _HEADER + "".join(to_toml(to_document(lock)))


def load_lock(path: Path) -> Lock:
    """Read a lock file.

    Raises:
        InputError: it is missing, no lock, of a newer schema, or was changed after it was written.
    """
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist", hint="kernelguard lock MODEL --target h100") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} is no lock: {error}", hint="lock again") from error
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise InputError(
            f"{path} has schema {schema}, this kernelguard reads up to {SCHEMA}",
            hint="pip install -U kernelguard-preflight",
        )
    errors = sorted(_validator().iter_errors(document), key=lambda e: list(map(str, e.absolute_path)))
    if errors:
        told = "; ".join(f"{'.'.join(map(str, e.absolute_path)) or 'top'}: {e.message}" for e in errors)
        raise InputError(f"{path} is no lock: {told}", hint="lock again")
    if document["digest"] != digest(document):
        raise InputError(
            f"{path} was changed after it was written: its digest is {document['digest']}, its content has "
            f"{digest(document)}",
            hint="take the change into the target or the options, and lock again",
        )
    return _from_document(document)


@cache
def _validator() -> Any:
    return jsonschema.Draft202012Validator(json.loads(data.schema("lock").read_text("utf-8")))


def _from_document(document: Mapping[str, Any]) -> Lock:
    return Lock(
        model=LockedModel(**document["model"]),
        intent=tuple(sorted(document["intent"].items())),
        transformers=document["transformers"],
        target=LockedTarget(**_tuples(document["target"])),
        torch=LockedTorch(**document["torch"]),
        fast_paths=tuple(LockedPath(**{"layers": None, **row}) for row in document["fast_path"]),
        pins=tuple(Pin(**{"size": None, **_tuples(row), "role": Role(row["role"])}) for row in document["pin"]),
        admits_launch=document["admits_launch"],
        hub=tuple(
            HubPin(**{**row, "files": tuple(HubFilePin(**file) for file in row["files"])}) for row in document["hub"]
        ),
        sources=tuple(SourcePin(**_tuples(row)) for row in document["source"]),
        notes=tuple(document["notes"]),
        base_image=document["base_image"],
    )


def _tuples(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def _fields(value: Any) -> dict[str, Any]:
    row = {name: getattr(value, name) for name in value.__slots__}
    return {name: list(item) if isinstance(item, tuple) else _plain(item) for name, item in row.items()}


def _plain(item: Any) -> Any:
    return str(item) if isinstance(item, Role) else item


def _without_none(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def to_toml(document: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """TOML of plain values, keys in the given order, tables after values."""
    tables = []
    for key, value in document.items():
        if isinstance(value, Mapping) or (isinstance(value, list) and value and isinstance(value[0], Mapping)):
            tables.append((key, value))
        elif isinstance(value, list) and len(value) > 1:
            yield f"{_key(key)} = [\n" + "".join(f"  {_scalar(item)},\n" for item in value) + "]\n"
        else:
            yield f"{_key(key)} = {_scalar(value)}\n"
    for key, value in tables:
        name = f"{prefix}{_key(key)}"
        if isinstance(value, Mapping):
            yield f"\n[{name}]\n"
            yield from to_toml(value, f"{name}.")
        else:
            for row in value:
                yield f"\n[[{name}]]\n"
                yield from to_toml(row, f"{name}.")


def _key(key: str) -> str:
    bare = key.replace("_", "").replace("-", "")
    return key if bare.isascii() and bare.isalnum() else _scalar(key)


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Sequence):
        return f"[{', '.join(_scalar(item) for item in value)}]"
    raise TypeError(f"{type(value).__name__} has no form in a lock")
