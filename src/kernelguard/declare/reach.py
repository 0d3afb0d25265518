"""Which code can this configuration's classes reach? Roots of each part, and the names that follow from them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from kernelguard.declare.config import shown
from kernelguard.declare.index import Index, TypeEntry
from kernelguard.declare.known_types import first_version
from kernelguard.declare.source import ParsedModule, Source, dotted
from kernelguard.declare.values import ModelConfig, SubModel
from kernelguard.errors import InputError, KernelguardError, UndeterminedError

Root = tuple[ParsedModule, str]


@dataclass(slots=True, kw_only=True)
class Part:
    """One (nested) configuration, with the code that it brings in."""

    sub: SubModel
    entry: TypeEntry
    """Its type; for a nested config with a fixed class, that class."""
    roots: tuple[Root, ...] = ()
    whole_files: tuple[ParsedModule, ...] = ()
    """Used when no class could be told."""
    reached: dict[str, frozenset[str]] = field(default_factory=dict)
    """By file: the names of definitions and assignments that the roots can reach."""


def resolve_parts(config: ModelConfig, index: Index, unknowns: list[str]) -> list[Part]:
    """The parts of a configuration as this transformers will see them, defaults of missing nested ones included.

    Raises:
        InputError: This transformers does not know the top model_type.
        UndeterminedError: It does not, but the configuration brings code of its own.
    """
    entry = index.entry(config.model_type)
    if entry is None:
        raise unknown_type(config, index)
    found: dict[str, tuple[SubModel, TypeEntry]] = {"": (config.parts[0], entry)}
    _nested(index, "", found, unknowns)
    given = {part.path: part for part in config.parts}
    for path, sub in given.items():
        # A nested config that no class declares is read by code of its own; it counts when its type is known.
        known = index.entry(sub.model_type)
        if path not in found and known is not None:
            found[path] = (sub, known)
    parts = []
    for path in sorted(found, key=lambda p: (p.count(".") + bool(p), p)):
        sub, known = found[path]
        part = Part(sub=sub, entry=known)
        _find_roots(part, index, config.architectures if not path else ())
        part.reached = reach(index.source, part.roots, part.whole_files)
        parts.append(part)
    return parts


def _nested(
    index: Index, path: str, found: dict[str, tuple[SubModel, TypeEntry]], unknowns: list[str], depth: int = 0
) -> None:
    """Adds the nested configs that the class of the part at `path` declares."""
    sub, entry = found[path]
    if depth > 8:
        return
    for declared in index.sub_configs(entry):
        raw = sub.raw.get(declared.key, {})
        if raw is None and declared.optional:
            continue
        raw = raw if isinstance(raw, dict) else {}
        if sub.raw.get(declared.key) is None:
            raw = declared.defaults or {}
        model_type = declared.model_type
        if not declared.fixed and isinstance(raw.get("model_type"), str):
            model_type = raw["model_type"]
        elif not declared.fixed and model_type is None:
            model_type = index.coded_default(entry, declared.key)
        known = index.entry(model_type) if model_type is not None else None
        if declared.fixed and declared.entry is not None:
            known = declared.entry
        inner = f"{path}.{declared.key}" if path else declared.key
        if known is None and isinstance(raw.get("model_type"), str) and not declared.fixed:
            # AutoConfig would refuse it; a class that renames it first is not followed.
            unknowns.append(
                f"This transformers does not know the model_type {shown(raw['model_type'])!r} of {shown(inner)}."
            )
        if known is not None and inner not in found:
            found[inner] = (SubModel(path=inner, model_type=known.model_type, raw=raw), known)
            _nested(index, inner, found, unknowns, depth + 1)


def unknown_type(config: ModelConfig, index: Index) -> KernelguardError:
    """What to say about a model_type that this transformers does not know."""
    version = index.source.tree.version
    known_since = first_version(config.model_type)
    what = f"transformers {version} does not know the model_type {shown(config.model_type)!r} of {config.source}"
    if known_since is not None and known_since > version:
        return InputError(f"{what}; {known_since} does.", hint=f"pip install 'transformers>={known_since}'")
    if config.remote_code:
        return UndeterminedError(
            f"{what}: it comes with code of its own ({shown(config.remote_code[0])}), which was not read.",
            hint="it is only loaded with trust_remote_code=True; kernelguard check --trust-remote-code reads it",
        )
    near = index.nearest(config.model_type)
    return InputError(
        f"{what}.", hint=f"the closest that it knows is {near}" if near else "check the spelling of model_type"
    )


def _find_roots(part: Part, index: Index, architectures: tuple[str, ...]) -> None:
    """The classes to start from: those named in the file, else those that the auto mappings name."""
    entry = part.entry
    registered = index.entry(entry.model_type)
    auto = index.auto_classes(entry.model_type) if registered and registered.config_class == entry.config_class else ()
    names = [name for name in architectures if index.modeling_module(entry, name) is not None]
    # A nested model is built by any of the AutoModel classes, or directly by the outer model's code.
    names = names or list(auto)
    roots = [(module, name) for name in names if (module := index.modeling_module(entry, name)) is not None]
    part.roots = tuple(roots) or tuple(_classes_for_config(index, entry))
    if not part.roots:
        files = [module for file in index.modeling_files(entry) if (module := index.source.module(file)) is not None]
        if files and not part.sub.path:
            part.whole_files = tuple(files)


def _classes_for_config(index: Index, entry: TypeEntry) -> Iterator[Root]:
    """The model classes that say they take this configuration class: `config: XConfig` in the class or in __init__."""
    for file in index.modeling_files(entry):
        module = index.source.module(file)
        for node in module.classes() if module is not None else ():
            if _takes_config(node, entry.config_class) and module is not None:
                yield module, node.name


def _takes_config(node: ast.ClassDef, config_class: str) -> bool:
    is_model = any((dotted(base) or "").endswith("PreTrainedModel") for base in node.bases)
    for statement in node.body if is_model else ():
        if isinstance(statement, ast.AnnAssign) and dotted(statement.target) == "config":
            return dotted(statement.annotation) == config_class
        if isinstance(statement, ast.Assign) and dotted(statement.targets[0]) == "config_class":
            return dotted(statement.value) == config_class
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return any(
                a.arg == "config" and a.annotation is not None and dotted(a.annotation) == config_class
                for a in statement.args.args
            )
    return False


def reach(source: Source, roots: tuple[Root, ...], whole: tuple[ParsedModule, ...] = ()) -> dict[str, frozenset[str]]:
    """Every definition and assignment that can be reached from some classes, through imports of other models."""
    seen: dict[str, set[str]] = {}
    todo: list[Root] = [*roots, *((module, name) for module in whole for name in module.definitions)]
    while todo:
        module, name = todo.pop()
        found = source.resolve(module, name)
        if found is None:
            continue
        owner, real = found
        names = seen.setdefault(owner.file, set())
        if real not in names:
            names.add(real)
            todo += [(owner, used) for used in owner.names_used_by(real)]
    return {file: frozenset(names) for file, names in seen.items()}
