"""Which kernels and operators belong to which fast path? Names per package version (`matrices/traces/*.toml`)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from kernelguard.data import matrices
from kernelguard.trace.values import FastPathTrace, KernelRun, TraceFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names of one fast path in one range of package versions."""

    symbol: str
    package: str
    distribution: str
    versions: SpecifierSet
    forward: tuple[str, ...]
    """Kernel names; a C++ kernel's without `void`, namespace and template arguments."""
    backward: tuple[str, ...]
    fallback_ops: tuple[str, ...]
    """Operators that the model's slow path runs and its fast path does not."""
    recorded: str
    """Where they were seen in a trace; empty: only read from the package's source."""
    through: str = ""
    """The package whose function of this name hands its calls over to this one; empty: models call it themselves."""

    @property
    def called(self) -> tuple[str, str]:
        """Package and symbol of the function that a model calls."""
        return self.through or self.package, self.symbol


def load_names(files: Iterable[Path] | None = None) -> tuple[Names, ...]:
    """Every row of the files; by default of those that ship with kernelguard."""
    found = []
    for file in sorted((matrices() / "traces").glob("*.toml") if files is None else files):
        document = tomllib.loads(file.read_text("utf-8"))
        found += [_row(document, row) for row in document["symbol"]]
    return tuple(found)


def _row(document: Mapping[str, Any], row: Mapping[str, Any]) -> Names:
    return Names(
        symbol=row["name"],
        package=document["package"],
        distribution=document["distribution"],
        versions=SpecifierSet(row.get("versions", "")),
        forward=tuple(row["forward"]),
        backward=tuple(row.get("backward", ())),
        fallback_ops=tuple(row.get("fallback_ops", ())),
        recorded=row.get("recorded", ""),
        through=document.get("through", ""),
    )


def fast_paths(
    trace: TraceFacts,
    wanted: Sequence[tuple[str, str]],
    versions: Mapping[str, str],
    names: Sequence[Names] | None = None,
    seen: Mapping[tuple[str, str], tuple[Sequence[str], Sequence[str]]] | None = None,
) -> tuple[FastPathTrace, ...]:
    """For each wanted (package, symbol): which of its kernels are in the trace, and which fallback's operators.

    `versions` holds the installed version by distribution. A package whose version has no known names is answered with
    `known=False`: that nothing was found there says nothing. `seen` adds the forward and backward kernels that a call
    of the symbol was seen to launch.
    """
    rows = load_names() if names is None else names
    return tuple(
        _one(trace, (package, symbol), versions, rows, (seen or {}).get((package, symbol), ((), ())))
        for package, symbol in wanted
    )


def _one(
    trace: TraceFacts,
    wanted: tuple[str, str],
    versions: Mapping[str, str],
    rows: Sequence[Names],
    seen: tuple[Sequence[str], Sequence[str]],
) -> FastPathTrace:
    package, symbol = wanted
    mine = [r for r in rows if r.called == wanted]
    fitting = [r for r in mine if _holds(r, versions)]
    fallbacks = {op for row in mine for op in row.fallback_ops}
    ran = tuple(f"{op} ({trace.ops[op]}x)" for op in sorted(fallbacks) if op in trace.ops)
    forward = {n for row in fitting for n in row.forward} | set(seen[0])
    backward = {n for row in fitting for n in row.backward} | set(seen[1])
    kernels = tuple(run for run in trace.kernels if base_name(run.name) in forward | backward)
    return FastPathTrace(
        symbol=symbol,
        package=package,
        kernels=kernels,
        forward=any(base_name(run.name) in forward for run in kernels),
        backward=any(base_name(run.name) in backward for run in kernels),
        fallbacks=ran,
        known=bool(fitting) or bool(forward),
    )


def _holds(row: Names, versions: Mapping[str, str]) -> bool:
    text = versions.get(row.distribution)
    if text is None:
        return False
    try:
        return row.versions.contains(Version(text), prereleases=True)
    except InvalidVersion:
        return False


def base_name(name: str) -> str:
    """A kernel's own name: `causal_conv1d_fwd_kernel<>` for `void ns::causal_conv1d_fwd_kernel<T>(Params)`.

    The `<>` stays, because a CUDA and a Triton kernel of different packages can have the same name.
    """
    bare = re.sub(r"^void\s+|\(anonymous namespace\)::", "", name)
    head, angle, _ = bare.partition("<")
    words = head.partition("(")[0].replace("::", " ").split()
    head = words[-1] if words else bare
    return head + ("<>" if angle else "")


_COMMON = re.compile(
    r"at::native::|at_cuda_detail|\bcub::|\bthrust::|cublas|^nvjet|gemm|splitKreduce|^Mem(cpy|set)|^void at::cuda::"
)
"""What every model launches: torch's elementwise kernels, reductions and copies, and matrix products."""


def own_kernels(names: Iterable[str]) -> tuple[str, ...]:
    """Base names of the kernels that are not everybody's, sorted: those that tell that one package ran."""
    return tuple(sorted({base_name(name) for name in names if not _COMMON.search(name)}))


def unexplained(trace: TraceFacts, known: Iterable[FastPathTrace]) -> tuple[KernelRun, ...]:
    """Kernels of the trace that belong to no fast path: matrix products, copies, optimizers, and what is new."""
    explained = {run.name for path in known for run in path.kernels}
    return tuple(run for run in trace.kernels if run.name not in explained)
