"""Packages that a model refuses to run without: `requires_backends(self, ["natten"])`."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from kernelguard.declare.availability import read_availability
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.source import ParsedModule, called, literal, walk
from kernelguard.declare.values import BindingKind, BindingSite, FallbackNotice, FastPath, Phase, Requirement

NAME = "hard_requirement"
MARKERS: tuple[str, ...] = ()
# Only what computes on the GPU; data loading and tokenizing backends (vision, timm, scipy, ...) are no kernels.
_PACKAGES = frozenset({"natten", "detectron2"})
_DISTRIBUTIONS = {"detectron2": "detectron2 @ git+https://github.com/facebookresearch/detectron2"}


def find(module: ParsedModule, context: Context) -> Iterable[FastPath]:
    """One fast path for each guarded import of a package that a reached class requires."""
    required: dict[str, tuple[str, int]] = {}
    for name, node in module.definitions.items():
        if name in context.reached and "requires_backends" in module.names_used_by(name):
            for call in (c for c in walk(node) if isinstance(c, ast.Call) and called(c) == "requires_backends"):
                backends = literal(call.args[1]) if len(call.args) > 1 else None
                for backend in (
                    [backends] if isinstance(backends, str) else backends if isinstance(backends, list) else []
                ):
                    required.setdefault(str(backend), (name, call.lineno))
    for package in sorted(_PACKAGES & set(required)):
        owner, line = required[package]
        helper = read_availability(context.source, f"is_{package}_available")
        for local, imported in module.imports.items():
            if imported.module.split(".")[0] != package or imported.name is None:
                continue
            yield FastPath(
                symbol=imported.name,
                package=package,
                distribution=_DISTRIBUTIONS.get(package, package),
                import_module=imported.module,
                mechanism=NAME,
                requirement=Requirement.HARD,
                phases=(Phase.TRAINING, Phase.DECODING),
                model_type=context.model_type,
                file=module.file,
                line=imported.line,
                binding=BindingSite(kind=BindingKind.GLOBAL, module=module.name, name=local, owner=owner),
                layers=None,
                fallback=f"nothing: {owner} refuses to be built",
                notices=(
                    FallbackNotice(
                        level="error", when="build", text=f"{owner} requires {package} ({module.file}:{line})"
                    ),
                ),
                availability_check=helper.name,
                availability_needs_gpu=helper.needs_gpu,
                availability_missing=not helper.exists,
            )
