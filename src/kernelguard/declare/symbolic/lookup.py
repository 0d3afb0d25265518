"""What does a name stand for? Classes of the tree, their members, and module-level names."""

from __future__ import annotations

import ast
from abc import abstractmethod

from kernelguard.declare.index import Index, class_and_bases
from kernelguard.declare.source import ParsedModule, dotted
from kernelguard.declare.symbolic.expressions import Expressions
from kernelguard.declare.symbolic.statements import Frame
from kernelguard.declare.symbolic.values import (
    UNKNOWN,
    Arguments,
    ClassValue,
    External,
    Function,
    Instance,
    Kernel,
    Value,
)

BUILTIN_NAMES = frozenset(
    {
        "abs",
        "all",
        "any",
        "bool",
        "callable",
        "chr",
        "dict",
        "divmod",
        "enumerate",
        "float",
        "frozenset",
        "getattr",
        "hasattr",
        "int",
        "isinstance",
        "iter",
        "len",
        "list",
        "max",
        "min",
        "next",
        "ord",
        "print",
        "range",
        "reversed",
        "round",
        "set",
        "setattr",
        "sorted",
        "str",
        "sum",
        "super",
        "tuple",
        "type",
        "zip",
    }
)
_CONFIG_BASES = frozenset({"PreTrainedConfig", "PretrainedConfig"})


class Lookup(Expressions):
    """Names and classes of one transformers tree."""

    def __init__(
        self,
        index: Index,
        kernels: dict[tuple[str, str], Value],
        relevant: frozenset[tuple[str, str]],
        universe: frozenset[tuple[str, str]],
    ) -> None:
        """Sets it up.

        Args:
            index: The model types, for AutoModel and AutoConfig.
            kernels: (file, name) of every fast path's global, and what stands there.
            relevant: (file, name) of every class and function from which a kernel can be reached; others are not
                followed.
            universe: (file, name) of everything that was looked at for that.
        """
        super().__init__()
        self.index = index
        self.source = index.source
        self.kernels = kernels
        self.relevant = relevant
        self.universe = universe
        self.built: dict[ClassValue, list[int]] = {}
        """For each class: instances certainly made, and instances perhaps made."""
        self.calls: list[tuple[Kernel, Arguments]] = []
        """Every kernel call seen, in order."""
        self.ran: list[Instance] = []
        """Every module whose forward was followed."""
        self.configs: list[Instance] = []
        self.lost: str | None = None
        """What could not be followed and may have built something that counts."""
        self._globals: dict[tuple[str, str], Value] = {}
        self._mro: dict[int, list[ClassValue]] = {}
        self._members: dict[int, dict[str, ast.stmt]] = {}
        self._attribute_maps: dict[int, dict[str, str]] = {}
        self._templates: dict[tuple[str, str], Instance] = {}
        self._leaves: frozenset[tuple[str, str]] | None = None
        self._depth = 0
        self._base_names: frozenset[str] | None = None

    @abstractmethod
    def run(self, function: Function, arguments: Arguments) -> Value:
        """Runs a function of the tree."""

    def mro(self, cls: ClassValue) -> list[ClassValue]:
        """The class and its bases within the tree."""
        if id(cls.node) not in self._mro:
            found = class_and_bases(self.source, cls.module, cls.node.name)
            self._mro[id(cls.node)] = [ClassValue(module, node) for module, node in found] or [cls]
        return self._mro[id(cls.node)]

    def is_config(self, cls: ClassValue) -> bool:
        """A configuration class."""
        return any(
            (dotted(base) or "").rpartition(".")[2] in _CONFIG_BASES for c in self.mro(cls) for base in c.node.bases
        )

    def find_in_class(
        self, cls: ClassValue, name: str, *, after: ClassValue | None = None
    ) -> tuple[ClassValue, ast.stmt] | None:
        """The statement of a class body that defines `name`, bases included."""
        classes = self.mro(cls)
        if after is not None:
            classes = classes[classes.index(after) + 1 :] if after in classes else []
        for owner in classes:
            statement = self._members_of(owner).get(name)
            if statement is not None:
                return owner, statement
        return None

    def _members_of(self, cls: ClassValue) -> dict[str, ast.stmt]:
        """What a class body defines; a property's setter stands under `name.setter`."""
        if id(cls.node) not in self._members:
            members: dict[str, ast.stmt] = {}
            for statement in cls.node.body:
                if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    is_setter = any(dotted(d) == f"{statement.name}.setter" for d in statement.decorator_list)
                    members[f"{statement.name}.setter" if is_setter else statement.name] = statement
                elif isinstance(statement, ast.Assign):
                    members.update({target: statement for target in map(dotted, statement.targets) if target})
                elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
                    members[dotted(statement.target) or ""] = statement
            self._members[id(cls.node)] = members
        return self._members[id(cls.node)]

    def lookup(self, name: str, frame: Frame) -> Value:
        """Local, enclosing, global, builtin."""
        if name in frame.variables:
            return frame.variables[name]
        if frame.closure is not None and name in frame.closure:
            return frame.closure[name]
        return self.global_value(frame.module, name)

    def global_value(self, module: ParsedModule, name: str) -> Value:
        """What a module-level name stands for."""
        key = (module.file, name)
        if key in self.kernels:
            return self.kernels[key]
        if key not in self._globals:
            self._globals[key] = UNKNOWN  # a name that is defined by itself
            self._globals[key] = self._global(module, name)
        return self._globals[key]

    def _global(self, module: ParsedModule, name: str) -> Value:
        found = self.source.resolve(module, name)
        if found is not None:
            owner, real = found
            if (owner.file, real) in self.kernels:
                return self.kernels[owner.file, real]
            node = owner.definitions.get(real)
            if isinstance(node, ast.ClassDef):
                return ClassValue(owner, node)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return Function(owner, node)
            value = owner.assignments.get(real)
            return UNKNOWN if value is None else self.evaluate(value, Frame(owner, {}))
        imported = module.imports.get(name)
        if imported is not None:
            return External(f"{imported.module}.{imported.name}" if imported.name else imported.module)
        return External(name) if name in BUILTIN_NAMES else UNKNOWN

    def config_class(self, model_type: str) -> Value:
        """`CONFIG_MAPPING[model_type]`."""
        entry = self.index.entry(model_type)
        module = self.index.config_module(entry) if entry is not None else None
        return self.global_value(module, entry.config_class) if module is not None and entry is not None else UNKNOWN
