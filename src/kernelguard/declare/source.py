"""What does a source file say? Parsed modules of a transformers tree, and names followed through their imports."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kernelguard.declare.values import TransformersTree

T = TypeVar("T")
TopLevel = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
"""What a module-level name can be defined as; anything else is an assignment."""

# Bookkeeping in class bodies names classes that the class never builds.
_BOOKKEEPING_METHODS = frozenset({"_init_weights"})
_NEXT_TOP_LEVEL = re.compile(r"^[^\s)\]}#]", re.MULTILINE)
_BOOKKEEPING_ATTRIBUTES = frozenset({"config", "config_class", "base_model_prefix"})
REMOTE = "transformers_modules/"
"""Where the code that a checkpoint brings along stands, beside the files of transformers."""


@dataclass(frozen=True, slots=True)
class Imported:
    """One name that a module imports."""

    module: str
    """Dotted and absolute: `transformers.utils.import_utils`, `fla.ops`."""
    name: str | None
    """The name inside that module; None: the module itself."""
    line: int
    guarded: bool = False
    """Inside an `if`, `try` or function, so it may not happen."""


@dataclass(slots=True, eq=False)
class ParsedModule:
    """One parsed file, with what the other files of this room ask about it."""

    path: Path
    file: str
    """Relative to the transformers folder."""
    name: str
    """Dotted name."""
    text: str = field(repr=False)
    body: list[ast.stmt] = field(repr=False)
    definitions: dict[str, TopLevel] = field(default_factory=dict, repr=False)
    assignments: dict[str, ast.expr] = field(default_factory=dict, repr=False)
    """The last value that a module-level name is assigned outside `if` and `try`."""
    imports: dict[str, Imported] = field(default_factory=dict, repr=False)
    import_lines: list[range] = field(default_factory=list, repr=False)
    """The lines of each module-level import statement."""
    memo: dict[object, Any] = field(default_factory=dict, repr=False)
    """For what is worked out once per module; keys are the caller's own."""
    _names: dict[str, frozenset[str]] = field(default_factory=dict, repr=False)

    def classes(self) -> Iterator[ast.ClassDef]:
        """Every module-level class."""
        for node in self.definitions.values():
            if isinstance(node, ast.ClassDef):
                yield node

    def names_used_by(self, name: str) -> frozenset[str]:
        """The names that one module-level definition or assignment loads."""
        if name not in self._names:
            node = self.definitions.get(name)
            if node is not None:
                used = _names_of_definition(node)
            else:
                value = self.assignments.get(name)
                used = frozenset() if value is None else frozenset(loaded_names(value))
            self._names[name] = used
        return self._names[name]


def memo_of(module: ParsedModule, key: str, make: Callable[[], T]) -> T:
    """What `make` says about a module, worked out once."""
    if key not in module.memo:
        module.memo[key] = make()
    found: T = module.memo[key]
    return found


_NO_NODES = frozenset(
    {"ctx", "op", "ops", "id", "attr", "arg", "asname", "level", "module", "rest", "kwd_attrs", "type_comment", "kind"}
    | {"is_async", "conversion", "simple", "tag"}
)


class _Fields(dict[type, tuple[str, ...]]):
    """For each class of nodes: the fields that can hold nodes. Operators and contexts are left out."""

    def __missing__(self, cls: type[ast.AST]) -> tuple[str, ...]:
        if cls in {ast.Constant, ast.Name, ast.Global, ast.Nonlocal, ast.MatchSingleton, ast.alias, ast.Pass}:
            fields: tuple[str, ...] = ()
        elif cls is ast.arg:
            fields = ("annotation",)
        else:
            named = cls.__name__ == "TypeAlias"  # elsewhere a name is text
            fields = tuple(f for f in cls._fields if f not in _NO_NODES and (f != "name" or named))
        self[cls] = fields
        return fields


