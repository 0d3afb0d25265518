"""Kernels that are only called in training while there is no cache: Mamba-2's fused split, Mamba's inner function."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.modes import CacheSplit
from kernelguard.declare.reading import Reading
from kernelguard.declare.source import dotted, walk

NAME = "cache_split"


def modes(reading: Reading) -> Iterable[CacheSplit]:
    """One value for each kernel behind `if self.training and cache is None`."""
    for path in reading.paths:
        module = reading.source.module(path.file)
        if module is None or "self.training and" not in module.text:
            continue
        for node in module.classes():
            reached = any(node.name in part.reached.get(path.file, ()) for part in reading.parts)
            if reached and path.binding.name in module.names_used_by(node.name):
                for line in _lines(node, path.binding.name):
                    yield CacheSplit(
                        symbol=path.symbol, model_type=path.model_type, owner=node.name, file=path.file, line=line
                    )


def _lines(node: ast.ClassDef, name: str) -> Iterator[int]:
    everywhere = _calls(node, name)
    for inner in walk(node):
        if isinstance(inner, ast.If) and _needs_no_cache(inner.test):
            behind = {call for statement in inner.body for call in _calls(statement, name)}
            if behind and behind == everywhere:
                yield inner.lineno


def _calls(node: ast.AST, name: str) -> set[ast.Call]:
    return {call for call in walk(node) if isinstance(call, ast.Call) and dotted(call.func) == name}


def _needs_no_cache(test: ast.expr) -> bool:
    """`self.training and <something with cache in its name> is None`, in any order and with more."""
    if not isinstance(test, ast.BoolOp) or not isinstance(test.op, ast.And):
        return False
    training = any(dotted(value) == "self.training" for value in test.values)
    no_cache = any(
        isinstance(value, ast.Compare)
        and isinstance(value.ops[0], ast.Is)
        and any(word in (dotted(value.left) or "") for word in ("cache", "past_key_values"))
        for value in test.values
    )
    return training and no_cache
