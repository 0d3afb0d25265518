"""What is an expression's value? Plain Python where everything is known, UNKNOWN where it is not."""

from __future__ import annotations

import ast
import operator
from abc import abstractmethod
from collections.abc import Callable

from kernelguard.declare.symbolic.statements import MAX_ITERATIONS, Frame, Statements
from kernelguard.declare.symbolic.values import (
    SIGNAL_NAMES,
    UNKNOWN,
    Arguments,
    Choice,
    External,
    Function,
    GiveUpError,
    Seq,
    Signal,
    Table,
    Value,
    is_known,
    merge,
    same_value,
    truth,
)

_MAX_SIZE = 200_000
_MAX_BITS = 4096
_BINARY: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Value], Value]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
_ORDER: dict[type[ast.cmpop], Callable[[Value, Value], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FAILURES = (TypeError, ValueError, ZeroDivisionError, OverflowError, KeyError, IndexError, AttributeError)


class Expressions(Statements):
    """The expression half of the machine."""

    @abstractmethod
    def lookup(self, name: str, frame: Frame) -> Value:
        """What a bare name stands for."""

    @abstractmethod
    def attribute(self, value: Value, name: str) -> Value:
        """`value.name`."""

    @abstractmethod
    def call(self, function: Value, arguments: Arguments, node: ast.Call | None = None) -> Value:
        """`function(...)`."""

    @abstractmethod
    def super_of(self, frame: Frame) -> Value:
        """`super()`."""

    @abstractmethod
    def item(self, value: Value, key: Value) -> Value:
        """`value[key]`."""

    def evaluate(self, node: ast.expr, frame: Frame) -> Value:
        """The value of an expression."""
        self.tick()
        if isinstance(node, ast.Name):
            return self.lookup(node.id, frame)
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Attribute):
            return self.attribute(self.evaluate(node.value, frame), node.attr)
        if isinstance(node, ast.Call):
            return self._call(node, frame)
        if isinstance(node, ast.Compare):
            return self._compare(node, frame)
        if isinstance(node, ast.BinOp):
            return binary(
                type(node.op), self.evaluate(node.left, frame), self.evaluate(node.right, frame), self.uncertain
            )
        if isinstance(node, ast.BoolOp):
            return self._boolean(node, frame)
        if isinstance(node, ast.UnaryOp):
            return self._unary(node, frame)
        if isinstance(node, ast.IfExp):
            return self._conditional(node, frame)
        if isinstance(node, ast.Subscript):
            return self.item(self.evaluate(node.value, frame), self.evaluate(node.slice, frame))
        return self._evaluate_rare(node, frame)

    def _evaluate_rare(self, node: ast.expr, frame: Frame) -> Value:
        if isinstance(node, ast.Tuple):
            return self._display(node.elts, frame, as_tuple=True)
        if isinstance(node, ast.List):
            return self._display(node.elts, frame, as_tuple=False)
        if isinstance(node, ast.Set):
            return as_set(self._display(node.elts, frame, as_tuple=True))
        if isinstance(node, ast.Dict):
            return self._dict(node, frame)
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
            items, vague = self._comprehension(node.generators, [node.elt], frame)
            made = Seq((pair[0] for pair in items), depth=self.uncertain, vague=vague)
            return as_set(made) if isinstance(node, ast.SetComp) else made
        if isinstance(node, ast.DictComp):
            items, vague = self._comprehension(node.generators, [node.key, node.value], frame)
            if not all(hashable(key) for key, _ in items):
                return UNKNOWN
            return Table(((k, v) for k, v in items), depth=self.uncertain, vague=vague)
        if isinstance(node, ast.NamedExpr):
            value = self.evaluate(node.value, frame)
            self.assign(node.target, value, frame)
            return value
        if isinstance(node, ast.JoinedStr):
            parts = [self.evaluate(part, frame) for part in node.values]
            return "".join(parts) if all(isinstance(part, str) for part in parts) else UNKNOWN
        if isinstance(node, ast.FormattedValue):
            value = self.evaluate(node.value, frame)
            plain = node.format_spec is None and node.conversion == -1 and isinstance(value, (str, int))
            return str(value) if plain else UNKNOWN
        if isinstance(node, ast.Lambda):
            return Function(frame.module, node, closure={**(frame.closure or {}), **frame.variables})
        if isinstance(node, ast.Slice):
            bounds = [None if b is None else self.evaluate(b, frame) for b in (node.lower, node.upper, node.step)]
            return slice(*bounds) if all(b is None or isinstance(b, int) for b in bounds) else UNKNOWN
        if isinstance(node, ast.Starred):
            return self.evaluate(node.value, frame)
        raise GiveUpError(f"a {type(node).__name__} expression")

    def _call(self, node: ast.Call, frame: Frame) -> Value:
        if isinstance(node.func, ast.Name) and node.func.id == "super" and "super" not in frame.variables:
            return self.super_of(frame)
        function = self.evaluate(node.func, frame)
        arguments = Arguments()
        for value in node.args:
            if isinstance(value, ast.Starred):
                items = self.iterate(self.evaluate(value.value, frame))
                arguments.vague_positional |= items is None
                arguments.positional += items or []
            else:
                arguments.positional.append(self.evaluate(value, frame))
        for keyword in node.keywords:
            value_ = self.evaluate(keyword.value, frame)
            if keyword.arg is not None:
                arguments.keywords[keyword.arg] = value_
            elif isinstance(value_, Table) and not value_.vague and not value_.open:
                arguments.keywords.update({k: v for k, v in value_.items() if isinstance(k, str)})
            elif isinstance(value_, Table) and arguments.rest is None:
                arguments.rest = value_.copied(self.uncertain)
            else:
                arguments.rest = Table(vague=True)
        return self.call(function, arguments, node)

    def _compare(self, node: ast.Compare, frame: Frame) -> Value:
        left = self.evaluate(node.left, frame)
        result: bool | None = True
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self.evaluate(right_node, frame)
            one = compare(type(op), left, right)
            if one is False:
                return False
            result = None if one is None or result is None else result
            left = right
        return UNKNOWN if result is None else result

    def _boolean(self, node: ast.BoolOp, frame: Frame) -> Value:
        stops = isinstance(node.op, ast.Or)
        value: Value = None
        unknown_before = 0
        for value_node in node.values:
            self.uncertain += unknown_before
            value = self.evaluate(value_node, frame)
            self.uncertain -= unknown_before
            known = truth(value)
            if known is stops:
                # `unknown and False` is False; `unknown or 3` is true, but which value it has is not known.
                return value if not unknown_before or isinstance(value, bool) else UNKNOWN
            if known is None:
                unknown_before = 1
        return UNKNOWN if unknown_before else value

    def _unary(self, node: ast.UnaryOp, frame: Frame) -> Value:
        value = self.evaluate(node.operand, frame)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return UNKNOWN if known is None else not known
        if not isinstance(value, (int, float)):
            return UNKNOWN
        try:
            return _UNARY[type(node.op)](value)
        except _FAILURES:
            return UNKNOWN

    def _conditional(self, node: ast.IfExp, frame: Frame) -> Value:
        known = truth(self.evaluate(node.test, frame))
        if known is not None:
            return self.evaluate(node.body if known else node.orelse, frame)
        self.uncertain += 1
        result = merge(self.evaluate(node.body, frame), self.evaluate(node.orelse, frame))
        self.uncertain -= 1
        return result

    def _display(self, elements: list[ast.expr], frame: Frame, *, as_tuple: bool) -> Value:
        items: list[Value] = []
        vague = False
        for element in elements:
            if isinstance(element, ast.Starred):
                inner = self.iterate(self.evaluate(element.value, frame))
                vague |= inner is None
                items += inner or []
            else:
                items.append(self.evaluate(element, frame))
        if as_tuple:
            return UNKNOWN if vague else tuple(items)
        return Seq(items, depth=self.uncertain, vague=vague)

    def _dict(self, node: ast.Dict, frame: Frame) -> Value:
        result = Table(depth=self.uncertain)
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.evaluate(value_node, frame)
            if key_node is None:
                if not isinstance(value, Table):
                    return UNKNOWN
                result.update(value)
                result.open |= value.open
                result.removed |= value.removed
                result.vague |= value.vague
                continue
            key = self.evaluate(key_node, frame)
            if not hashable(key):
                result.vague = True
            else:
                result[key] = value
        return result

    def _comprehension(
        self, generators: list[ast.comprehension], results: list[ast.expr], frame: Frame
    ) -> tuple[list[tuple[Value, ...]], bool]:
        inner = Frame(frame.module, dict(frame.variables), frame.owner, frame.closure, frame.global_names)
        made: list[tuple[Value, ...]] = []
        vague = [False]

        def level(number: int) -> None:
            if number == len(generators):
                made.append(tuple(self.evaluate(result, inner) for result in results))
                return
            generator = generators[number]
            value = self.evaluate(generator.iter, inner)
            items = self.iterate(value)
            unsure = items is None or (isinstance(value, Seq) and value.vague)
            vague[0] |= unsure
            if items is not None and len(items) > MAX_ITERATIONS:
                raise GiveUpError("a comprehension is too long")
            self.uncertain += unsure
            for item in [UNKNOWN] if items is None else items:
                self.assign(generator.target, item, inner)
                tests = [truth(self.evaluate(test, inner)) for test in generator.ifs]
                if False in tests:
                    continue
                open_test = None in tests
                vague[0] |= open_test
                self.uncertain += open_test
                level(number + 1)
                self.uncertain -= open_test
            self.uncertain -= unsure

        level(0)
        return made, vague[0]


def binary(op: type[ast.operator], left: Value, right: Value, depth: int) -> Value:
    """`left op right`."""
    if op is ast.BitOr and isinstance(left, Table) and isinstance(right, Table):
        result = left.copied(depth)
        result.update(right)
        result.open |= right.open
        result.removed = (left.removed & right.removed) if right.open else (left.removed - set(right))
        result.vague |= right.vague
        return result
    if isinstance(left, Seq) or isinstance(right, Seq):
        return _sequence(op, left, right, depth)
    if not (is_known(left) and is_known(right)):
        return UNKNOWN
    if op is ast.Pow:
        small = isinstance(right, int) and 0 <= right <= 64 and isinstance(left, (int, float))
        if not small and not (isinstance(left, float) or isinstance(right, float)):
            return UNKNOWN
    elif op is ast.Mult and isinstance(left, (str, tuple, bytes)) | isinstance(right, (str, tuple, bytes)):
        size, times = (left, right) if not isinstance(left, int) else (right, left)
        if not isinstance(times, int) or len(size) * max(times, 0) > _MAX_SIZE:
            raise GiveUpError("a sequence is too long")
    elif any(isinstance(v, int) and v.bit_length() > _MAX_BITS for v in (left, right)):
        return UNKNOWN
    function = operator.pow if op is ast.Pow else _BINARY.get(op)
    if function is None:
        return UNKNOWN
    try:
        return function(left, right)
    except _FAILURES:
        return UNKNOWN


def _sequence(op: type[ast.operator], left: Value, right: Value, depth: int) -> Value:
    if op is ast.Add and isinstance(left, Seq) and isinstance(right, Seq):
        return Seq([*left, *right], depth=depth, vague=left.vague or right.vague)
    if op is ast.Mult:
        items, times = (left, right) if isinstance(left, Seq) else (right, left)
        if isinstance(times, int) and isinstance(items, Seq):
            if len(items) * max(times, 0) > _MAX_SIZE:
                raise GiveUpError("a list is too long")
            return Seq(list(items) * times, depth=depth, vague=items.vague)
    return UNKNOWN


def compare(op: type[ast.cmpop], left: Value, right: Value) -> bool | None:
    """`left op right`, None when it cannot be told."""
    if op in (ast.Is, ast.IsNot):
        result = _is(left, right)
        return None if result is None else result == (op is ast.Is)
    if op in (ast.In, ast.NotIn):
        result = _contains(right, left)
        return None if result is None else result == (op is ast.In)
    if op in (ast.Eq, ast.NotEq):
        result = _equal(left, right)
        return None if result is None else result == (op is ast.Eq)
    if is_known(left) and is_known(right):
        try:
            return bool(_ORDER[op](left, right))
        except _FAILURES:
            return None
    return None


def _is(left: Value, right: Value) -> bool | None:
    if isinstance(left, Choice):
        results = {_is(option, right) for option in left.options}
        return results.pop() if len(results) == 1 else None
    if left is UNKNOWN or right is UNKNOWN or isinstance(left, External):
        return None
    if right is None or isinstance(right, bool):
        if isinstance(left, Signal):
            # The boundary signals are followed as if they were sent; any other argument may be left out.
            return False if left.name in SIGNAL_NAMES else None
        return left is right
    return True if left is right else None


def _contains(container: Value, item: Value) -> bool | None:
    if isinstance(container, Table):
        if not hashable(item):
            return None
        if item in container:
            return None if container.vague else True
        if container.vague:
            return None
        if not container.open or item in container.removed:
            return False
        return True if item in SIGNAL_NAMES else None
    if isinstance(container, str):
        return item in container if isinstance(item, str) else None
    if isinstance(container, Seq) and container.vague:
        return None
    if isinstance(container, (Seq, tuple, set, frozenset, range)):
        results = (
            [_equal(item, entry) for entry in container] if not isinstance(container, range) else [item in container]
        )
        return True if True in results else (None if None in results else False)
    return None


def _equal(left: Value, right: Value) -> bool | None:
    if is_known(left) and is_known(right):
        try:
            return bool(_plain(left) == _plain(right))
        except _FAILURES:
            return None
    if same_value(left, right) and not isinstance(left, (Signal, External)):
        return True
    return None


def _plain(value: Value) -> Value:
    """A list as a list, so that comparing means comparing items."""
    return list(value) if isinstance(value, Seq) else value


def hashable(value: Value) -> bool:
    """A known value that can be a key."""
    return isinstance(value, (int, float, str, bool, type(None))) or (
        isinstance(value, tuple) and all(hashable(item) for item in value)
    )


def as_set(value: Value) -> Value:
    """A set of known items, else UNKNOWN."""
    if not isinstance(value, (Seq, tuple)) or (isinstance(value, Seq) and value.vague):
        return UNKNOWN
    return set(value) if all(hashable(item) for item in value) else UNKNOWN
