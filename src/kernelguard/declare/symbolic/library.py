"""What do Python's own functions and methods do to values that may be unknown?"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable

from kernelguard.declare.symbolic.expressions import as_set, hashable
from kernelguard.declare.symbolic.values import (
    UNKNOWN,
    ClassValue,
    External,
    Instance,
    Seq,
    Signal,
    Table,
    Value,
    is_known,
    truth,
)

MAX_RANGE = 20_000
_FAILURES = (TypeError, ValueError, ZeroDivisionError, OverflowError, KeyError, IndexError, AttributeError)
_PLAIN: dict[str, Callable[..., Value]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "abs": abs,
    "min": min,
    "max": max,
    "sum": sum,
    "round": round,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.sqrt": math.sqrt,
    "math.log": math.log,
    "math.gcd": math.gcd,
    "divmod": divmod,
    "ord": ord,
    "chr": chr,
}
_STRING_METHODS = frozenset(
    {
        "count", "endswith", "find", "isdigit", "join", "lower", "lstrip", "removeprefix", "removesuffix", "replace",
        "rstrip", "split", "startswith", "strip", "upper",
    }
)  # fmt: skip
_TYPES: dict[str, tuple[type, ...]] = {
    "dict": (Table,),
    "list": (Seq,),
    "tuple": (tuple,),
    "str": (str,),
    "int": (int,),
    "float": (float,),
    "bool": (bool,),
    "set": (set, frozenset),
}
MAX_TEXT = 100_000


def call_builtin(name: str, args: list[Value], items: Callable[[Value], list[Value] | None], depth: int) -> Value:
    """A builtin function, or one of math and itertools, by its dotted name; UNKNOWN for what is not followed."""
    if name in _PLAIN:
        return _plain_call(name, args)
    first = items(args[0]) if args else []
    vague = isinstance(args[0], Seq) and args[0].vague if args else False
    if name == "range":
        if not all(isinstance(a, int) for a in args) or not 1 <= len(args) <= 3 or (len(args) == 3 and not args[2]):
            return UNKNOWN
        made = range(*args)
        return made if len(made) <= MAX_RANGE else UNKNOWN
    if name == "len":
        length = isinstance(args[0], (Seq, tuple, set, frozenset, str, range)) or (
            isinstance(args[0], Table) and not args[0].open and not args[0].vague
        )
        return len(args[0]) if length and not vague else UNKNOWN
    if name in {"list", "tuple", "iter", "reversed", "sorted", "set", "frozenset", "enumerate", "all", "any", "next"}:
        return _on_items(name, args, first, depth, vague=vague)
    if name in {"zip", "itertools.zip_longest"}:
        lists = [items(arg) for arg in args]
        if any(entry is None for entry in lists):
            return UNKNOWN
        some_vague = any(isinstance(arg, Seq) and arg.vague for arg in args)
        return Seq(zip(*(entry or [] for entry in lists), strict=False), depth=depth, vague=some_vague)
    if name in {"itertools.chain", "chain"}:
        lists = [items(arg) for arg in args]
        if any(entry is None for entry in lists):
            return UNKNOWN
        return Seq(itertools.chain(*(entry or [] for entry in lists)), depth=depth)
    if name in {"itertools.cycle", "cycle"} and first and not vague:
        return itertools.cycle(first)
    if name == "isinstance" and len(args) == 2:
        return _isinstance(args[0], args[1])
    return UNKNOWN


def _plain_call(name: str, args: list[Value]) -> Value:
    if name == "bool" and len(args) == 1:
        known = truth(args[0])
        return UNKNOWN if known is None else known
    if not all(is_known(arg) for arg in args) or any(isinstance(a, str) and len(a) > 1000 for a in args):
        return UNKNOWN
    try:
        return _PLAIN[name](*args)
    except _FAILURES:
        return UNKNOWN


def _on_items(name: str, args: list[Value], first: list[Value] | None, depth: int, *, vague: bool) -> Value:
    if name == "next":
        if isinstance(args[0], (itertools.cycle, _Iterator)):
            return next(args[0], UNKNOWN if len(args) < 2 else args[1])
        return UNKNOWN
    if not args:
        return Seq(depth=depth) if name == "list" else () if name == "tuple" else set()
    if first is None:
        return UNKNOWN
    if name in {"all", "any"}:
        truths = [truth(entry) for entry in first]
        decisive = name == "any"
        if decisive in truths:
            return decisive
        return UNKNOWN if None in truths or vague else not decisive
    if name == "iter" and not vague:
        return _Iterator(first)
    if name in {"set", "frozenset"}:
        return as_set(Seq(first, vague=vague))
    if name == "sorted" and (vague or not all(is_known(entry) for entry in first) or len(args) > 1):
        return UNKNOWN
    if name == "enumerate":
        start = args[1] if len(args) > 1 and isinstance(args[1], int) else 0
        return Seq(((number, entry) for number, entry in enumerate(first, start)), depth=depth, vague=vague)
    if name == "tuple" and not vague:
        return tuple(first)
    try:
        ordered = sorted(first) if name == "sorted" else list(reversed(first)) if name == "reversed" else first
    except _FAILURES:
        return UNKNOWN
    return Seq(ordered, depth=depth, vague=vague)


class _Iterator:
    """The iterator that `iter()` makes, so that `next()` can be followed."""

    def __init__(self, entries: Iterable[Value]) -> None:
        self._entries = iter(entries)

    def __next__(self) -> Value:
        return next(self._entries)

    def __iter__(self) -> _Iterator:
        return self


def is_iterator(value: Value) -> bool:
    """An iterator that has a state."""
    return isinstance(value, (_Iterator, itertools.cycle))


def _isinstance(value: Value, kinds: Value) -> Value:
    results: set[bool | None] = set()
    for kind in kinds if isinstance(kinds, tuple) else (kinds,):
        if value is UNKNOWN or isinstance(value, (Signal, External)):
            results.add(None)
        elif isinstance(kind, External) and kind.last in _TYPES:
            results.add(isinstance(value, _TYPES[kind.last]))
        elif isinstance(value, Instance):
            same = isinstance(kind, ClassValue) and kind == value.cls
            is_config = isinstance(kind, External) and kind.last.lower() == "pretrainedconfig"
            results.add(True if same or (is_config and value.is_config) else None)
        elif is_known(value) or isinstance(value, (Seq, Table)):
            results.add(False)
        else:
            results.add(None)
    if True in results:
        return True
    return UNKNOWN if None in results else False


def call_method(this: Value, name: str, args: list[Value], keywords: dict[str, Value], depth: int) -> Value:
    """A method of a list, dict, set or string."""
    if isinstance(this, Table):
        return _table_method(this, name, args, keywords, depth)
    if isinstance(this, Seq):
        return _seq_method(this, name, args, depth)
    if isinstance(this, set) and name == "add" and args and hashable(args[0]) and depth == 0:
        this.add(args[0])
        return None
    if isinstance(this, str) and name in _STRING_METHODS and all(is_known(a) for a in args) and not keywords:
        plain = [list(a) if isinstance(a, Seq) else a for a in args]
        try:
            result = getattr(this, name)(*plain)
        except _FAILURES:
            return UNKNOWN
        return Seq(result, depth=depth) if isinstance(result, list) else result
    if isinstance(this, tuple) and name in {"index", "count"} and is_known(this) and all(is_known(a) for a in args):
        try:
            return getattr(this, name)(*args)
        except _FAILURES:
            return UNKNOWN
    return UNKNOWN


def _table_method(this: Table, name: str, args: list[Value], keywords: dict[str, Value], depth: int) -> Value:
    if name in {"get", "pop", "setdefault"} and args:
        default = args[1] if len(args) > 1 else keywords.get("default")
        return take(this, args[0], default, keep=name != "pop", store=name == "setdefault")
    if name == "copy":
        return this.copied(depth)
    if name in {"keys", "values", "items"}:
        if this.vague or this.open:
            return UNKNOWN
        entries = list(this) if name == "keys" else list(this.values()) if name == "values" else list(this.items())
        return Seq(entries, depth=depth)
    if name == "update":
        for given in args:
            if not isinstance(given, Table):
                this.vague = True
                continue
            this.update(given)
            this.open |= given.open
            this.removed = (this.removed & given.removed) if given.open else this.removed - set(given)
            this.vague |= given.vague
        this.update(keywords)
        return None
    this.vague = True
    return UNKNOWN


def take(this: Table, key: Value, default: Value, *, keep: bool, store: bool = False) -> Value:
    """`get`, `pop` and `setdefault` of a dict into which the user may have put something."""
    if not hashable(key):
        if not keep:
            this.vague = True
        return UNKNOWN
    if key in this:
        value = this[key]
        if not keep:
            del this[key]
            this.removed.add(str(key))
        return UNKNOWN if this.vague else value
    if this.vague:
        return UNKNOWN
    if this.open and key not in this.removed:
        if not keep:
            this.removed.add(str(key))
        return Signal(str(key))
    if store:
        this[key] = default
    return default


def _seq_method(this: Seq, name: str, args: list[Value], depth: int) -> Value:
    if depth > this.depth and name in {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}:
        this.vague = True
    if name == "append" and len(args) == 1:
        list.append(this, args[0])
        return None
    if name == "extend" and isinstance(args[0], (Seq, tuple, range)):
        list.extend(this, args[0])
        this.vague |= isinstance(args[0], Seq) and args[0].vague
        return None
    if name == "insert" and len(args) == 2 and isinstance(args[0], int):
        list.insert(this, args[0], args[1])
        return None
    if name == "copy":
        return Seq(this, depth=depth, vague=this.vague)
    if name == "pop" and not this.vague and this:
        index = args[0] if args else -1
        return list.pop(this, index) if isinstance(index, int) and -len(this) <= index < len(this) else UNKNOWN
    if name in {"index", "count"} and is_known(this) and len(args) == 1 and is_known(args[0]):
        try:
            return list.index(this, args[0]) if name == "index" else list.count(this, args[0])
        except _FAILURES:
            return UNKNOWN
    if name not in {"index", "count"}:
        this.vague = True
    return UNKNOWN


__all__ = ["call_builtin", "call_method", "is_iterator", "take"]
