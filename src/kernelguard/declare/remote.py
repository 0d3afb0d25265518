"""Does this checkpoint bring code of its own (`auto_map`), would transformers run it, and which files is it?

transformers runs that code only with `trust_remote_code=True`. Without it, a model_type that it knows gets the class
that it ships, and one that it does not know is refused (`resolve_trust_remote_code`, the same from 4.57 to 5.24).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelguard.declare.config import MAX_BYTES, shown
from kernelguard.declare.index import Index, TypeEntry
from kernelguard.declare.reach import Part, reach
from kernelguard.declare.source import REMOTE, ParsedModule, Source, module_level
from kernelguard.declare.values import ModelConfig, RemoteCode

_REFERENCE = re.compile(r"(?:(?P<repo>[^\s]+)--)?(?P<file>[\w/-]+)\.(?P<name>\w+)")
_IMPORT_UTILS = "utils/import_utils.py"


@dataclass(frozen=True, slots=True)
class Target:
    """One entry of `auto_map` that names a model class or its configuration."""

    auto: str
    """`AutoModelForCausalLM`."""
    text: str
    repo: str
    """The hub repository that holds the code; empty: the one of the checkpoint itself."""
    file: str
    name: str


def model_targets(raw: Mapping[str, Any]) -> tuple[Target, ...]:
    """The code that a configuration names for its model; tokenizers and processors hold no kernels."""
    auto_map = raw.get("auto_map")
    found = []
    for auto, text in auto_map.items() if isinstance(auto_map, dict) else ():
        if not (str(auto).startswith("AutoModel") or auto == "AutoConfig") or not isinstance(text, str):
            continue
        match = _REFERENCE.fullmatch(text)
        parts = ("", "", "") if match is None else (match["repo"] or "", f"{match['file']}.py", match["name"])
        found.append(Target(str(auto), text, *parts))
    return tuple(found)


def remote_code(config: ModelConfig, index: Index, *, trusted: bool | None) -> RemoteCode | None:
    """What `auto_map` means for a run; None: the configuration names no model code of its own."""
    targets = model_targets(config.raw)
    if not targets:
        return None
    known = index.entry(config.model_type) is not None
    autos = [t.auto for t in targets if t.auto != "AutoConfig"]
    # A known type without a class for any of these AutoModels can only be loaded with the checkpoint's own.
    shipped = known and (not autos or any(index.builds(auto, config.model_type) for auto in autos))
    return RemoteCode(
        targets=tuple(target.text for target in targets),
        runs=bool(trusted) or (not shipped and trusted is None),
        shipped=shipped,
        folder="" if config.folder is None else str(config.folder),
    )


class RemoteSource(Source):
    """The files of a transformers tree and, below `transformers_modules/`, those of a checkpoint's folder."""

    def __init__(self, source: Source, folder: Path) -> None:
        super().__init__(source.tree)
        self.folder = folder

    def text(self, file: str) -> str | None:
        """As in the base class; a file of the folder is never larger than a configuration may be."""
        if file.startswith(REMOTE):
            path = self.path(file)
            try:
                if path.is_file() and path.stat().st_size > MAX_BYTES:
                    self.problem(file, f"{file} has more than {MAX_BYTES // 2**20} MB, so it was not read.")
                    return None
            except OSError:
                return None  # a name that no file system takes
        return super().text(file)

    def path(self, file: str) -> Path:
        """Where a file lies."""
        return self.folder / file.removeprefix(REMOTE) if file.startswith(REMOTE) else super().path(file)

    def file_of(self, module: str) -> str | None:
        """Also the files of modules below `transformers_modules`."""
        top, _, rest = module.partition(".")
        if f"{top}/" != REMOTE:
            return super().file_of(module)
        base = rest.replace(".", "/")
        names = (f"{REMOTE}{base}.py", f"{REMOTE}{base}/__init__.py") if base else (f"{REMOTE}__init__.py",)
        return next((name for name in names if self.path(name).is_file()), None)


def remote_part(config: ModelConfig, source: RemoteSource, index: Index) -> tuple[Part, tuple[str, ...]]:
    """The code that the configuration's own classes reach, and why some of it could not be read."""
    unread: list[str] = []
    modules = {target: _module_of(target, source, unread) for target in model_targets(config.raw)}
    models = {target: module for target, module in modules.items() if target.auto != "AutoConfig"}
    if not models:
        unread.append("auto_map names a configuration and no model class.")
    # The training script chooses among the AutoModels; `architectures` says which one the checkpoint was saved from.
    chosen = {t: m for t, m in models.items() if t.name in config.architectures} or models
    roots = []
    for target, module in chosen.items():
        if module is None:
            continue
        if target.name in module.definitions or target.name in module.assignments or target.name in module.imports:
            roots.append((module, target.name))
        else:
            unread.append(f"{module.file} has no {target.name}, which auto_map names.")
    entry = index.entry(config.model_type) or TypeEntry(config.model_type, "", "")
    part = Part(sub=config.parts[0], entry=entry, roots=tuple(roots))
    loaded = _loaded([module for module in modules.values() if module is not None], source, unread)
    part.reached = {**dict.fromkeys(loaded, frozenset[str]()), **reach(source, part.roots)}
    return part, tuple(dict.fromkeys(unread))


