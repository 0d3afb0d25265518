"""transformers up to 5.6: T5 and its kin take apex's FusedRMSNorm when it can be imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernelguard.declare.mechanisms import Context
from kernelguard.declare.notices import SILENT, messages
from kernelguard.declare.source import ParsedModule, simple_assignments
from kernelguard.declare.values import BindingKind, BindingSite, FallbackNotice, FastPath, Requirement

NAME = "apex"
MARKERS: tuple[str, ...] = ()
_PACKAGE = "apex"


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each name that a `try` binds to an import from apex."""
    if _PACKAGE not in module.text:
        return
    for statement in module.body:
        if not isinstance(statement, ast.Try):
            continue
        imported: dict[str, tuple[str, str, int]] = {}
        for inner in statement.body:
            if isinstance(inner, ast.ImportFrom) and (inner.module or "").split(".")[0] == _PACKAGE:
                imported |= {a.asname or a.name: (inner.module or "", a.name, inner.lineno) for a in inner.names}
                context.consumed.add((_PACKAGE, inner.lineno))
        bound = {
            value.id: target
            for part in _all(module.body)
            for target, value in simple_assignments(part)
            if isinstance(value, ast.Name) and value.id in imported
        }
        for local, (source, symbol, line) in imported.items():
            name = bound.get(local, local)
            owners = context.users(module, name)
            if owners or context.whole_file:
                yield FastPath(
                    symbol=symbol,
                    package=_PACKAGE,
                    distribution=context.distribution(_PACKAGE),
                    import_module=source,
                    mechanism=NAME,
                    requirement=Requirement.AUTOMATIC,
                    phases=context.phases(_PACKAGE, symbol),
                    model_type=context.model_type,
                    file=module.file,
                    line=line,
                    binding=BindingSite(
                        kind=BindingKind.GLOBAL, module=module.name, name=name, owner=owners[0] if owners else None
                    ),
                    layers=None,
                    fallback=f"{name} (PyTorch, same file)",
                    notices=_notices(statement),
                    optional=True,
                )


def _all(body: list[ast.stmt]) -> Iterable[ast.stmt]:
    for statement in body:
        yield statement
        if isinstance(statement, ast.Try):
            yield from statement.body
        elif isinstance(statement, ast.If):
            yield from statement.body
            yield from statement.orelse


def _notices(statement: ast.Try) -> tuple[FallbackNotice, ...]:
    found = [notice for handler in statement.handlers for notice in messages(handler.body, "import")]
    return (SILENT, *found)
