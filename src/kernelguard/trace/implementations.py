"""Which implementation did each fast path run on? By the names of its kernels and of its fallback's operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kernelguard.trace.names import Names, base_name, load_names
from kernelguard.trace.values import KernelRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What ran for one kind of work, as far as names tell; nothing is said of what left no name."""

    symbols: tuple[str, ...]
    """Fast paths that share these names."""
    package: str
    """Whose kernels ran; empty: only the fallback's operators were seen."""
    launches: int = 0
    microseconds: float = 0.0
    forward: bool = False
    backward: bool = False
    fallbacks: tuple[str, ...] = ()
    """Operators that only the slow path runs, with how often: `aten::linalg_solve_triangular (96x)`."""


def implementations(
    kernels: Sequence[KernelRun], operators: Mapping[str, int], names: Sequence[Names] | None = None
) -> tuple[Implementation, ...]:
    """Everything known that was seen, slow paths first.

    A trace does not say which versions ran, so names of every known version count.
    """
    rows = load_names() if names is None else names
    runs = [(base_name(run.name), run) for run in kernels]
    found: dict[tuple[str, tuple[str, ...]], Implementation] = {}
    for package, symbol in dict.fromkeys((row.package, row.symbol) for row in rows):
        mine = [row for row in rows if (row.package, row.symbol) == (package, symbol)]
        forward = {name for row in mine for name in row.forward}
        backward = {name for row in mine for name in row.backward}
        seen = [(base, run) for base, run in runs if base in forward | backward]
        ops = sorted({op for row in mine for op in row.fallback_ops if op in operators})
        if not seen and not ops:
            continue
        key = (package, tuple(sorted({base for base, _ in seen})) or tuple(ops))
        if key in found:
            other = found[key]
            found[key] = _merged(other, symbol)
            continue
        found[key] = Implementation(
            symbols=(symbol,),
            package=package if seen else "",
            launches=sum(run.count for _, run in seen),
            microseconds=sum(run.microseconds for _, run in seen),
            forward=any(base in forward for base, _ in seen),
            backward=any(base in backward for base, _ in seen),
            fallbacks=tuple(f"{op} ({operators[op]}x)" for op in ops),
        )
    return tuple(sorted(found.values(), key=lambda i: (not i.fallbacks, -i.microseconds, i.symbols)))


def _merged(first: Implementation, symbol: str) -> Implementation:
    from dataclasses import replace  # noqa: PLC0415

    return replace(first, symbols=(*first.symbols, symbol))
