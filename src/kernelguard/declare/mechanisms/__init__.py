"""How can a model's code declare a fast path? One file each; adding a mechanism is adding a file here."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast

from kernelguard.declare.index import Index, default_of
from kernelguard.declare.source import ParsedModule, Source, called, dotted
from kernelguard.declare.values import FastPath, Phase
from kernelguard.matrix import KernelPackages


@dataclass(slots=True, kw_only=True)
class Context:
    """What a mechanism may look at besides the module, and where it reports what it could not read."""

    source: Source
    index: Index
    kernels: KernelPackages
    model_type: str
    config: Mapping[str, Any]
    """The part's own raw configuration."""
    reached: frozenset[str]
    """The names of the module's definitions and assignments that this part's classes can reach."""
    whole_file: bool = False
    """No class of this part could be told, so everything in the file counts as reached."""
    unknowns: list[str] = field(default_factory=list)
    consumed: set[tuple[str, int]] = field(default_factory=set)
    """(identifier, line) of every marker that was understood; line 0 stands for the whole file."""

    def phases(self, package: str, symbol: str) -> tuple[Phase, ...]:
        """When a kernel is called, as far as is known: both, when nothing is."""
        entry = self.kernels.symbol(package, symbol)
        if entry is not None:
            return tuple(Phase(phase) for phase in entry.phases)
        self.unknowns.append(
            f"Nothing is known about the kernel {package}.{symbol}; it is in no file of matrices/kernels."
        )
        return (Phase.TRAINING, Phase.DECODING)

    def setting(self, name: str) -> object:
        """A setting of this part's configuration: the file's, else the class's default; `...`: cannot be told."""
        if name in self.config:
            return self.config[name]
        entry = self.index.entry(self.model_type)
        return ... if entry is None else default_of(self.index, entry, name)

    def distribution(self, package: str) -> str:
        """What is installed to get a package."""
        known = self.kernels.get(package)
        return known.distributions[0] if known else package.replace("_", "-")

    def users(self, module: ParsedModule, name: str) -> tuple[str, ...]:
        """The reached classes of the module that use a module-level name, directly or through functions."""
        return users_of(module, name, self.reached)


class Mechanism(Protocol):
    """What each file of this package offers at module level."""

    NAME: str
    MARKERS: tuple[str, ...]
    """Identifiers that mean this mechanism; one that is left unconsumed in reached code becomes an unknown."""

    def find(self, module: ParsedModule, context: Context) -> Iterable[FastPath]:
        """The fast paths of one modeling module that the part's classes can reach."""


def users_of(module: ParsedModule, name: str, reached: AbstractSet[str]) -> tuple[str, ...]:
    """The reached classes of a module that use a module-level name, directly or through the module's functions."""
    names, todo = set(), {name}
    while todo:
        current = todo.pop()
        for user in reached:
            if user in names or user == current or current not in module.names_used_by(user):
                continue
            names.add(user)
            if not _is_layer(module.definitions.get(user)):
                todo.add(user)
    return tuple(n for n, d in module.definitions.items() if n in names and _is_layer(d))


def _is_layer(node: ast.stmt | None) -> bool:
    """A class that is built; an autograd function is called through its class, like a function."""
    is_autograd = isinstance(node, ast.ClassDef) and any(
        (dotted(b) or "").endswith("autograd.Function") for b in node.bases
    )
    return isinstance(node, ast.ClassDef) and not is_autograd


@cache
def mechanisms() -> tuple[Mechanism, ...]:
    """Every mechanism, in the order of the file names."""
    names = sorted(info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_"))
    return tuple(cast("Mechanism", importlib.import_module(f"{__name__}.{name}")) for name in names)


def reached_decorators(
    module: ParsedModule, context: Context, names: frozenset[str]
) -> Iterator[tuple[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, ast.expr, str]]:
    """Every decorator of a reached definition whose imported name is one of `names`, aliases seen through."""
    for name in module.definitions:
        if name not in context.reached:
            continue
        node = module.definitions[name]
        for decorator in node.decorator_list:
            real = real_name(module, called(decorator))
            if real in names:
                yield node, decorator, real


def real_name(module: ParsedModule, local: str | None) -> str | None:
    """The name under which something was defined before `import ... as`."""
    if local is None:
        return None
    imported = module.imports.get(local)
    return imported.name if imported is not None and imported.name is not None else local
