"""transformers >= 5.15: a decorator binds a kernel at import, or else leaves the PyTorch function in place."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.mechanisms import Context, reached_decorators
from kernelguard.declare.notices import of_fallback_decorator
from kernelguard.declare.source import ParsedModule, literal
from kernelguard.declare.values import BindingKind, BindingSite, FastPath, Requirement

NAME = "decorator"
DECORATOR = "use_kernel_func_from_hub_with_fallback"
MARKERS = (DECORATOR,)
_HUB_KERNELS = "integrations/hub_kernels.py"
_PARAMETERS = ("func_name", "package", "internal_path")


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each decorated function that a reached class uses."""
    paths = _internal_paths(context)
    for node, decorator, _ in reached_decorators(module, context, frozenset({DECORATOR})):
        where = f"{module.file}:{decorator.lineno}"
        if not isinstance(decorator, ast.Call) or not isinstance(node, ast.FunctionDef):
            continue  # left unconsumed: reported as something that cannot be read
        arguments = dict(_arguments(decorator))
        symbol, package = literal(arguments.pop("func_name", None)), literal(arguments.pop("package", None))
        given = literal(arguments.pop("internal_path", ast.Constant(None)))
        if (
            not isinstance(symbol, str)
            or not isinstance(package, str)
            or (given is not None and not isinstance(given, str))
        ):
            continue
        context.consumed.add((DECORATOR, decorator.lineno))
        if arguments:
            context.unknowns.append(f"{where}: the decorator has arguments not known here: {', '.join(arguments)}.")
        # The table wins over the argument, as in the decorator itself.
        internal = paths.get(symbol, given)
        owners = context.users(module, node.name)
        yield FastPath(
            symbol=symbol,
            package=package,
            distribution=context.distribution(package),
            import_module=f"{package}.{internal}" if internal else package,
            mechanism=NAME,
            requirement=Requirement.AUTOMATIC,
            phases=context.phases(package, symbol),
            model_type=context.model_type,
            file=module.file,
            line=decorator.lineno,
            binding=BindingSite(
                kind=BindingKind.CLOSURE, module=module.name, name=node.name, owner=owners[0] if owners else None
            ),
            layers=None,
            fallback=_fallback(node),
            notices=of_fallback_decorator(context, symbol, package),
        )


def _arguments(call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    for number, value in enumerate(call.args):
        yield (_PARAMETERS[number] if number < len(_PARAMETERS) else f"positional argument {number + 1}"), value
    for keyword in call.keywords:
        yield keyword.arg or "**", keyword.value


def _internal_paths(context: Context) -> dict[str, str]:
    """The module below the package that the decorator looks into, for each function it knows."""
    node = context.source.fragment(_HUB_KERNELS, "_KERNELS_INTERNAL_PATH_MAPPINGS")
    table = literal(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) else {}
    if not isinstance(table, dict):
        context.unknowns.append(f"The table of module paths in {_HUB_KERNELS} is no literal any more.")
        return {}
    return {str(key): str(value) for key, value in table.items()}


def _fallback(node: ast.FunctionDef) -> str:
    body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    match body:
        case [ast.Return(value=None | ast.Constant(value=None))]:
            return "the layer's separate steps (this kernel fuses them)"
    return f"{node.name} (PyTorch, same file)"
