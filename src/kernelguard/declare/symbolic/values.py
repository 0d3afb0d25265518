"""What can a value be, when a model's code is followed without running it? Known things are plain Python values."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kernelguard.declare.source import ParsedModule

Value = Any
"""A Python int, str, bool, float, None, tuple or set, or one of the classes below."""


SIGNAL_NAMES = frozenset(
    {
        "position_ids",
        "seq_idx",
        "cu_seqlens",
        "cu_seq_lens",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
    }
)
"""Keyword arguments that can carry sample boundaries; they are followed as if the user sent all of them."""


class GiveUpError(Exception):
    """The code has a shape that cannot be followed without guessing; everything asked for becomes unknown."""


class _Unknown:
    """A value that the source does not determine."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "UNKNOWN"

    def __bool__(self) -> bool:
        raise TypeError("an unknown value has no truth; ask truth()")


UNKNOWN = _Unknown()

State = tuple[Any, ...]
"""What a container looked like at some moment."""


@dataclass(frozen=True, slots=True)
class Signal:
    """The keyword argument `name` that the user gave to the model's own forward."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several values, depending on something unknown."""

    options: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class External:
    """Something from outside the model's files, by dotted name: `torch.nn.ModuleList`."""

    name: str

    @property
    def last(self) -> str:
        """`ModuleList`."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Kernel:
    """A fast path's function or class, taken for loaded."""

    name: str
    """The binding name in the modeling module."""
    module: str
    """Dotted."""
    is_class: bool = False
    parameters: tuple[str, ...] = ()
    """Positional parameter names, where the source tells."""


@dataclass(frozen=True, slots=True)
class KernelLoader:
    """A function that returns kernels (transformers 4.57)."""

    results: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class KernelObject:
    """An instance of a kernel class; calling it calls the kernel."""

    kernel: Kernel


