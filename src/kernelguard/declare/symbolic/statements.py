"""What do a function's statements do? Branches on unknown conditions are both taken, and joined."""

from __future__ import annotations

import ast
from abc import abstractmethod
from dataclasses import dataclass, field
from enum import Enum

from kernelguard.declare.source import ParsedModule
from kernelguard.declare.symbolic.values import (
    UNKNOWN,
    ClassValue,
    External,
    Function,
    GiveUpError,
    Instance,
    Seq,
    Table,
    Value,
    merge,
    truth,
)

MAX_TICKS = 400_000
"""Evaluated nodes before giving up; the largest published hybrid model needs a tenth."""
MAX_ITERATIONS = 20_000


class Flow(Enum):
    """How a block of statements ended."""

    NORMAL = 0
    RETURN = 1
    BREAK = 2
    CONTINUE = 3
    RAISE = 4


@dataclass(slots=True, eq=False)
class Frame:
    """One running function."""

    module: ParsedModule
    variables: dict[str, Value]
    owner: ClassValue | None = None
    """The class whose body the function stands in, for super()."""
    closure: dict[str, Value] | None = None
    global_names: set[str] = field(default_factory=set)
    returned: list[Value] = field(default_factory=list)
    pending: int = 0
    """Unknown exits so far: what follows may not be reached."""


