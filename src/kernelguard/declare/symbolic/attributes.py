"""What does `value.name` or `value[key]` give? Modules, configurations with their attribute maps, containers."""

from __future__ import annotations

import ast
import re

from kernelguard.declare.source import ParsedModule, dotted, literal
from kernelguard.declare.symbolic import library
from kernelguard.declare.symbolic.expressions import hashable
from kernelguard.declare.symbolic.lookup import Lookup
from kernelguard.declare.symbolic.statements import Frame
from kernelguard.declare.symbolic.values import (
    UNKNOWN,
    Arguments,
    Builtin,
    Choice,
    ClassValue,
    External,
    Function,
    Instance,
    Kernel,
    KernelObject,
    Method,
    Seq,
    Signal,
    Table,
    Value,
    merge,
)

_MAX_NAME = 200
# Methods of torch modules that return the module itself.
_SAME_MODULE = frozenset(
    {"to", "float", "half", "bfloat16", "double", "train", "eval", "requires_grad_", "cuda", "cpu"}
)
# Attributes that training flips at run time, whatever __init__ says.
_VOLATILE = frozenset({"training", "gradient_checkpointing"})
_CONFIG_UTILS = "configuration_utils.py"


class Attributes(Lookup):
    """Attributes and items."""

    def attribute(self, value: Value, name: str) -> Value:
        """`value.name`."""
        if isinstance(value, Instance):
            return self._instance_attribute(value, name)
        if isinstance(value, (Kernel, KernelObject)):
            # A function of a kernel module counts as the kernel.
            return KernelObject(value if isinstance(value, Kernel) else value.kernel)
        if isinstance(value, External):
            return External(f"{value.name}.{name}" if len(value.name) < _MAX_NAME else f"?.{name}")
        if isinstance(value, (Seq, Table, str, tuple, set, Builtin)):
            return Builtin(name, value)
        if isinstance(value, Choice):
            results = [self.attribute(option, name) for option in value.options if option is not None]
            result = results[0] if results else UNKNOWN
            for other in results[1:]:
                result = merge(result, other)
            return result
        if isinstance(value, ClassValue):
            found = self.find_in_class(value, name)
            if found is None:
                return Builtin(name, value)
            return self._bound(found, value, is_class=True)
        if isinstance(value, Signal) and name in {"to", "int", "long", "contiguous"}:
            return Builtin(name, value)
        # Whatever it is, it is not of these files: calling it builds none of their classes.
        return External(f"?.{name}")

    def _instance_attribute(self, value: Instance, name: str) -> Value:
        name = self._mapped(value, name)
        if name in _VOLATILE:
            return UNKNOWN
        if name in value.attributes:
            return value.attributes[name]
        if name == "__class__":
            return value.cls
        found = self.find_in_class(value.cls, name)
        if found is not None:
            return self._bound(found, value, is_class=False)
        if name in _SAME_MODULE and not value.is_config:
            return Builtin(name, value)
        return UNKNOWN if value.opaque else External(f"self.{name}")

    def _bound(self, found: tuple[ClassValue, ast.stmt], this: Value, *, is_class: bool) -> Value:
        owner, statement = found
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            decorators = {dotted(d) or "" for d in statement.decorator_list}
            function = Function(owner.module, statement, owner)
            if decorators & {"property", "cached_property", "functools.cached_property"}:
                return UNKNOWN if is_class else self.run(function, Arguments([this]))
            if "staticmethod" in decorators:
                return function
            if "classmethod" in decorators:
                return Method(function, this if is_class else this.cls)
            return function if is_class else Method(function, this)
        value = statement.value if isinstance(statement, (ast.Assign, ast.AnnAssign)) else None
        return UNKNOWN if value is None else self.evaluate(value, Frame(owner.module, {}))

    def _mapped(self, value: Instance, name: str) -> str:
        """`attribute_map` of a configuration."""
        if not value.is_config:
            return name
        key = id(value.cls.node)
        if key not in self._attribute_maps:
            found = self.find_in_class(value.cls, "attribute_map")
            table = literal(found[1].value) if found and isinstance(found[1], (ast.Assign, ast.AnnAssign)) else None
            self._attribute_maps[key] = table if isinstance(table, dict) else {}
        return self._attribute_maps[key].get(name, name)

    def has_attribute(self, value: Value, name: str) -> bool | None:
        """`hasattr`, None when it cannot be told."""
        if isinstance(value, Instance) and not value.opaque:
            name = self._mapped(value, name)
            if name in value.attributes or self.find_in_class(value.cls, name) is not None:
                return True
            if value.is_config and name not in self.base_config_names():
                return False
        return None

    def base_config_names(self) -> frozenset[str]:
        """Every name that transformers' own configuration base class could define."""
        if self._base_names is None:
            text = self.source.text(_CONFIG_UTILS) or ""
            self._base_names = frozenset(re.findall(r"\b[A-Za-z_]\w+\b", text))
        return self._base_names

    def assign_attribute(self, target: Value, name: str, value: Value) -> None:
        """`target.name = value`."""
        if isinstance(target, Choice):
            for option in target.options:
                self.uncertain += 1
                self.assign_attribute(option, name, value)
                self.uncertain -= 1
            return
        if not isinstance(target, Instance):
            return
        name = self._mapped(target, name)
        setter = self._setter(target.cls, name)
        if setter is not None:
            self.run(setter, Arguments([target, value]))
            return
        if self.uncertain > target.depth and name in target.attributes:
            value = merge(target.attributes[name], value)
        target.attributes[name] = value

    def assign_global(self, module: ParsedModule, name: str, value: Value) -> None:
        """`global name; name = value`; what a fast path is bound to stays."""
        key = (module.file, name)
        self._globals[key] = merge(self.global_value(module, name), value) if self.uncertain else value

    def _setter(self, cls: ClassValue, name: str) -> Function | None:
        found = self.find_in_class(cls, f"{name}.setter")
        if found is None or not isinstance(found[1], ast.FunctionDef):
            return None
        return Function(found[0].module, found[1], found[0])

    def item(self, value: Value, key: Value) -> Value:
        """`value[key]`."""
        if isinstance(value, Table):
            if hashable(key) and key in value and not value.vague:
                return value[key]
            return library.take(value, key, UNKNOWN, keep=True)
        if isinstance(value, (Seq, tuple, str, range)) and isinstance(key, (int, slice)):
            if isinstance(value, Seq) and value.vague:
                return UNKNOWN
            try:
                found: Value = value[key]
            except (IndexError, TypeError, ValueError):
                return UNKNOWN
            return Seq(found, depth=self.uncertain) if isinstance(value, Seq) and isinstance(key, slice) else found
        if isinstance(value, Seq) and not value.vague and key is UNKNOWN:
            result = value[0] if value else UNKNOWN
            for other in value[1:]:
                result = merge(result, other)
            return result
        if isinstance(value, External) and value.last == "CONFIG_MAPPING" and isinstance(key, str):
            return self.config_class(key)
        return External(f"{value.name}[]") if isinstance(value, External) else UNKNOWN

    def assign_item(self, target: Value, key: Value, value: Value) -> None:
        """`target[key] = value`."""
        if isinstance(target, Table):
            if not hashable(key):
                target.vague = True
            elif self.uncertain > target.depth:
                target[key] = merge(target[key], value) if key in target else UNKNOWN
            else:
                target[key] = value
        elif isinstance(target, Seq):
            inside = isinstance(key, int) and not target.vague and -len(target) <= key < len(target)
            if inside and self.uncertain <= target.depth:
                list.__setitem__(target, key, value)
            else:
                target.vague = True

    def iterate(self, value: Value) -> list[Value] | None:
        """The items of a value, None when they are not known."""
        if isinstance(value, (Seq, tuple, range, str)):
            return list(value)
        if isinstance(value, (set, frozenset)):
            return sorted(value, key=repr)
        if isinstance(value, Table) and not value.open and not value.vague:
            return list(value)
        return None

    def shape(self, value: Value) -> object:
        """Equal for modules that run the same code in forward, None for what is not a module."""
        if isinstance(value, tuple) and value and isinstance(value[-1], Instance):
            return self.shape(value[-1])
        if not isinstance(value, Instance) or value.is_config:
            return None
        parts: list[object] = [value.cls.key]
        for name, inner in sorted(value.attributes.items()):
            if isinstance(inner, Instance) and not inner.is_config:
                parts.append((name, inner.cls.key if inner.opaque else self.shape(inner)))
            elif isinstance(inner, (str, bool, type(None), Kernel)):
                parts.append((name, inner))
        return tuple(parts)
