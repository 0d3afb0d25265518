"""xLSTM: the authors' package brings the blocks, and the configuration says which of its kernels run."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernelguard.declare.availability import read_availability
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.notices import SILENT
from kernelguard.declare.source import ParsedModule, walk
from kernelguard.declare.values import BindingKind, BindingSite, FastPath, Requirement

NAME = "xlstm"
MARKERS: tuple[str, ...] = ()
_PACKAGE = "xlstm"
_SETTING = "chunkwise_kernel"
_NOT_KERNELS = frozenset({"mLSTMStateType"})


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each class or function that is imported from xlstm under `if is_xlstm_available()`."""
    for statement in module.body:
        if not isinstance(statement, ast.If):
            continue
        for node in statement.body:
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != _PACKAGE:
                continue
            context.consumed.add((_PACKAGE, node.lineno))
            helper = read_availability(context.source, f"is_{_PACKAGE}_available")
            for alias in node.names:
                local = alias.asname or alias.name
                if alias.name in _NOT_KERNELS:
                    continue
                owners = context.users(module, local)
                yield FastPath(
                    symbol=alias.name,
                    package=_PACKAGE,
                    distribution=context.distribution(_PACKAGE),
                    import_module=node.module or _PACKAGE,
                    mechanism=NAME,
                    requirement=Requirement.AUTOMATIC,
                    phases=context.phases(_PACKAGE, alias.name),
                    model_type=context.model_type,
                    file=module.file,
                    line=node.lineno,
                    binding=BindingSite(
                        kind=BindingKind.GLOBAL,
                        module=module.name,
                        name=local,
                        owner=owners[0] if owners else _subclass(statement, local),
                    ),
                    layers=None,
                    fallback="native PyTorch kernels",
                    notices=(SILENT,),
                    availability_check=helper.name,
                    availability_needs_gpu=helper.needs_gpu,
                    availability_missing=not helper.exists,
                    optional=alias.name != "mLSTMBlock",
                    disabled_by=_disabled(context),
                )


def _subclass(statement: ast.If, base: str) -> str | None:
    """The class that is derived from the import, in the same branch."""
    for node in walk(statement):
        if isinstance(node, ast.ClassDef) and any(isinstance(b, ast.Name) and b.id == base for b in node.bases):
            return node.name
    return None


def _disabled(context: Context) -> str:
    """The default configuration selects the native PyTorch kernels, with the package as well as without it."""
    value = context.setting(_SETTING)
    return f"{_SETTING}={value}" if isinstance(value, str) and "native" in value else ""