class Statements:
    """The statement half of the machine."""

    def __init__(self) -> None:
        self.ticks = 0
        self.uncertain = 0
        """How many unknown conditions stand around what is running."""
        self.calling = False
        """Forwards are being followed, rather than constructors."""

    @abstractmethod
    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """The value of an expression."""

    @abstractmethod
    def assign_attribute(self, target: Value, name: str, value: Value) -> None:
        """`target.name = value`."""

    @abstractmethod
    def assign_global(self, module: ParsedModule, name: str, value: Value) -> None:
        """`global name; name = value`."""

    @abstractmethod
    def assign_item(self, target: Value, key: Value, value: Value) -> None:
        """`target[key] = value`."""

    @abstractmethod
    def iterate(self, value: Value) -> list[Value] | None:
        """The items of a value, None when they are not known."""

    @abstractmethod
    def shape(self, value: Value) -> object:
        """Equal for modules that run the same code in forward."""

    def tick(self) -> None:
        """Counts work, and gives up when it is too much."""
        self.ticks += 1
        if self.ticks > MAX_TICKS:
            raise GiveUpError("it takes too long to follow")

    def run_block(self, body: list[ast.stmt], frame: Frame) -> Flow:
        """Runs statements until one leaves the block."""
        for statement in body:
            self.tick()
            flow = self._run(statement, frame)
            if flow is not Flow.NORMAL:
                return flow
        return Flow.NORMAL

    def _run(self, node: ast.stmt, frame: Frame) -> Flow:
        if isinstance(node, ast.Expr):
            if not isinstance(node.value, ast.Constant):
                self.evaluate(node.value, frame)
        elif isinstance(node, ast.Assign):
            value = self.evaluate(node.value, frame)
            for target in node.targets:
                self.assign(target, value, frame)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self.assign(node.target, self.evaluate(node.value, frame), frame)
        elif isinstance(node, ast.If):
            return self._branch(self.evaluate(node.test, frame), node.body, node.orelse, frame)
        elif isinstance(node, ast.Return):
            frame.returned.append(None if node.value is None else self.evaluate(node.value, frame))
            return Flow.RETURN
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            return self._loop(node, frame)
        elif isinstance(node, ast.While):
            return self._while(node, frame)
        elif isinstance(node, ast.Raise):
            return Flow.RAISE
        elif isinstance(node, ast.Break):
            return Flow.BREAK
        elif isinstance(node, ast.Continue):
            return Flow.CONTINUE
        else:
            return self._run_rare(node, frame)
        return Flow.NORMAL

    def _run_rare(self, node: ast.stmt, frame: Frame) -> Flow:
        if isinstance(node, ast.AugAssign):
            value = self.evaluate(ast.BinOp(left=_loaded(node.target), op=node.op, right=node.value), frame)
            self.assign(node.target, value, frame)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self.evaluate(item.context_expr, frame)
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, UNKNOWN, frame)
            return self.run_block(node.body, frame)
        elif isinstance(node, ast.Try):
            return self._try(node, frame)
        elif isinstance(node, ast.FunctionDef):
            frame.variables[node.name] = Function(
                frame.module, node, closure={**(frame.closure or {}), **frame.variables}
            )
        elif isinstance(node, ast.Global):
            frame.global_names.update(node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                base = (node.module or "") + "." if isinstance(node, ast.ImportFrom) else ""
                frame.variables[alias.asname or alias.name.split(".")[0]] = External(base + alias.name)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    frame.variables.pop(target.id, None)
                elif not isinstance(target, ast.Attribute):
                    raise GiveUpError("something is deleted from a container")
        elif not isinstance(node, (ast.Pass, ast.Assert)):
            raise GiveUpError(f"a {type(node).__name__} statement")
        return Flow.NORMAL

    def assign(self, target: ast.expr, value: Value, frame: Frame) -> None:
        """Binds a target, tuples taken apart."""
        if isinstance(target, ast.Name):
            if target.id in frame.global_names:
                self.assign_global(frame.module, target.id, value)
            else:
                frame.variables[target.id] = value
        elif isinstance(target, ast.Attribute):
            self.assign_attribute(self.evaluate(target.value, frame), target.attr, value)
        elif isinstance(target, ast.Subscript):
            self.assign_item(self.evaluate(target.value, frame), self.evaluate(target.slice, frame), value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            items = self.iterate(value)
            starred = any(isinstance(element, ast.Starred) for element in target.elts)
            if items is None or starred or len(items) != len(target.elts):
                items = [UNKNOWN] * len(target.elts)
            for element, item in zip(target.elts, items, strict=True):
                self.assign(element.value if isinstance(element, ast.Starred) else element, item, frame)
        else:
            raise GiveUpError(f"an assignment to a {type(target).__name__}")

    def _branch(self, condition: Value, body: list[ast.stmt], orelse: list[ast.stmt], frame: Frame) -> Flow:
        known = truth(condition)
        if known is not None:
            return self.run_block(body if known else orelse, frame)
        before = dict(frame.variables)
        containers = _containers(before)
        start = [c.snapshot() for c in containers]
        self.uncertain += 1
        first = self.run_block(body, frame)
        after_first, states = frame.variables, [c.snapshot() for c in containers]
        for container, state in zip(containers, start, strict=True):
            container.restore(state)
        frame.variables = dict(before)
        second = self.run_block(orelse, frame)
        self.uncertain -= 1
        if first is Flow.NORMAL and second is Flow.NORMAL:
            for container, state in zip(containers, states, strict=True):
                container.join(state, container.snapshot())
            frame.variables = _joined(after_first, frame.variables)
            return Flow.NORMAL
        if first is Flow.NORMAL:
            frame.variables = after_first
            for container, state in zip(containers, states, strict=True):
                container.restore(state)
        if Flow.NORMAL in {first, second}:
            # One branch leaves; what follows is the other branch's, and certain only if the leaving one raises.
            if Flow.RAISE not in {first, second}:
                frame.pending += 1
                self.uncertain += 1
            return Flow.NORMAL
        ends = {first, second} - {Flow.RAISE}
        if len(ends) > 1:
            raise GiveUpError("two branches of an unknown condition leave in different ways")
        return ends.pop() if ends else Flow.RAISE

    def _loop(self, node: ast.For | ast.AsyncFor, frame: Frame) -> Flow:
        value = self.evaluate(node.iter, frame)
        items = self.iterate(value)
        if items is None or (isinstance(value, Seq) and value.vague):
            return self._unknown_loop(node.body, frame, node.target, items)
        if len(items) > MAX_ITERATIONS:
            raise GiveUpError("a loop is too long")
        seen: set[object] = set()
        for item in items:
            if self.calling:
                # Layers of the same kind run the same code: one of each kind is enough.
                shape = self.shape(item)
                if shape is not None and shape in seen:
                    continue
                seen.add(shape)
            self.tick()
            self.assign(node.target, item, frame)
            flow = self.run_block(node.body, frame)
            if flow is Flow.BREAK:
                return Flow.NORMAL
            if flow in {Flow.RETURN, Flow.RAISE}:
                return flow
        return self.run_block(node.orelse, frame)

    def _unknown_loop(
        self, body: list[ast.stmt], frame: Frame, target: ast.expr | None = None, items: list[Value] | None = None
    ) -> Flow:
        """A loop that runs an unknown number of times: once for certain knowledge, then whatever it touched is open."""
        before = dict(frame.variables)
        containers = _containers(before)
        start = [c.snapshot() for c in containers]
        self.uncertain += 1
        for item in items or [UNKNOWN]:
            if target is not None:
                self.assign(target, item, frame)
            flow = self.run_block(body, frame)
            if flow is Flow.RETURN:
                frame.pending += 1
                self.uncertain += 1
        self.uncertain -= 1
        for container, state in zip(containers, start, strict=True):
            container.join(state, container.snapshot())
        for name, value in frame.variables.items():
            if name not in before or merge(value, before[name]) is not before[name]:
                frame.variables[name] = merge(value, before.get(name, UNKNOWN))
        return Flow.NORMAL

    def _while(self, node: ast.While, frame: Frame) -> Flow:
        for _ in range(MAX_ITERATIONS):
            known = truth(self.evaluate(node.test, frame))
            if known is None:
                return self._unknown_loop(node.body, frame)
            if not known:
                return self.run_block(node.orelse, frame)
            flow = self.run_block(node.body, frame)
            if flow is Flow.BREAK:
                return Flow.NORMAL
            if flow in {Flow.RETURN, Flow.RAISE}:
                return flow
        raise GiveUpError("a loop does not end")

    def _try(self, node: ast.Try, frame: Frame) -> Flow:
        # Nothing is known about what raises: the body is taken to succeed, the handlers may run as well.
        flow = self.run_block(node.body, frame)
        if flow is Flow.NORMAL:
            flow = self.run_block(node.orelse, frame)
        for handler in node.handlers:
            if flow is Flow.RAISE:
                flow = self.run_block(handler.body, frame)
            else:
                self._branch(UNKNOWN, handler.body, [], frame)
        final = self.run_block(node.finalbody, frame)
        return final if final is not Flow.NORMAL else flow


def _loaded(target: ast.expr) -> ast.expr:
    """The same place, read."""
    if isinstance(target, ast.Name):
        return ast.copy_location(ast.Name(id=target.id, ctx=ast.Load()), target)
    return target


def _containers(variables: dict[str, Value]) -> list[Seq | Table]:
    """The lists and dicts that local names stand for, each once."""
    found = {id(value): value for value in variables.values() if isinstance(value, (Seq, Table))}
    for value in variables.values():
        if isinstance(value, Instance):
            found.update({id(v): v for v in value.attributes.values() if isinstance(v, (Seq, Table))})
    return list(found.values())


def _joined(one: dict[str, Value], other: dict[str, Value]) -> dict[str, Value]:
    result = {}
    for name in (*one, *(n for n in other if n not in one)):
        result[name] = merge(one[name], other[name]) if name in one and name in other else UNKNOWN
    return result
