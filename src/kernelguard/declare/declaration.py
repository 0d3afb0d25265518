"""What does this configuration's code declare? Walks its parts, and asks every mechanism about every reached file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

from kernelguard.declare.choices import read_modes
from kernelguard.declare.follow import builds_without_kernels, follow
from kernelguard.declare.index import Index
from kernelguard.declare.mechanisms import Context, mechanisms
from kernelguard.declare.reach import Part, resolve_parts
from kernelguard.declare.reading import Reading
from kernelguard.declare.remote import RemoteSource, described, remote_code, remote_part
from kernelguard.declare.source import ParsedModule, Source, called, is_model_code, memo_of
from kernelguard.declare.values import Declaration, FastPath, LayerKind, ModelConfig, RemoteCode, TransformersTree
from kernelguard.matrix import KernelPackages, kernel_packages

# Known, and no fast path of this list: hub layers that a run asks for, expert implementations, and the old alias.
_OTHER_DECORATORS = frozenset(
    {"use_kernel_forward_from_hub", "use_kernel_func_from_hub", "use_kernelized_func", "use_experts_implementation"}
)


_IMPORT = re.compile(r"\s*(from|import)\s")
_ANY_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def declare(
    config: ModelConfig,
    tree: TransformersTree,
    *,
    leave_out: AbstractSet[str] = frozenset(),
    trusted: bool | None = False,
) -> Declaration:
    """Reads every fast path that the code of `config` can use in this transformers.

    `leave_out` names files of `choices/` that the run has no use for, such as what `use_kernels` would replace.
    `trusted`: the run sets trust_remote_code, so that code of the configuration's own comes before transformers' class;
    None: nobody said, so it does where there is no such class.

    Raises:
        InputError: This transformers does not know the configuration's model_type.
        UndeterminedError: It does not, but the configuration brings code of its own, which is not trusted.
    """
    return Reader(tree).declare(config, leave_out=leave_out, trusted=trusted)


class Reader:
    """Declares many models of one transformers tree, reading each file at most once."""

    def __init__(self, tree: TransformersTree) -> None:
        self.tree = tree
        self._source = Source(tree)
        self._index = Index(self._source)
        self._kernels = kernel_packages()

    @property
    def index(self) -> Index:
        """The model types of the tree."""
        return self._index

    def model_types(self) -> tuple[str, ...]:
        """Every model_type that this transformers knows, sorted."""
        return self._index.types()

    def declare(
        self, config: ModelConfig, *, leave_out: AbstractSet[str] = frozenset(), trusted: bool | None = False
    ) -> Declaration:
        """Like the function of the same name."""
        remote = remote_code(config, self._index, trusted=trusted)
        if remote is not None and remote.runs:
            return _declare_remote(config, remote, self._index, self._kernels)
        return replace(_declare(config, self.tree, self._index, self._kernels, leave_out), remote=remote)


def _declare(
    config: ModelConfig,
    tree: TransformersTree,
    index: Index,
    kernels: KernelPackages,
    leave_out: AbstractSet[str],
) -> Declaration:
    source = index.source
    unknowns: list[str] = []
    source.start()
    parts = resolve_parts(config, index, unknowns)
    paths, reached = _find_paths(parts, source, index, kernels, unknowns)
    if not paths and _has_markers(source, reached):
        # The code next door has kernels. Is it certain that this model's classes do not use them?
        reason = builds_without_kernels(index, parts)
        if reason is not None:
            unknowns.append(f"Whether this model uses the kernels of its file could not be told: {reason}.")
    kinds: tuple[LayerKind, ...] = ()
    if paths:
        unknowns += [
            f"No model class could be told for {part.entry.model_type}, so all of {part.whole_files[0].file} counts."
            for part in parts
            if part.whole_files
        ]
        followed = follow(index, kernels, parts, paths)
        paths, kinds = followed.fast_paths, followed.layer_kinds
        if followed.reason is not None:
            unknowns.append(f"How the model uses its kernels could not be followed: {followed.reason}.")
    reading = Reading(config=config, index=index, parts=parts, paths=paths, unknowns=unknowns)
    modes = read_modes(reading, leave_out=leave_out)
    unknowns += source.problems()
    # Where transformers has the class itself, `auto_map` is only followed with trust_remote_code=True.
    completed = replace(config, parts=tuple(part.sub for part in parts), remote_code=())
    return Declaration(
        config=completed,
        transformers=tree,
        fast_paths=paths,
        layer_kinds=kinds,
        unknowns=tuple(dict.fromkeys(unknowns)),
        modes=modes,
    )


def _find_paths(
    parts: Iterable[Part], source: Source, index: Index, kernels: KernelPackages, unknowns: list[str]
) -> tuple[tuple[FastPath, ...], dict[str, frozenset[str]]]:
    """The fast paths of every reached file, sorted, and the reached names by file."""
    found: dict[tuple[str, int, str, str], FastPath] = {}
    reached: dict[str, frozenset[str]] = {}
    consumed: dict[str, set[tuple[str, int]]] = {}
    # The outermost part first: a path that an inner part reaches as well belongs to the inner one.
    for part in parts:
        for file in sorted(part.reached):
            module = source.module(file)
            if module is None or not is_model_code(file):
                continue
            context = Context(
                source=source,
                index=index,
                kernels=kernels,
                model_type=part.sub.model_type,
                config=part.sub.raw,
                reached=part.reached[file],
                whole_file=bool(part.whole_files),
            )
            for mechanism in mechanisms():
                for path in mechanism.find(module, context):
                    found[path.file, path.line, path.symbol, path.mechanism] = path
            unknowns += context.unknowns
            reached[file] = reached.get(file, frozenset()) | part.reached[file]
            consumed.setdefault(file, set()).update(context.consumed)
    for file, names in reached.items():
        module = source.module(file)
        if module is not None:
            unknowns += unconsumed(module, names, consumed[file], kernels.keys())
            unknowns += unknown_decorators(module, names)
    return tuple(sorted(found.values(), key=lambda p: (p.file, p.line, p.symbol))), reached


def _declare_remote(config: ModelConfig, remote: RemoteCode, index: Index, kernels: KernelPackages) -> Declaration:
    """What the checkpoint's own code declares. It is read like transformers' own, but not followed layer by layer."""
    unread: tuple[str, ...] = (
        () if remote.folder else ("The configuration comes from the hub, and its code was not fetched.",)
    )
    unknowns: list[str] = []
    paths: tuple[FastPath, ...] = ()
    if config.folder is not None and remote.folder:
        source = RemoteSource(index.source, config.folder)
        source.start()
        part, unread = remote_part(config, source, index)
        paths, _ = _find_paths([part], source, index, kernels, unknowns)
        unread += tuple(source.problems())
        remote = described(remote, source, part, unread)
    else:
        remote = replace(remote, unread=unread)
    return Declaration(
        config=replace(config, remote_code=remote.targets),
        transformers=index.source.tree,
        fast_paths=paths,
        unknowns=tuple(dict.fromkeys(unknowns)),
        remote=remote,
    )


def _has_markers(source: Source, files: Iterable[str]) -> bool:
    markers = [marker for mechanism in mechanisms() for marker in mechanism.MARKERS]
    texts = [source.text(file) or "" for file in files]
    return any(marker in text for marker in markers for text in texts)


def unknown_decorators(module: ParsedModule, reached: AbstractSet[str]) -> Iterator[str]:
    """Decorators of transformers' own kernel integrations that no mechanism of this kernelguard knows."""
    known = {name for mechanism in mechanisms() for name in mechanism.MARKERS} | _OTHER_DECORATORS
    for name, node in module.definitions.items():
        for decorator in node.decorator_list if name in reached else ():
            imported = module.imports.get(called(decorator) or "")
            if imported is None or not imported.module.startswith("transformers.integrations"):
                continue
            if imported.name not in known:
                yield f"{module.file}:{decorator.lineno}: the decorator {imported.name} is not known here."


