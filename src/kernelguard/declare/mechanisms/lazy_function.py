"""transformers 4.57: a function of the module returns the kernels, from the hub or from the installed package."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.availability import read_availability
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.mechanisms._symbols import fast_path
from kernelguard.declare.source import ParsedModule, called, dotted, walk
from kernelguard.declare.values import BindingKind, BindingSite, FastPath

NAME = "lazy_function"
MARKERS = ("_lazy_load_causal_conv1d",)
_PREFIX = "_lazy_load_"


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each element of the tuple that a reached `_lazy_load_*` function returns."""
    for name, node in module.definitions.items():
        if not name.startswith(_PREFIX) or name not in context.reached or not isinstance(node, ast.FunctionDef):
            continue
        owners = context.users(module, name)
        hub_first = False
        for test, body in _branches(node.body):
            helper_name = next((called(c) for c in walk(test) if isinstance(c, ast.Call)), None) or ""
            imports = {
                alias.asname or alias.name: (statement.module or "", alias.name, statement.lineno)
                for statement in body
                if isinstance(statement, ast.ImportFrom) and statement.level == 0
                for alias in statement.names
            }
            if any(module_name == "kernels" for module_name, _, _ in imports.values()):
                hub_first = True
                continue
            returned = _tuple(body)
            for index, local in enumerate(returned):
                if local not in imports:
                    continue
                module_name, symbol, line = imports[local]
                package = module_name.split(".")[0]
                context.consumed.update({(name, 0), (package, line)})
                yield fast_path(
                    module,
                    context,
                    symbol=symbol,
                    package=package,
                    import_module=module_name,
                    mechanism=NAME,
                    line=line,
                    binding=BindingSite(
                        kind=BindingKind.FUNCTION_RESULT,
                        module=module.name,
                        name=local,
                        owner=owners[0] if owners else None,
                        loader=name,
                        index=index,
                    ),
                    availability=read_availability(context.source, helper_name),
                    gate_member=local,
                    hub_first=hub_first,
                )


def _branches(body: list[ast.stmt]) -> Iterator[tuple[ast.expr, list[ast.stmt]]]:
    """Every `if`/`elif` of a function with its body."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield statement.test, statement.body
            yield from _branches(statement.orelse)


def _tuple(body: list[ast.stmt]) -> list[str]:
    """The names of the tuple that a branch assigns or returns."""
    for statement in body:
        value = statement.value if isinstance(statement, (ast.Assign, ast.Return)) else None
        if isinstance(value, ast.Tuple):
            return [dotted(e) or "" for e in value.elts]
    return []