@dataclass(frozen=True, slots=True, eq=False)
class ClassValue:
    """A class of a modeling or configuration file."""

    module: ParsedModule
    node: ast.ClassDef

    @property
    def key(self) -> tuple[str, str]:
        """File and name."""
        return (self.module.file, self.node.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ClassValue) and self.node is other.node

    def __hash__(self) -> int:
        return hash(id(self.node))


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A function of such a file; `owner` is the class whose body it stands in."""

    module: ParsedModule
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    owner: ClassValue | None = None
    closure: dict[str, Value] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Method:
    """A function with its `self` (or `cls`)."""

    function: Function
    this: Value


@dataclass(frozen=True, slots=True, eq=False)
class Builtin:
    """A method of a list, dict or string, or `super().x`, by name."""

    name: str
    this: Value


@dataclass(slots=True, eq=False)
class Instance:
    """An object of a class: a module, or a configuration."""

    cls: ClassValue
    depth: int
    """How many unknown conditions stood around its making."""
    attributes: dict[str, Value] = field(default_factory=dict)
    opaque: bool = False
    """Its __init__ was not followed, so its attributes are unknown."""
    is_config: bool = False


class Seq(list[Value]):
    """A list or ModuleList; `vague` when its length or its items depend on something unknown."""

    __slots__ = ("depth", "vague")

    def __init__(self, items: Iterable[Value] = (), *, depth: int = 0, vague: bool = False) -> None:
        super().__init__(items)
        self.depth = depth
        self.vague = vague

    def snapshot(self) -> State:
        """What `restore` needs."""
        return (list(self), self.vague)

    def restore(self, state: State) -> None:
        """Back to a snapshot."""
        self[:], self.vague = state[0], state[1]

    def join(self, one: State, other: State) -> None:
        """The state after either of two branches."""
        longer = max(one[0], other[0], key=len)
        same = len(one[0]) == len(other[0]) and all(
            a is b or same_value(a, b) for a, b in zip(one[0], other[0], strict=True)
        )
        self[:], self.vague = longer, one[1] or other[1] or not same


class Table(dict[Value, Value]):
    """A dict, also the `**kwargs` of a function.

    `open`: the user may have put further keyword arguments in, those in `removed` excepted. `vague`: something unknown
    was done to it.
    """

    __slots__ = ("depth", "open", "removed", "vague")

    def __init__(
        self,
        items: Iterable[tuple[Value, Value]] = (),
        *,
        depth: int = 0,
        is_open: bool = False,
        removed: Iterable[str] = (),
        vague: bool = False,
    ) -> None:
        super().__init__(items)
        self.depth = depth
        self.open = is_open
        self.removed = set(removed)
        self.vague = vague

    def copied(self, depth: int) -> Table:
        """A shallow copy."""
        return Table(self.items(), depth=depth, is_open=self.open, removed=self.removed, vague=self.vague)

    def snapshot(self) -> State:
        """What `restore` needs."""
        return (dict(self), self.open, set(self.removed), self.vague)

    def restore(self, state: State) -> None:
        """Back to a snapshot."""
        self.clear()
        self.update(state[0])
        self.open, self.removed, self.vague = state[1], set(state[2]), state[3]

    def join(
        self,
        one: State,
        other: State,
    ) -> None:
        """The state after either of two branches."""
        self.clear()
        for key in (*one[0], *(k for k in other[0] if k not in one[0])):
            if key in one[0] and key in other[0]:
                self[key] = merge(one[0][key], other[0][key])
            else:
                self[key] = UNKNOWN
        for key in one[2] ^ other[2]:
            self[key] = UNKNOWN
        self.open, self.removed = one[1] or other[1], one[2] | other[2]
        self.vague = one[3] or other[3]


_PRIMITIVE = (int, float, str, bool, bytes, type(None))
_MAX_OPTIONS = 8


def same_value(one: Value, other: Value) -> bool:
    """Surely the same value."""
    if one is other:
        return True
    if isinstance(one, _PRIMITIVE) and isinstance(other, _PRIMITIVE):
        return type(one) is type(other) and one == other
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(same_value(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, (Signal, External, Kernel, KernelObject, ClassValue)):
        return type(one) is type(other) and bool(one == other)
    return False


def merge(one: Value, other: Value) -> Value:
    """One value or the other."""
    if same_value(one, other):
        return one
    options: list[Value] = []
    for value in (one, other):
        for option in value.options if isinstance(value, Choice) else (value,):
            if option is UNKNOWN or isinstance(option, (Seq, Table, set, frozenset)):
                return UNKNOWN
            if not any(same_value(option, known) for known in options):
                options.append(option)
    return Choice(tuple(options)) if len(options) <= _MAX_OPTIONS else UNKNOWN


def truth(value: Value) -> bool | None:
    """The truth of a value, None when it is not known."""
    if value is UNKNOWN or isinstance(value, (Signal, External, Builtin)):
        return None
    if isinstance(value, (Seq, Table)):
        return None if value.vague or (isinstance(value, Table) and value.open and not len(value)) else bool(len(value))
    if isinstance(value, Choice):
        truths = {truth(option) for option in value.options}
        return truths.pop() if len(truths) == 1 else None
    if isinstance(value, (*_PRIMITIVE, tuple, set, frozenset, range)):
        return bool(value)
    return True


def is_known(value: Value) -> bool:
    """A plain Python value, all the way down."""
    if isinstance(value, (*_PRIMITIVE, range)):
        return True
    if isinstance(value, (tuple, set, frozenset)):
        return all(is_known(item) for item in value)
    if isinstance(value, Seq):
        return not value.vague and all(is_known(item) for item in value)
    if isinstance(value, Table):
        return not value.vague and not value.open and all(is_known(v) for pair in value.items() for v in pair)
    return False


@dataclass(slots=True)
class Arguments:
    """The arguments of one call."""

    positional: list[Value] = field(default_factory=list)
    keywords: dict[str, Value] = field(default_factory=dict)
    rest: Table | None = None
    """What came through `**kwargs`, when the user may have put something into it or it is vague."""
    vague_positional: bool = False
    """A `*args` of unknown content was among them."""