_FIELDS = _Fields()


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, in no particular order and at a quarter of its cost: this room's time is spent here.

    Nodes for operators and contexts (`ast.Add`, `ast.Load`) are left out.
    """
    todo: list[ast.AST | None] = [node]
    while todo:
        current = todo.pop()
        if current is None:
            continue
        yield current
        for field_name in _FIELDS[current.__class__]:
            value = getattr(current, field_name)
            if value.__class__ is list:
                todo += value
            else:
                todo.append(value)


def loaded_names(*nodes: ast.AST) -> set[str]:
    """Every bare name that is read somewhere below some nodes."""
    # The same loop as in `walk`, written out: most of a survey's own time goes by in it.
    names = set()
    todo: list[ast.AST | None] = list(nodes)
    while todo:
        current = todo.pop()
        if current.__class__ is ast.Name:
            if current.ctx.__class__ is ast.Load:
                names.add(current.id)
        elif current is not None:
            for field_name in _FIELDS[current.__class__]:
                value = getattr(current, field_name)
                if value.__class__ is list:
                    todo += value
                else:
                    todo.append(value)
    return names


def _names_of_definition(node: TopLevel) -> frozenset[str]:
    if not isinstance(node, ast.ClassDef):
        return frozenset(loaded_names(node))
    parts: list[ast.AST] = [*node.bases, *node.keywords, *node.decorator_list]
    for statement in node.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if statement.name not in _BOOKKEEPING_METHODS:
                parts.append(statement)
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
            is_bookkeeping = isinstance(target, ast.Name) and (
                target.id.startswith("_") or target.id in _BOOKKEEPING_ATTRIBUTES
            )
            if not is_bookkeeping and statement.value is not None:
                parts.append(statement.value)
    return frozenset(loaded_names(*parts))


def dotted(node: ast.AST) -> str | None:
    """`a.b.c` for a chain of attributes on a name, else None."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(node.id)
    return ".".join(reversed(parts))


def called(node: ast.AST) -> str | None:
    """The last name of what a call calls, or of a decorator without a call."""
    target = node.func if isinstance(node, ast.Call) else node
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else None


def literal(node: ast.AST | None) -> object:
    """The value of a literal, or `...` when it is not one (None is a literal)."""
    if node is None:
        return ...
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ...


def module_level(body: list[ast.stmt], *, guarded: bool = False) -> Iterator[tuple[ast.stmt, bool]]:
    """Every statement that runs when the module is imported, and whether an `if` or `try` stands around it."""
    for statement in body:
        yield statement, guarded
        if isinstance(statement, ast.If):
            yield from module_level(statement.body, guarded=True)
            yield from module_level(statement.orelse, guarded=True)
        elif isinstance(statement, ast.Try):
            for block in (statement.body, *(h.body for h in statement.handlers), statement.orelse, statement.finalbody):
                yield from module_level(block, guarded=True)
        elif isinstance(statement, ast.With):
            yield from module_level(statement.body, guarded=guarded)


