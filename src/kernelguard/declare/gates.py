"""Does a flag over several kernels decide which path runs? `is_fast_path_available` and its like."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from kernelguard.declare.mechanisms import Context
from kernelguard.declare.notices import messages
from kernelguard.declare.source import ParsedModule, called, dotted, loaded_names, simple_assignments, walk
from kernelguard.declare.values import FallbackNotice, Gate

MARKER = "is_fast_path_available"
_COMPILE_TESTS = frozenset({"is_torchdynamo_compiling", "is_compiling", "is_dynamo_compiling", "is_tracing"})
_BUILDERS = frozenset({"__init__"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGate:
    """A gate, what it logs, and what else the code around it says."""

    gate: Gate
    notices: tuple[FallbackNotice, ...]
    raises: bool
    """The forward refuses to run when the gate is shut."""
    switch: str | None
    """A config attribute that must be true as well, `use_mamba_kernels`."""
    slow_method: str | None
    """The method that runs when the gate is shut."""
    behind: frozenset[str]
    """Names that are used only in the method that runs when the gate is open."""


_ASSIGNED_ALL = re.compile(r"^\s*(\w+)\s*=\s*all\(", re.MULTILINE)


def find_gate(module: ParsedModule, context: Context, binding: str, owner: str | None) -> FoundGate | None:
    """The gate that `binding` (a name of the module) stands behind, as the class `owner` uses it."""
    if "gates" not in module.memo:
        module.memo["gates"] = _gates(module)
    for name, (members, is_global) in module.memo["gates"].items():
        if (name, owner) not in module.memo:
            module.memo[name, owner] = _describe(module, name, members, owner, is_global=is_global)
        found: FoundGate = module.memo[name, owner]
        context.consumed.add((name, 0))
        if binding in members or binding in found.behind:
            return found
    return None


def _gates(module: ParsedModule) -> dict[str, tuple[tuple[str, ...], bool]]:
    """Every name that is assigned `all((...))`: its members, and whether it is a global of the module."""
    found: dict[str, tuple[tuple[str, ...], bool]] = {}
    lines = [module.text.count("\n", 0, m.start(1)) + 1 for m in _ASSIGNED_ALL.finditer(module.text)]
    for name, value in module.assignments.items():
        if isinstance(value, ast.Call) and (members := _members(module, value)):
            found[name] = (members, True)
    for node in module.definitions.values():
        if not any(node.lineno <= line <= (node.end_lineno or 0) for line in lines):
            continue
        for function in (n for n in walk(node) if isinstance(n, ast.FunctionDef)):
            global_names = {n for s in walk(function) if isinstance(s, ast.Global) for n in s.names}
            for statement in walk(function):
                if isinstance(statement, ast.Assign):
                    for name, value in simple_assignments(statement):
                        members = _members(module, value)
                        if members and (name not in found or name in global_names):
                            found[name] = (members, name in global_names)
    return found


def _members(module: ParsedModule, value: ast.expr) -> tuple[str, ...]:
    if not (isinstance(value, ast.Call) and dotted(value.func) == "all" and len(value.args) == 1):
        return ()
    given: ast.expr | None = value.args[0]
    if isinstance(given, ast.Name):
        given = module.assignments.get(given.id)
    if not isinstance(given, (ast.Tuple, ast.List)) or not all(isinstance(e, ast.Name) for e in given.elts):
        return ()
    return tuple(e.id for e in given.elts if isinstance(e, ast.Name))


def _describe(
    module: ParsedModule, name: str, members: tuple[str, ...], owner: str | None, *, is_global: bool
) -> FoundGate:
    decides = needs_cuda = blocked = raises = False
    notices: list[FallbackNotice] = []
    switch = slow = None
    fast: frozenset[str] = frozenset()
    node = module.definitions.get(owner) if owner else None
    for function in _methods(node) if node is not None else ():
        when = "build" if function.name in _BUILDERS | _called_from_init(node) else "first call"
        for statement, outer in _ifs(function.body):
            if name not in set(loaded_names(statement.test)):
                continue
            found = tuple(messages(statement.body if _negates(statement.test, name) else [], when))
            notices += [n for n in found if n not in notices]
            if when == "build" or _only_talks(statement):
                continue
            decides = True
            text = ast.unparse(statement.test)
            needs_cuda |= "cuda" in text
            blocked |= any(called(c) in _COMPILE_TESTS for c in walk(statement.test) if isinstance(c, ast.Call))
            raises |= any(isinstance(s, ast.Raise) for s in statement.body)
            fast |= _self_calls(statement.body)
            switch = switch or _switch([*outer, statement.test], node)
        if decides and when == "first call":
            slow = slow or _slow_method(function)
            # `if not gate: raise` stands before the fast call instead of around it.
            fast = (fast or _self_calls(function.body)) - {slow or ""}
            after = [s for s in function.body if isinstance(s, ast.If) and name not in set(loaded_names(s.test))]
            notices += [n for n in messages(after, when) if n.when == "packed call" and n not in notices]
    return FoundGate(
        gate=Gate(
            name=name,
            members=members,
            decides=decides,
            needs_cuda_tensors=needs_cuda,
            blocked_by_compile=blocked,
            module_global=is_global,
        ),
        notices=tuple(notices),
        raises=raises,
        switch=switch,
        slow_method=slow,
        behind=_only_in(node, fast) if decides else frozenset(),
    )


def _self_calls(body: list[ast.stmt]) -> frozenset[str]:
    """The methods that some statements return the result of."""
    found = set()
    for statement in body:
        for inner in walk(statement):
            if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Call):
                path = dotted(inner.value.func) or ""
                if path.startswith("self.") and path.count(".") == 1:
                    found.add(path.removeprefix("self."))
    return frozenset(found)


def _only_in(node: ast.AST | None, methods: frozenset[str]) -> frozenset[str]:
    """The names that these methods load and no other method except `__init__` does."""
    inside: set[str] = set()
    outside: set[str] = set()
    for method in _methods(node):
        if method.name not in _BUILDERS:
            (inside if method.name in methods else outside).update(loaded_names(method))
    return frozenset(inside - outside)


def _methods(node: ast.AST | None) -> Iterator[ast.FunctionDef]:
    if isinstance(node, ast.ClassDef):
        yield from (m for m in node.body if isinstance(m, ast.FunctionDef))


def _called_from_init(node: ast.AST | None) -> frozenset[str]:
    """Methods that `__init__` calls on self."""
    found = set()
    for method in _methods(node):
        if method.name in _BUILDERS:
            for call in (c for c in walk(method) if isinstance(c, ast.Call)):
                path = dotted(call.func) or ""
                if path.startswith("self.") and path.count(".") == 1:
                    found.add(path.removeprefix("self."))
    return frozenset(found)


def _ifs(body: list[ast.stmt], outer: tuple[ast.expr, ...] = ()) -> Iterator[tuple[ast.If, tuple[ast.expr, ...]]]:
    for statement in body:
        if isinstance(statement, ast.If):
            yield statement, outer
            yield from _ifs(statement.body, (*outer, statement.test))
            yield from _ifs(statement.orelse, outer)
        elif isinstance(statement, (ast.With, ast.For)):
            yield from _ifs(statement.body, outer)


def _negates(test: ast.expr, name: str) -> bool:
    """`not gate` stands somewhere in the test."""
    return any(
        isinstance(n, ast.UnaryOp)
        and isinstance(n.op, ast.Not)
        and isinstance(n.operand, ast.Name)
        and n.operand.id == name
        for n in walk(test)
    )


def _only_talks(statement: ast.If) -> bool:
    """Nothing but logging (and tests around it) depends on it."""
    return all(
        (isinstance(s, ast.If) and _only_talks(s))
        or (
            isinstance(s, ast.Expr)
            and isinstance(s.value, ast.Call)
            and (dotted(s.value.func) or "").startswith("logger.")
        )
        for s in (*statement.body, *statement.orelse)
    )


def _switch(tests: list[ast.expr], node: ast.AST | None) -> str | None:
    """The config attribute among the tests around a gate, also when the layer copied it to itself in __init__."""
    copied: dict[str, str] = {}
    for method in _methods(node):
        if method.name in _BUILDERS:
            for assign in (a for a in walk(method) if isinstance(a, ast.Assign)):
                target, value = dotted(assign.targets[0]) or "", dotted(assign.value) or ""
                if target.startswith("self.") and value.startswith("config."):
                    copied[target] = value
    for test in tests:
        for inner in walk(test):
            path = dotted(inner) or ""
            path = copied.get(path, path).removeprefix("self.")
            if path.startswith("config.") and path.count(".") == 1:
                return path.removeprefix("config.")
    return None


def _slow_method(function: ast.FunctionDef) -> str | None:
    """What the last `return self.<method>(...)` calls, else the method itself."""
    for statement in reversed(function.body):
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call):
            path = dotted(statement.value.func) or ""
            if path.startswith("self.") and path.count(".") == 1:
                return path.removeprefix("self.")
    return None
