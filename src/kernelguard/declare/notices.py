"""What does a user get to see when the slow path is taken? Read from the logging calls of this version's source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from kernelguard.declare.mechanisms import Context
from kernelguard.declare.source import called, literal, walk
from kernelguard.declare.values import FallbackNotice

_HUB_KERNELS = "integrations/hub_kernels.py"
_LEVELS = frozenset({"debug", "info", "warning", "warning_once", "error", "critical"})
SILENT = FallbackNotice(level=None, when="first call", text="")
BOUNDARY_NAMES = frozenset({"seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens"})


def of_fallback_decorator(context: Context, symbol: str, package: str) -> tuple[FallbackNotice, ...]:
    """What `use_kernel_func_from_hub_with_fallback` of this version says about one function."""
    node = context.source.fragment(_HUB_KERNELS, "use_kernel_func_from_hub_with_fallback")
    if node is None:
        context.unknowns.append(f"{_HUB_KERNELS} has no use_kernel_func_from_hub_with_fallback.")
        return ()
    shipped = context.source.fragment(_HUB_KERNELS, "_PACKAGE_TO_DISTRIBUTION")
    table = literal(shipped.value) if isinstance(shipped, (ast.Assign, ast.AnnAssign)) else {}
    names = {
        "func_name": symbol,
        "package": package,
        "distribution": table.get(package, package) if isinstance(table, dict) else package,
    }
    found = tuple(messages(node.body if isinstance(node, ast.FunctionDef) else [node], "first call", names))
    return found or (SILENT,)


def messages(
    body: Sequence[ast.stmt], when: str, names: Mapping[str, str] | None = None, *, packed: bool = False
) -> Iterator[FallbackNotice]:
    """Every message that some statements can log or raise; a test on sample boundaries makes it a packed call's."""
    names = names or {}
    for statement in body:
        if isinstance(statement, ast.If):
            on_packed = packed or any(name in BOUNDARY_NAMES for name in _mentioned(statement.test))
            yield from messages(statement.body, when, names, packed=on_packed)
            yield from messages(statement.orelse, when, names, packed=packed)
        elif isinstance(statement, ast.Raise) and isinstance(statement.exc, ast.Call) and statement.exc.args:
            yield FallbackNotice(
                level="error", when="packed call" if packed else when, text=_text(statement.exc.args[0], names)
            )
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            call = statement.value
            level = called(call)
            is_logger = isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Name)
            if is_logger and level in _LEVELS and call.args:
                yield FallbackNotice(
                    level=level, when="packed call" if packed else when, text=_text(call.args[0], names)
                )
        elif isinstance(statement, (ast.FunctionDef, ast.With, ast.Try)):
            yield from messages(statement.body, when, names, packed=packed)


def _mentioned(node: ast.AST) -> Iterator[str]:
    """Names and string constants below a node: `kwargs.get("seq_idx")` mentions seq_idx."""
    for inner in walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield inner.value


def _text(node: ast.expr, names: Mapping[str, str]) -> str:
    """A message's text, f-string fields filled in where they are known."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        if isinstance(node.value, ast.Name) and node.value.id in names:
            return names[node.value.id]
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, names) + _text(node.right, names)
    value = literal(node)
    return value if isinstance(value, str) else "{" + ast.unparse(node) + "}"
