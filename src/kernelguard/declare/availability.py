"""What does an `is_*_available()` helper of this transformers ask for? Read from utils/import_utils.py."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from kernelguard.declare.source import Source, called, dotted, literal, walk

_FILE = "utils/import_utils.py"
_GPU_CALLS = ("torch.cuda.is_available", "torch.xpu.is_available", "torch.npu.is_available", "torch.mlu.is_available")


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """One helper."""

    name: str
    exists: bool
    needs_gpu: bool = False
    """It says False where no GPU is visible."""
    packages: tuple[str, ...] = ()
    """The import names it looks for."""


def read_availability(source: Source, name: str) -> Availability:
    """Follows one helper and the helpers it calls."""
    todo, seen = [name], set[str]()
    needs_gpu = False
    packages: list[str] = []
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        node = source.fragment(_FILE, current)
        if not isinstance(node, ast.FunctionDef):
            if current == name and not isinstance(node, (ast.Assign, ast.AnnAssign)):
                return Availability(name=name, exists=False)
            continue
        for inner in walk(node):
            if isinstance(inner, ast.Call):
                needs_gpu |= dotted(inner.func) in _GPU_CALLS
                function = called(inner) or ""
                if function == "_is_package_available" and inner.args:
                    package = literal(inner.args[0])
                    if isinstance(package, str):
                        packages.append(package)
                elif isinstance(inner.func, ast.Name) and function.startswith(("is_", "_is_")):
                    todo.append(function)
            elif isinstance(inner, ast.Import):
                packages += [alias.name for alias in inner.names if alias.name not in {"torch", "importlib"}]
    return Availability(name=name, exists=True, needs_gpu=needs_gpu, packages=tuple(dict.fromkeys(packages)))
