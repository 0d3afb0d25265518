"""A trainer may put a kernel into a model's module itself, in a function of its own that says which kernel it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kernelguard.workers.bound import called_with, innermost


def kernel(x: int, *, seq_idx: int | None = None) -> int:
    return x if seq_idx is None else seq_idx


def slow(x: int) -> int:
    return x


def fitted(around: Callable[..., Any], names: Callable[..., Any] | None) -> Callable[..., Any]:
    @functools.wraps(around)
    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **kwargs)

    if names is not None:
        call.__kernel__ = names  # type: ignore[attr-defined]
    return call


def test_the_named_kernel_is_what_is_called() -> None:
    found = fitted(slow, kernel)
    assert innermost(found) is kernel
    assert called_with(found)["parameters"] == ["x", "seq_idx"]


def test_without_a_name_it_is_what_it_is_put_around() -> None:
    assert innermost(fitted(slow, None)) is slow
    assert called_with(fitted(slow, None))["parameters"] == ["x"]


def test_a_name_that_is_no_function_names_nothing() -> None:
    assert innermost(fitted(slow, "kernel")) is slow  # type: ignore[arg-type]