def described(remote: RemoteCode, source: RemoteSource, part: Part, unread: tuple[str, ...]) -> RemoteCode:
    """With the files that were read, and what can already be said about them."""
    modules = [m for file in sorted(part.reached) if file.startswith(REMOTE) and (m := source.module(file)) is not None]
    gone = tuple(dict.fromkeys(text for module in modules for text in gone_names(module, source)))
    return replace(remote, files=tuple(m.file for m in modules) if part.roots else (), unread=unread, gone=gone)


def _module_of(target: Target, source: RemoteSource, unread: list[str]) -> ParsedModule | None:
    if target.repo:
        unread.append(f"{shown(target.text)} lies in the hub repository {shown(target.repo)}.")
        return None
    if not target.file or ".." in target.file or target.file.startswith("/"):
        unread.append(f"auto_map says {shown(target.text)!r}, which is not of the form file.Class.")
        return None
    file = f"{REMOTE}{target.file}"
    module = source.module(file)
    if module is None and source.text(file) is None and file not in source.problem_files():
        unread.append(f"{target.file} does not lie in {source.folder}.")
    return module


def _loaded(modules: list[ParsedModule], source: RemoteSource, unread: list[str]) -> tuple[str, ...]:
    """Every file of the checkpoint that is executed when these are imported; what is missing goes to `unread`."""
    files: dict[str, None] = {}
    todo = list(modules)
    while todo:
        module = todo.pop()
        if module.file in files:
            continue
        files[module.file] = None
        for local, imported in module.imports.items():
            if not f"{imported.module}.".startswith(REMOTE.replace("/", ".")):
                continue
            # `from . import layers` names a file, `from .layers import Layer` something in one.
            found = source.file_of(imported.module) or source.file_of(f"{imported.module}.{imported.name}")
            inner = source.module(found) if found is not None else None
            if inner is not None:
                todo.append(inner)
            elif found is None:
                where = f"{module.file}:{imported.line}"
                unread.append(f"{where} imports {local} from a file that does not lie in {source.folder}.")
    return tuple(files)


def required_imports(module: ParsedModule, source: Source) -> Iterator[tuple[str, int]]:
    """The packages without which transformers refuses to load a file of a checkpoint: (name, line).

    As `get_imports` of its dynamic_module_utils: every import, also inside a function, but for those in a `try` or
    behind an `is_x_available()`.
    """
    todo: list[ast.AST] = list(reversed(module.body))
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and _asks_availability(node.test, source)):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.partition(".")[0], node.lineno
        todo += reversed(list(ast.iter_child_nodes(node)))


def _asks_availability(test: ast.expr, source: Source) -> bool:
    """A call of a helper that transformers has, or of one that is named like flash attention's."""
    known = source.text(_IMPORT_UTILS) or ""
    names = [c.func.id for c in ast.walk(test) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)]
    return any(
        (name.startswith("is_flash_attn") and name.endswith("available"))
        or re.search(rf"^def {name}\b", known, re.MULTILINE)
        for name in names
    )


def gone_names(module: ParsedModule, source: Source) -> Iterator[str]:
    """Names that the file imports from transformers and that this transformers has nowhere: loading it raises."""
    for statement, guarded in module_level(module.body):
        if guarded or not isinstance(statement, ast.ImportFrom) or statement.level:
            continue
        top, _, rest = (statement.module or "").partition(".")
        if top != "transformers":
            continue
        for alias in statement.names:
            if alias.name != "*" and not _exists(source, rest, alias.name):
                yield (
                    f"{module.file}:{statement.lineno} imports {alias.name} from {statement.module}, "
                    f"which transformers {source.tree.version} does not have"
                )


def _exists(source: Source, inside: str, name: str) -> bool:
    """Whether a module of transformers has a name; anything that is not certain counts as there."""
    if not inside:
        return _anywhere(source, name)
    base = inside.replace(".", "/")
    if any((source.tree.root / base / f"{name}{end}").exists() for end in (".py", "/__init__.py")):
        return True
    file = source.file_of(f"transformers.{inside}")
    if file is None:
        return False
    text = source.text(file)
    # Also a name in a string or a comment counts: some of transformers' modules are filled from tables.
    star = text is not None and re.search(r"^\s*from \S+ import \*|define_import_structure", text, re.MULTILINE)
    return text is None or bool(star) or re.search(rf"\b{re.escape(name)}\b", text) is not None


def _anywhere(source: Source, name: str) -> bool:
    """The package root serves names out of all its modules; which ones is written in tables all over the tree."""
    words = [text.encode() for text in (f'"{name}"', f"'{name}'", f"class {name}", f"def {name}", f"\n{name} = ")]
    root = source.tree.root
    for path in (root / "__init__.py", *sorted(root.rglob("*.py"))):
        try:
            text = path.read_bytes()
        except OSError:
            return True
        if any(word in text for word in words):
            return True
    return (root / name).exists() or (root / f"{name}.py").exists()