def unconsumed(
    module: ParsedModule,
    reached: frozenset[str],
    consumed: AbstractSet[tuple[str, int]],
    packages: AbstractSet[str],
) -> Iterator[str]:
    """What looks like a fast path in reached code, but was understood by no mechanism."""
    marked = memo_of(module, "marked", lambda: list(_marked(module)))
    imported = memo_of(module, "imported", lambda: list(_imported(module)))
    # A flag of the module that nothing reached asks for is another model's.
    others = {name for name in module.assignments if name not in reached}
    left = [(n, line) for n, line in marked if n not in others and not {(n, line), (n, 0)} & consumed]
    left_imports = [(n, line) for n, line in imported if n in packages and not {(n, line), (n, 0)} & consumed]
    if left or left_imports:
        lines = _reached_lines(module, reached)
        for name, line in left:
            if line in lines:
                yield f"{module.file}:{line} uses {name} in a way that is not understood here."
        for name, line in left_imports:
            if line in lines:
                yield f"{module.file}:{line} imports {name} in a way that is not understood here."


def _marked(module: ParsedModule) -> Iterator[tuple[str, int]]:
    """Every line that names a marker outside of imports and comments, aliases seen through."""
    markers = {marker for mechanism in mechanisms() for marker in mechanism.MARKERS if marker in module.text}
    aliases = {local: i.name for local, i in module.imports.items() if i.name in markers}
    lines = module.text.splitlines() if markers else []
    for local in sorted(markers | set(aliases)):
        for line in _lines_with(rf"\b{re.escape(local)}\b", module.text):
            is_import = any(line in span for span in module.import_lines) or _IMPORT.match(lines[line - 1])
            if not is_import:
                yield aliases.get(local) or local, line


def _imported(module: ParsedModule) -> Iterator[tuple[str, int]]:
    """The top-level name of every absolute import in the file, at any depth, with its line."""
    for match in _ANY_IMPORT.finditer(module.text):
        yield match.group(1), module.text.count("\n", 0, match.start(1)) + 1


def _lines_with(pattern: str, text: str) -> Iterator[int]:
    """The numbers of the lines on which a pattern matches, comments left out."""
    for match in re.finditer(pattern, text):
        start = text.rfind("\n", 0, match.start()) + 1
        if "#" not in text[start : match.start()]:
            yield text.count("\n", 0, match.start()) + 1


def _reached_lines(module: ParsedModule, reached: frozenset[str]) -> set[int]:
    """The lines of reached definitions, and those of the module level."""
    lines = set(range(1, module.text.count("\n") + 2))
    for name, node in module.definitions.items():
        if name not in reached:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            lines -= set(range(first, (node.end_lineno or node.lineno) + 1))
    return lines


__all__ = ["Reader", "declare"]
