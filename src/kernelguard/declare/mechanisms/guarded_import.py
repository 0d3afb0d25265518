"""transformers 4.57 to 5.14: `if is_x_available(): from x import kernel` at module level, or a try around it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kernelguard.declare.availability import Availability, read_availability
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.mechanisms._symbols import fast_path
from kernelguard.declare.source import ParsedModule, absolute, called, walk
from kernelguard.declare.values import BindingKind, BindingSite, FastPath

NAME = "guarded_import"
MARKERS: tuple[str, ...] = ()
# These have a mechanism of their own, because more than the import decides.
_ELSEWHERE = frozenset({"apex", "flash_attn", "liger_kernel", "mambapy", "xlstm"})


@dataclass(frozen=True, slots=True)
class _Import:
    local: str
    symbol: str
    module: str
    line: int


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each guarded name of a kernel package that a reached class uses."""
    for statement in module.body:
        if isinstance(statement, ast.If):
            helpers = [
                read_availability(context.source, name)
                for name in (called(c) for c in walk(statement.test) if isinstance(c, ast.Call))
                if name is not None and name.startswith("is_")
            ]
            # `if not is_x_available(): x = None / else: import x` has the import in the other branch.
            imports = [*_imports(module, statement.body), *_imports(module, statement.orelse)]
            yield from _paths(module, context, imports, helpers)
        elif isinstance(statement, ast.Try):
            yield from _paths(module, context, list(_imports(module, statement.body)), [])


def _paths(
    module: ParsedModule, context: Context, imports: list[_Import], helpers: list[Availability]
) -> Iterator[FastPath]:
    guarded = [package for helper in helpers for package in helper.packages]
    for found in imports:
        package = found.module.split(".")[0]
        if package == "transformers":
            # A kernel of transformers' own that builds on the guarded package: kernels/falcon_mamba in 4.57.
            package = next((p for p in guarded if p in context.kernels), package)
        if package not in context.kernels.keys() - _ELSEWHERE:
            continue
        context.consumed.add((package, found.line))
        owners = context.users(module, found.local)
        if not owners and not context.whole_file:
            continue
        helper = next((h for h in helpers if package in h.packages), helpers[0] if helpers else None)
        yield fast_path(
            module,
            context,
            symbol=found.symbol,
            package=package,
            import_module=found.module,
            mechanism=NAME,
            line=found.line,
            binding=BindingSite(
                kind=BindingKind.GLOBAL, module=module.name, name=found.local, owner=owners[0] if owners else None
            ),
            availability=helper,
            gate_member=found.local,
        )


def _imports(module: ParsedModule, body: list[ast.stmt]) -> Iterator[_Import]:
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            source = absolute(module.name, statement)
            for alias in statement.names:
                yield _Import(alias.asname or alias.name, alias.name, source, statement.lineno)
