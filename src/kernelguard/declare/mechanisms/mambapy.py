"""The parallel scan of mambapy: used only when the config says `use_mambapy`, and the CUDA kernels are not there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from kernelguard.declare.availability import read_availability
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.notices import SILENT
from kernelguard.declare.source import ParsedModule, walk
from kernelguard.declare.values import BindingKind, BindingSite, FastPath, Requirement

NAME = "mambapy"
MARKERS: tuple[str, ...] = ()
_PACKAGE = "mambapy"
_SWITCH = re.compile(r"\bconfig\.(use_\w*mambapy)\b")


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each place that imports from mambapy, at module level or inside a function."""
    if _PACKAGE not in module.text:
        return
    switch = next(iter(_SWITCH.findall(module.text)), None)
    for node in _imports(module, context):
        for alias in node.names:
            local = alias.asname or alias.name
            user = _around(module, node)
            owners = context.users(module, user.name if user is not None else local)
            context.consumed.add((_PACKAGE, node.lineno))
            helper = read_availability(context.source, f"is_{_PACKAGE}_available")
            yield FastPath(
                symbol=alias.name,
                package=_PACKAGE,
                distribution=context.distribution(_PACKAGE),
                import_module=node.module or _PACKAGE,
                mechanism=NAME,
                requirement=Requirement.OPT_IN,
                phases=context.phases(_PACKAGE, alias.name),
                model_type=context.model_type,
                file=module.file,
                line=node.lineno,
                binding=BindingSite(
                    kind=BindingKind.GLOBAL if user is None else BindingKind.AT_CALL,
                    module=module.name,
                    name=local,
                    owner=owners[0] if owners else None,
                ),
                layers=None,
                fallback="a Python loop over time steps (PyTorch, same file)",
                notices=(SILENT,),
                availability_check=helper.name,
                availability_needs_gpu=helper.needs_gpu,
                availability_missing=not helper.exists,
                disabled_by=_disabled(context, switch),
                detail="It replaces the slow path's loop, not the CUDA kernels, which come first.",
            )


def _disabled(context: Context, switch: str | None) -> str:
    if switch is None:
        return "the model's code, which never asks for it"
    return "mamba-ssm, which comes first" if context.setting(switch) is True else f"{switch}=False"


def _imports(module: ParsedModule, context: Context) -> Iterable[ast.ImportFrom]:
    bodies: list[ast.AST] = [s for s in module.body if not isinstance(s, (ast.ClassDef, ast.FunctionDef))]
    bodies += [node for name, node in module.definitions.items() if name in context.reached]
    for body in bodies:
        for node in walk(body):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == _PACKAGE:
                yield node


def _around(module: ParsedModule, node: ast.stmt) -> ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef | None:
    """The module-level definition that a statement lies in."""
    for definition in module.definitions.values():
        if definition.lineno <= node.lineno <= (definition.end_lineno or 0):
            return definition
    return None
