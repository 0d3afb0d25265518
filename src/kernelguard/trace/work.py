"""How much work is an operator, by the shapes that `record_shapes=True` leaves in a trace? Products and bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One call of an operator."""

    operations: float
    """Floating-point operations of a matrix product; NaN: not a product, or not known from shapes alone."""
    read: float
    """Bytes of all tensor inputs, each once; NaN: how much of them is touched, shapes do not tell."""
    written: float
    """Bytes of an output beside them: as large as the largest input, or none where it is an input or a few numbers."""


_BYTES = {
    "double": 8, "long int": 8, "long": 8, "c10::complex<float>": 8, "float": 4, "int": 4, "c10::Half": 2,
    "c10::BFloat16": 2, "short": 2, "signed char": 1, "unsigned char": 1, "bool": 1, "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}  # fmt: skip
# Operator -> where its two factors stand among the inputs.
_PRODUCTS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::_scaled_mm": (0, 1),
    "aten::_grouped_mm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
}


# What is written is one of the inputs, or next to nothing: everything that works in place, copies, and sums.
_NO_OUTPUT = re.compile(
    r"_$|^aten::(_foreach_norm|linalg_vector_norm|norm|sum|mean|amax|amin|max|min|all|any|argmax|argmin|logsumexp|"
    r"count_nonzero|var|std|prod|_amp_\w+|_chunk_cat|isfinite_all|equal|_local_scalar_dense|item)$"
)
# Of these inputs only some rows are touched, or the output is of another size altogether.
_PARTLY = re.compile(
    r"^aten::(index\w*|_index\w*|embedding\w*|gather|scatter\w*|take\w*|select\w*|slice\w*|one_hot|nonzero|"
    r"masked_select|repeat_interleave|expand\w*|bincount|histc|sort|topk|unique\w*|_unique\w*)$"
)


def work(name: str, arguments: Mapping[str, Any]) -> Work | None:
    """The work of one call; None: the event has no usable shapes."""
    shapes, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    sizes = [
        math.prod(shape) * _BYTES[kind]
        for shape, kind in zip(shapes, types, strict=False)
        if isinstance(kind, str) and kind in _BYTES and _is_shape(shape)
    ]
    if _PARTLY.search(name):
        return Work(operations=_product(name, shapes), read=math.nan, written=math.nan)
    return Work(
        operations=_product(name, shapes),
        read=float(sum(sizes)),
        written=0.0 if _NO_OUTPUT.search(name) else float(max(sizes, default=0)),
    )


def _product(name: str, shapes: Sequence[Any]) -> float:
    """2 x rows x inner x columns, for each matrix of a batch."""
    factors = _PRODUCTS.get(name)
    if factors is None or max(factors) >= len(shapes):
        return math.nan
    left, right = (shapes[position] for position in factors)
    if not (_is_shape(left) and _is_shape(right)) or len(left) < 2 or len(right) < 2:
        return math.nan
    # Of a grouped product's second factor each row of the first meets one matrix only.
    return float(2 * math.prod(left) * right[-1])


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(n, int) and n >= 0 for n in value)
