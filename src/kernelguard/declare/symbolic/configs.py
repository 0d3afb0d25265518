"""What does a configuration object hold? The class's own code is followed, the base class's is known."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from kernelguard.declare.source import dotted
from kernelguard.declare.symbolic.machine import Machine
from kernelguard.declare.symbolic.statements import Frame
from kernelguard.declare.symbolic.values import UNKNOWN, Arguments, ClassValue, Function, Instance, Seq, Table, Value

# Written into the file by save_pretrained; the class sets model_type itself.
_NOT_PASSED = frozenset({"model_type"})


def from_json(value: Any) -> Value:
    """A value of a config.json, in the machine's own containers."""
    if isinstance(value, list):
        return Seq(map(from_json, value))
    if isinstance(value, dict):
        return Table((key, from_json(inner)) for key, inner in value.items())
    return value


def config_of(machine: Machine, cls: ClassValue, raw: Mapping[str, Any]) -> Instance:
    """The object that `cls(**raw)` makes."""
    keywords = {key: from_json(value) for key, value in raw.items() if key not in _NOT_PASSED}
    return build_config(machine, cls, Arguments(keywords=keywords))


def build_config(machine: Machine, cls: ClassValue, arguments: Arguments) -> Instance:
    """Makes a configuration object of a class, by its __init__ or as the dataclass that it is since 5.4."""
    instance = Instance(cls, machine.uncertain, is_config=True)
    machine.configs.append(instance)
    found = machine.find_in_class(cls, "__init__")
    if found is not None and isinstance(found[1], ast.FunctionDef):
        bound = Arguments([instance, *arguments.positional], arguments.keywords, arguments.rest)
        machine.run(Function(found[0].module, found[1], found[0]), bound)
        return instance
    extra = {key: value for key, value in arguments.keywords.items() if key not in _NOT_PASSED}
    for owner, name, default in _fields(machine, cls):
        if name in extra:
            instance.attributes[name] = extra.pop(name)
        elif arguments.rest is not None:
            instance.attributes[name] = UNKNOWN
        else:
            instance.attributes[name] = machine.evaluate(default, Frame(owner.module, {}))
    if not _has_base_fields(machine):
        _set(machine, instance, extra)
        return instance
    post = machine.find_in_class(cls, "__post_init__")
    if post is not None and isinstance(post[1], ast.FunctionDef):
        machine.run(Function(post[0].module, post[1], post[0]), Arguments([instance], extra, arguments.rest))
    else:
        _base_post_init(machine, instance, extra)
    return instance


def call_base(machine: Machine, instance: Instance, name: str, arguments: Arguments) -> Value:
    """A method of transformers' own configuration base class."""
    given = dict(arguments.keywords)
    if arguments.rest is not None:
        given.update({k: v for k, v in arguments.rest.items() if isinstance(k, str)})
    if name == "__post_init__":
        _base_post_init(machine, instance, given)
    elif name == "__init__":
        _set(machine, instance, given)
    return UNKNOWN if name not in {"__init__", "__post_init__"} else None


def _base_post_init(machine: Machine, instance: Instance, given: dict[str, Value]) -> None:
    _make_sub_configs(machine, instance)
    _set(machine, instance, given)
    # Since 5.20 the base class renames old layer types at the very end.
    if "remap_legacy_layer_types" in machine.base_config_names():
        for name in ("layer_types", "mtp_layer_types"):
            value = machine.attribute(instance, name)
            remapped = machine.remap(value)
            if isinstance(value, Seq) and remapped is not UNKNOWN and list(remapped) != list(value):
                machine.assign_attribute(instance, name, remapped)


def _set(machine: Machine, instance: Instance, given: Mapping[str, Value]) -> None:
    for key, value in given.items():
        machine.assign_attribute(instance, key, value)


def _make_sub_configs(machine: Machine, instance: Instance) -> None:
    """`sub_configs_defaults`: nested dicts become configuration objects, missing ones get their defaults."""
    found = machine.find_in_class(instance.cls, "sub_configs_defaults")
    if found is None:
        return
    model_type = machine.index.type_of_class(instance.cls.module, instance.cls.node.name)
    entry = machine.index.entry(model_type) if model_type else None
    if entry is None or entry.config_class != instance.cls.node.name:
        return
    for sub in machine.index.sub_configs(entry):
        value = machine.attribute(instance, sub.key)
        if isinstance(value, Instance) or (value is None and sub.optional):
            continue
        inner: Value = UNKNOWN
        named = value.get("model_type") if isinstance(value, Table) and not value.vague else None
        wanted = (
            sub.entry if sub.fixed else machine.index.entry(named if isinstance(named, str) else sub.model_type or "")
        )
        module = machine.index.config_module(wanted) if wanted is not None else None
        if module is not None and wanted is not None and (value is None or isinstance(value, Table)):
            cls = machine.global_value(module, wanted.config_class)
            if isinstance(cls, ClassValue) and (value is not None or sub.defaults is not None):
                given = value if value is not None else from_json(sub.defaults)
                keywords = {str(k): v for k, v in given.items()} if isinstance(given, Table) else {}
                inner = build_config(machine, cls, Arguments(keywords=keywords))
        instance.attributes[sub.key] = inner


def _has_base_fields(machine: Machine) -> bool:
    """The base class is a dataclass (since 5.4), so extra arguments go through __post_init__."""
    return "__post_init__" in machine.base_config_names()


def _fields(machine: Machine, cls: ClassValue) -> Iterator[tuple[ClassValue, str, ast.expr]]:
    """The dataclass fields of a configuration class: the outermost class's default wins."""
    seen: set[str] = set()
    for owner in machine.mro(cls):
        for statement in owner.node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                name = statement.target.id
                is_class_variable = (dotted(statement.annotation) or ast.unparse(statement.annotation)).startswith(
                    ("ClassVar", "typing.ClassVar")
                )
                if name not in seen and statement.value is not None and not is_class_variable:
                    seen.add(name)
                    yield owner, name, statement.value
