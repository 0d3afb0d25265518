"""transformers 4.57: rwkv, mra, yoso and deta compile a CUDA extension from source when they are built."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kernelguard.declare.mechanisms import Context
from kernelguard.declare.source import ParsedModule, memo_of
from kernelguard.declare.values import FastPath

NAME = "compiled_extension"
MARKERS: tuple[str, ...] = ()
_IMPORT = re.compile(r"^\s*from torch\.utils\.cpp_extension import", re.MULTILINE)


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """No fast path, because nothing is installed for it; but whether a compiler is there decides, so it is unknown."""
    for line in memo_of(module, NAME, lambda: _lines(module)):
        inside = [n for n, d in module.definitions.items() if d.lineno <= line <= (d.end_lineno or 0)]
        if not inside or inside[0] in context.reached:
            context.unknowns.append(
                f"{module.file}:{line} compiles a CUDA extension when the model is built; whether it can is not known."
            )
    return ()


def _lines(module: ParsedModule) -> list[int]:
    return [module.text.count("\n", 0, match.end()) + 1 for match in _IMPORT.finditer(module.text)]
