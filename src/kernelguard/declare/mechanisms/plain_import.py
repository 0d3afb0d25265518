"""Code of a checkpoint that imports a kernel package unguarded: transformers refuses to load it without the package."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.mechanisms import Context
from kernelguard.declare.remote import required_imports
from kernelguard.declare.source import REMOTE, ParsedModule, walk
from kernelguard.declare.values import BindingKind, BindingSite, FallbackNotice, FastPath, Phase, Requirement

NAME = "plain_import"
MARKERS: tuple[str, ...] = ()


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each name that is imported from a kernel package where nothing catches its absence."""
    if not module.file.startswith(REMOTE):
        return  # transformers' own files guard theirs
    needed = {line for package, line in required_imports(module, context.source) if package in context.kernels}
    needed -= {line for package, line in context.consumed if package in context.kernels}
    for node in (n for statement in module.body for n in walk(statement)) if needed else ():
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno in needed:
            for package, inside, symbol, local in _names(node):
                if package in context.kernels:
                    context.consumed.add((package, node.lineno))
                    yield _path(
                        module, context, node.lineno, package=package, inside=inside, symbol=symbol, local=local
                    )


def _names(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str, str, str]]:
    """Package, module, symbol and local name of each import; a module that is imported whole is its own symbol."""
    for alias in node.names:
        inside = alias.name if isinstance(node, ast.Import) else node.module or ""
        symbol = inside.rpartition(".")[2] if isinstance(node, ast.Import) else alias.name
        where = inside.rpartition(".")[0] or inside if isinstance(node, ast.Import) else inside
        yield inside.partition(".")[0], where, symbol, alias.asname or alias.name.partition(".")[0]


def _path(
    module: ParsedModule, context: Context, line: int, *, package: str, inside: str, symbol: str, local: str
) -> FastPath:
    known = context.kernels.symbol(package, symbol) is not None
    owners = context.users(module, local)
    return FastPath(
        symbol=symbol,
        package=package,
        distribution=context.distribution(package),
        import_module=inside,
        mechanism=NAME,
        requirement=Requirement.HARD,
        phases=context.phases(package, symbol) if known else (Phase.TRAINING, Phase.DECODING),
        model_type=context.model_type,
        file=module.file,
        line=line,
        binding=BindingSite(
            kind=BindingKind.GLOBAL, module=module.name, name=local, owner=owners[0] if owners else None
        ),
        layers=None,
        fallback="nothing: transformers refuses to load the checkpoint's code",
        notices=(
            FallbackNotice(
                level="error",
                when="import",
                text="This modeling file requires the following packages that were not found in your environment: "
                + package,
            ),
        ),
    )
