"""Hub kernels that a layer fetches by itself with `get_kernel`: rwkv, yoso, mra and sam3_video."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.mechanisms import users_of
from kernelguard.declare.modes import HubLoad
from kernelguard.declare.notices import messages
from kernelguard.declare.reading import Reading
from kernelguard.declare.source import ParsedModule, called, literal, walk

NAME = "hub_loads"
_LOADER = "get_kernel"


def modes(reading: Reading) -> Iterable[HubLoad]:
    """One value for each module global that a reached function fills from the hub."""
    found: dict[tuple[str, int], HubLoad] = {}
    for part in reading.parts:
        for module, reached in reading.modules(part):
            if _LOADER in module.text:
                for load in _loads(module, reached, part.sub.model_type, reading):
                    found[load.file, load.line] = load
    yield from found.values()


def _loads(module: ParsedModule, reached: frozenset[str], model_type: str, reading: Reading) -> Iterator[HubLoad]:
    for name, node in module.definitions.items():
        if name not in reached or not isinstance(node, ast.FunctionDef):
            continue
        filled = {n for s in walk(node) if isinstance(s, ast.Global) for n in s.names}
        call = next((c for c in walk(node) if isinstance(c, ast.Call) and called(c) == _LOADER and c.args), None)
        repository = literal(call.args[0]) if call is not None else None
        if call is None or not filled or not isinstance(repository, str):
            continue
        if "causal-conv1d" in repository:
            continue  # a kernel with a package of its own: see lazy_function
        text, level = _around(module, name, reached)
        skips = "skipped" in ast.unparse(node)
        yield HubLoad(
            repository=repository,
            name=min(filled),
            model_type=model_type,
            file=module.file,
            line=call.lineno,
            window=reading.window(),
            needs_ninja="is_ninja_available" in text,
            level=level or _level(node.body),
            in_training="loss" not in name and not skips,
            effect="the post-processing is left out, so the result differs" if skips else "PyTorch code runs",
        )


def _around(module: ParsedModule, loader: str, reached: frozenset[str]) -> tuple[str, str | None]:
    """The test in front of the call of the loader, and the level at which its failure is logged there."""
    for owner in users_of(module, loader, reached):
        for node in walk(module.definitions[owner]):
            if not isinstance(node, ast.If):
                continue
            calls = {called(c) for s in node.body for c in walk(s) if isinstance(c, ast.Call)}
            if loader in calls:
                return ast.unparse(node.test), _level(node.body)
    return "", None


def _level(body: list[ast.stmt]) -> str | None:
    """The level of the first logging call inside an exception handler."""
    for statement in body:
        for node in walk(statement):
            if isinstance(node, ast.ExceptHandler):
                found = next((n for n in messages(node.body, "build")), None)
                if found is not None:
                    return found.level
    return None
