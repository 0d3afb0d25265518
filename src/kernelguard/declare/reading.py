"""What do the choices look at? The resolved parts of a model, and the fast paths that were found in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from kernelguard.declare.index import Index
from kernelguard.declare.modes import KernelsWindow
from kernelguard.declare.reach import Part
from kernelguard.declare.source import ParsedModule, Source, is_model_code
from kernelguard.declare.values import FastPath, ModelConfig

_IMPORT_UTILS = "utils/import_utils.py"
_BOUND = r"^KERNELS_{}_VERSION\s*=\s*[\"']([^\"']+)[\"']"


@dataclass(slots=True, kw_only=True)
class Reading:
    """One model in one transformers tree, as far as it was read."""

    config: ModelConfig
    index: Index
    parts: list[Part]
    """The outermost first."""
    paths: tuple[FastPath, ...]
    unknowns: list[str] = field(default_factory=list)

    @property
    def source(self) -> Source:
        """The files of the tree."""
        return self.index.source

    def modules(self, part: Part) -> Iterator[tuple[ParsedModule, frozenset[str]]]:
        """The modeling files that a part reaches, with the reached names."""
        for file in sorted(part.reached):
            module = self.source.module(file)
            if module is not None and is_model_code(file):
                yield module, part.reached[file]

    def owner_of(self, module: ParsedModule, name: str) -> Part:
        """The innermost part that reaches a definition."""
        holders = [part for part in self.parts if name in part.reached.get(module.file, frozenset())]
        return holders[-1]

    def window(self) -> KernelsWindow:
        """The releases of `kernels` that this transformers accepts."""
        return kernels_window(self.source)


def kernels_window(source: Source) -> KernelsWindow:
    """Read from utils/import_utils.py; a bound that is not there is None."""
    text = source.text(_IMPORT_UTILS) or ""
    bounds: list[Version | None] = []
    for name in ("MIN", "MAX"):
        found = re.search(_BOUND.format(name), text, re.MULTILINE)
        try:
            bounds.append(Version(found.group(1)) if found else None)
        except InvalidVersion:
            bounds.append(None)
    return KernelsWindow(minimum=bounds[0], maximum=bounds[1])


def literal_text(value: object) -> str | None:
    """A value when it is a non-empty text."""
    return value if isinstance(value, str) and value else None


__all__ = ["Reading", "kernels_window", "literal_text"]
