"""transformers 5.0 to 5.14: `lazy_load_kernel("x")` fills globals of the module, most often when a layer is built."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from kernelguard.declare.availability import read_availability
from kernelguard.declare.gates import MARKER
from kernelguard.declare.mechanisms import Context, real_name
from kernelguard.declare.mechanisms._symbols import fast_path
from kernelguard.declare.source import ParsedModule, called, dotted, literal, simple_assignments, walk
from kernelguard.declare.values import BindingKind, BindingSite, FastPath

NAME = "lazy_load"
LOADER = "lazy_load_kernel"
RESOLVER = "resolve_internal_import"
MARKERS = (LOADER, RESOLVER, MARKER)
_HUB_KERNELS = "integrations/hub_kernels.py"


@dataclass(frozen=True, slots=True)
class _Bound:
    name: str
    kernel: str
    """What the loader was asked for, `causal-conv1d`."""
    path: str
    """Dotted path of the symbol inside the package."""
    line: int
    switch: str | None = None
    """The config attribute that has to be true for it, `use_mamba_kernels`."""


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each global that is taken out of a lazily loaded package."""
    if LOADER not in module.text:
        return
    for name, node in module.definitions.items():
        if name in context.reached and isinstance(node, ast.ClassDef):
            for function in (m for m in node.body if isinstance(m, ast.FunctionDef)):
                globals_ = {n for s in walk(function) if isinstance(s, ast.Global) for n in s.names}
                for bound in _bound(module, context, function.body, {}):
                    if bound.name in globals_:
                        yield _path(module, context, bound, name, BindingKind.GLOBAL_AFTER_INIT)
                    else:
                        context.unknowns.append(
                            f"{module.file}:{bound.line} keeps {bound.path} in a place that is not followed here."
                        )
    for bound in _bound(module, context, module.body, {}):
        users = context.users(module, bound.name)
        if users:
            yield _path(module, context, bound, users[0], BindingKind.GLOBAL)


def _bound(
    module: ParsedModule, context: Context, body: list[ast.stmt], loaded: dict[str, str], switch: str | None = None
) -> Iterator[_Bound]:
    """Names assigned from a loaded package; every call that was understood is consumed."""
    for statement in body:
        if isinstance(statement, ast.If):
            path = dotted(statement.test) or ""
            inner = path.removeprefix("self.").removeprefix("config.") if "config." in path else switch
            yield from _bound(module, context, statement.body, loaded, inner)
            yield from _bound(module, context, statement.orelse, loaded, switch)
        for target, value in _assignments(statement):
            if isinstance(value, ast.Attribute) and dotted(value.value) in loaded:
                yield _Bound(target, loaded[dotted(value.value) or ""], value.attr, statement.lineno, switch)
                continue
            if not isinstance(value, ast.Call):
                continue
            function = real_name(module, called(value))
            if function == LOADER and value.args and isinstance(kernel := literal(value.args[0]), str):
                loaded[target] = kernel
                context.consumed.add((LOADER, value.lineno))
                continue
            arguments = [*value.args, *(k.value for k in value.keywords if k.arg == "chained_path")]
            source = dotted(arguments[0]) if arguments else None
            if source not in loaded or function not in {"getattr", RESOLVER} or len(arguments) < 2:
                continue
            chained = literal(arguments[1])
            if isinstance(chained, str):
                context.consumed.add((str(function), value.lineno))
                yield _Bound(target, loaded[source], chained, statement.lineno, switch)


def _assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """`name = value` pairs; of `a, b = (x, y) if loaded else (None, None)` the pairs of the first arm."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.IfExp):
        first = ast.Assign(targets=statement.targets, value=statement.value.body)
        yield from simple_assignments(ast.copy_location(first, statement))
    else:
        yield from simple_assignments(statement)


def _path(module: ParsedModule, context: Context, bound: _Bound, owner: str, kind: BindingKind) -> FastPath:
    helper = read_availability(context.source, f"is_{bound.kernel.replace('-', '_')}_available")
    imported = bound.kernel.replace("-", "_")
    package, detail = imported, ""
    if imported not in context.kernels:
        # falcon_mamba asks for a package that does not exist; the hub repository says what is really meant.
        hub = _hub_repository(context, bound.kernel).rpartition("/")[2].replace("-", "_")
        package = hub if hub in context.kernels else imported
        if not helper.exists:
            detail = (
                f"Without the hub {package} is never imported: the code asks for {helper.name}, which is not there."
            )
    inside, _, symbol = bound.path.rpartition(".")
    path = fast_path(
        module,
        context,
        symbol=symbol,
        package=package,
        import_module=f"{package}.{inside}" if inside else package,
        mechanism=NAME,
        line=bound.line,
        binding=BindingSite(kind=kind, module=module.name, name=bound.name, owner=owner),
        availability=helper,
        gate_member=bound.name,
        hub_first=_asks_hub_first(context),
        detail=detail,
    )
    if bound.switch is not None and not path.disabled_by and context.setting(bound.switch) is False:
        path = replace(path, disabled_by=f"{bound.switch}=False")
    return path


def _hub_repository(context: Context, kernel: str) -> str:
    node = context.source.fragment(_HUB_KERNELS, "_HUB_KERNEL_MAPPING")
    table = literal(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    row = table.get(kernel) if isinstance(table, dict) else None
    return str(row.get("repo_id", "")) if isinstance(row, dict) else str(row or "")


def _asks_hub_first(context: Context) -> bool:
    """The loader's own `if kernels are available: get_kernel(...)` comes before it tries the installed package."""
    node = context.source.fragment(_HUB_KERNELS, LOADER)
    for statement in node.body if isinstance(node, ast.FunctionDef) else ():
        if isinstance(statement, ast.If) and "kernels_available" in ast.unparse(statement.test):
            return any(isinstance(c, ast.Call) and called(c) == "get_kernel" for s in statement.body for c in walk(s))
    context.unknowns.append(f"{_HUB_KERNELS}: {LOADER} has a shape that is not understood here.")
    return True