def absolute(module: str, node: ast.ImportFrom, *, is_package: bool = False) -> str:
    """The absolute dotted module of a `from ... import` inside `module`."""
    if node.level == 0:
        return node.module or ""
    base = module.split(".")
    base = base[: len(base) - node.level + (1 if is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def imported_names(module: str, node: ast.stmt, *, guarded: bool) -> Iterator[tuple[str, Imported]]:
    """The local names that one import statement binds."""
    if isinstance(node, ast.ImportFrom):
        source = absolute(module, node)
        for alias in node.names:
            yield alias.asname or alias.name, Imported(source, alias.name, node.lineno, guarded)
    elif isinstance(node, ast.Import):
        for alias in node.names:
            local = alias.asname or alias.name.split(".")[0]
            target = alias.name if alias.asname else alias.name.split(".")[0]
            yield local, Imported(target, None, node.lineno, guarded)


class Source:
    """Reads and parses files of one transformers tree, each at most once."""

    def __init__(self, tree: TransformersTree) -> None:
        self.tree = tree
        self._problems: dict[str, str] = {}
        self._touched: set[str] = set()
        self._texts: dict[str, str | None] = {}
        self._modules: dict[str, ParsedModule | None] = {}
        self._fragments: dict[tuple[str, str], ast.stmt | None] = {}
        self.memo: dict[object, Any] = {}
        """For what is worked out once per tree; keys are the caller's own."""

    def start(self) -> None:
        """From here on, `problems` tells about the files that are asked for from now on."""
        self._touched.clear()

    def problems(self) -> list[str]:
        """Files asked for that could not be read or parsed, one sentence each."""
        return [self._problems[file] for file in sorted(self._touched & set(self._problems))]

    def problem_files(self) -> frozenset[str]:
        """The files that are there and could not be read or parsed."""
        return frozenset(self._problems)

    def problem(self, file: str, text: str) -> None:
        """Notes why a file could not be read."""
        self._touched.add(file)
        self._problems[file] = text

    def path(self, file: str) -> Path:
        """Where a file of this source lies."""
        return self.tree.root / file

    def text(self, file: str) -> str | None:
        """A file's text, or None when there is no such file."""
        self._touched.add(file)
        if file not in self._texts:
            try:
                self._texts[file] = self.path(file).read_text(encoding="utf-8")
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._texts[file] = None
            except (OSError, UnicodeDecodeError) as error:
                self._problems[file] = f"{file} could not be read: {error}."
                self._texts[file] = None
        return self._texts[file]

    def fragment(self, file: str, name: str) -> ast.stmt | None:
        """One module-level `def`, `class` or assignment of a file, without parsing the rest of it."""
        if (file, name) not in self._fragments:
            self._fragments[file, name] = self._fragment(file, name)
        return self._fragments[file, name]

    def _fragment(self, file: str, name: str) -> ast.stmt | None:
        text = self.text(file)
        if text is None:
            return None
        start = re.search(
            rf"^(?:(?:async )?def|class) {re.escape(name)}\b|^{re.escape(name)}\b[^\n]*=", text, re.MULTILINE
        )
        if start is None:
            return None
        end = _NEXT_TOP_LEVEL.search(text, text.find("\n", start.start()) + 1)
        piece = text[start.start() : end.start() if end else len(text)]
        try:
            node = ast.parse(piece).body[0]
        except (SyntaxError, ValueError, RecursionError):
            # A string that starts in the first column ends the piece too early: parse the whole file then.
            whole = self.module(file)
            return next((s for s in whole.body if _defines(s, name)), None) if whole else None
        ast.increment_lineno(node, text.count("\n", 0, start.start()))
        return node

    def module(self, file: str) -> ParsedModule | None:
        """A parsed file, or None when it is missing or not Python (then a problem is noted)."""
        self._touched.add(file)
        if file not in self._modules:
            self._modules[file] = self._parse(file)
        return self._modules[file]

    def file_of(self, module: str) -> str | None:
        """The file of a dotted transformers module, if it is one."""
        top, _, rest = module.partition(".")
        if top != "transformers" or not rest:
            return None
        base = rest.replace(".", "/")
        for file in (f"{base}.py", f"{base}/__init__.py"):
            if (self.tree.root / file).is_file():
                return file
        return None

    def resolve(self, module: ParsedModule, name: str) -> tuple[ParsedModule, str] | None:
        """Where `name`, as seen in `module`, is defined; only modeling and configuration files are followed."""
        for _ in range(8):
            if name in module.definitions or name in module.assignments:
                return module, name
            imported = module.imports.get(name)
            if imported is None or imported.name is None:
                return None
            if not _is_followed(imported.module):
                return None
            file = self.file_of(imported.module)
            target = self.module(file) if file else None
            if target is None:
                return None
            module, name = target, imported.name
        return None

    def _parse(self, file: str) -> ParsedModule | None:
        text = self.text(file)
        if text is None:
            return None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about escapes in somebody's strings
                body = ast.parse(text, file).body
        except (SyntaxError, ValueError, RecursionError) as error:
            self._problems[file] = f"{file} is not Python that this interpreter can parse: {error}."
            return None
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        name = name if file.startswith(REMOTE) else f"transformers.{name}"
        module = ParsedModule(path=self.path(file), file=file, name=name, text=text, body=body)
        for statement, guarded in module_level(body):
            if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                module.definitions.setdefault(statement.name, statement)
            elif isinstance(statement, (ast.Import, ast.ImportFrom)):
                module.import_lines.append(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
                for local, imported in imported_names(name, statement, guarded=guarded):
                    module.imports.setdefault(local, imported)
            elif not guarded:
                for target, value in simple_assignments(statement):
                    module.assignments[target] = value
        return module


def is_model_code(file: str) -> bool:
    """Whether a file is asked for fast paths: modeling files, and whatever a checkpoint brings along."""
    return file.startswith(REMOTE) or ("/auto/" not in file and "modeling_" in file.rpartition("/")[2])


def _is_followed(module: str) -> bool:
    """Whether names that come from a module are looked up there."""
    if f"{module}.".startswith(REMOTE.replace("/", ".")):
        return True
    leaf = module.rpartition(".")[2]
    # What AutoModel builds is decided by a configuration, not by its own code.
    return leaf.startswith(("modeling_", "configuration_")) and ".models." in module and ".models.auto." not in module


def _defines(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return statement.name == name
    return any(target == name for target, _ in simple_assignments(statement))


def simple_assignments(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """`name = value` pairs of one statement; `a, b = x, y` is taken apart, anything else is left out."""
    if isinstance(statement, ast.AnnAssign):
        if isinstance(statement.target, ast.Name) and statement.value is not None:
            yield statement.target.id, statement.value
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            if isinstance(target, ast.Name):
                yield target.id, statement.value
            elif (
                isinstance(target, ast.Tuple)
                and isinstance(statement.value, ast.Tuple)
                and len(target.elts) == len(statement.value.elts)
            ):
                for element, value in zip(target.elts, statement.value.elts, strict=True):
                    if isinstance(element, ast.Name):
                        yield element.id, value
