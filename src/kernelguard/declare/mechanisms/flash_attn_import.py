"""ModernBERT up to 5.2 imports flash-attn itself; whether it is used is up to the attention implementation."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernelguard.declare.availability import read_availability
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.notices import SILENT
from kernelguard.declare.source import ParsedModule, called, walk
from kernelguard.declare.values import BindingKind, BindingSite, FastPath, Phase, Requirement

NAME = "flash_attn_import"
MARKERS: tuple[str, ...] = ()
_PACKAGE = "flash_attn"


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each guarded import from flash_attn in a modeling file."""
    for statement in module.body:
        if not isinstance(statement, ast.If):
            continue
        helpers = [n for n in (called(c) for c in walk(statement.test) if isinstance(c, ast.Call)) if n is not None]
        for node in statement.body:
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != _PACKAGE:
                continue
            context.consumed.add((_PACKAGE, node.lineno))
            helper = read_availability(context.source, helpers[0]) if helpers else None
            for alias in node.names:
                local = alias.asname or alias.name
                owners = context.users(module, local)
                yield FastPath(
                    symbol=alias.name,
                    package=_PACKAGE,
                    distribution=context.distribution(_PACKAGE),
                    import_module=node.module or _PACKAGE,
                    mechanism=NAME,
                    requirement=Requirement.OPT_IN,
                    phases=(Phase.TRAINING, Phase.DECODING),
                    model_type=context.model_type,
                    file=module.file,
                    line=node.lineno,
                    binding=BindingSite(
                        kind=BindingKind.GLOBAL, module=module.name, name=local, owner=owners[0] if owners else None
                    ),
                    layers=None,
                    fallback="the attention implementation that was chosen instead",
                    notices=(SILENT,),
                    availability_check=helper.name if helper is not None else None,
                    availability_needs_gpu=helper.needs_gpu if helper is not None else False,
                    disabled_by="attn_implementation, which chooses",
                )
