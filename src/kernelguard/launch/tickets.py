"""From an admission to the ticket: what every rank is told to be, and to try."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.declare.values import Declaration, FastPath, Intent, Phase
from kernelguard.guard.question import Admission
from kernelguard.guard.shown import VARIABLES
from kernelguard.guard.ticket import (
    AdmissionNote,
    Deadlines,
    Document,
    Expected,
    ExpectedDistribution,
    ExpectedPath,
    Model,
    Ticket,
)
from kernelguard.judge.assess import needed_paths
from kernelguard.judge.values import Level
from kernelguard.lock.values import Lock, Role
from kernelguard.observe.bindings import bindings_request
from kernelguard.observe.values import Binding, Bindings, BoundTo, Environment
from kernelguard.trace.names import Names, load_names
from kernelguard.verify.cache import cache_variables
from kernelguard.verify.isolation import LENGTHS
from kernelguard.verify.plan import language_parts
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Configuration, ProbeResult, Verdict

_MECHANISM = {BoundTo.KERNEL.value: "package", BoundTo.HUB.value: "hub", BoundTo.TORCH.value: "torch"}
_ALL_SIGNALS = ("position_ids", "cu_seq_lens_q", "seq_idx")
_SHORT_LENGTHS = (11, 1, 7)
"""Without a GPU there are no chunks to have edges, and every token takes its time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """Everything that a ticket is made of."""

    admission: Admission
    lock: Lock
    lock_path: str
    lock_digest: str
    verdict: Verdict
    verdict_path: str
    verdict_digest: str
    declaration: Declaration
    intent: Intent
    requests: tuple[ProbeRequest, ...]
    environment: Environment | None
    bindings: Bindings | None
    floor: str
    image: str
    warm_cache: Path | None
    deadlines: Deadlines


def make_ticket(a: Admitted, *, run_dir: str) -> Ticket:
    """The ticket of an admitted job."""
    gpu = a.admission.level is Level.GPU
    needed = needed_paths(a.declaration, a.intent, a.bindings)
    names = [n for n in load_names() if _known(n, a.verdict)]
    # Without a GPU there are no GPU kernels, and an interpreted one runs as plain operators.
    used = {(p.package, p.symbol) for p in needed} if gpu else set()
    return Ticket(
        lock=Document(a.lock_path, a.lock_digest),
        verdict=Document(a.verdict_path, a.verdict_digest, a.verdict.level.name.lower()),
        admission=AdmissionNote(True, a.admission.reasons, a.admission.overrides),
        run_dir=run_dir,
        level=a.admission.level.name.lower(),
        model=Model(
            config=str(a.declaration.config.source),
            dtype=a.intent.dtype,
            model_type=a.declaration.config.model_type,
            sha256=a.lock.model.sha256,
        ),
        expected=_expected(a, gpu=gpu),
        deadlines=a.deadlines,
        fast_paths=tuple(_path(p, a) for p in needed),
        kernels=_kernels(a, names, used),
        fallbacks={n.symbol: n.fallback_ops for n in names if n.called in used and n.fallback_ops},
        packed=a.intent.packed,
        signals=(a.intent.signals or _ALL_SIGNALS) if a.intent.packed else (),
        intent=dict(a.lock.intent),
        probes=tuple(_probes(a)),
        isolation=_isolation(a, gpu=gpu),
        bindings=bindings_request(a.declaration, build=False),
        device="cuda" if gpu else "cpu",
        image=a.image,
        variables=_variables(a),
    )


def _kernels(a: Admitted, names: Sequence[Names], used: Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """GPU kernels by fast path: those that the verdict's profiler saw, else those known of that package version."""
    found: dict[str, tuple[str, ...]] = {}
    for row in names:
        if row.called in used:
            found[row.symbol] = (*found.get(row.symbol, ()), *row.forward, *row.backward)
    for probe in a.verdict.probes:
        seen = (*probe.forward_kernels, *probe.backward_kernels)
        if seen and (probe.package, probe.symbol) in used:
            found[probe.symbol] = tuple(dict.fromkeys((*found.get(probe.symbol, ()), *seen)))
    # Where a kernel of the trainer's own may run in place of a fast path's, step 1 has to show one or the other.
    places = {(r.package, r.symbol): r.stands_for for r in a.requests if r.stands_for}
    for probe in a.verdict.probes:
        place = places.get((probe.package, probe.symbol), "")
        seen = (*probe.forward_kernels, *probe.backward_kernels)
        if seen and found.get(place):
            found[place] = tuple(dict.fromkeys((*found[place], *seen)))
    return found


def _expected(a: Admitted, *, gpu: bool) -> Expected:
    seen = a.verdict.fingerprint
    kernels = {pin.name: pin for pin in a.lock.pins if pin.role is Role.KERNEL}
    return Expected(
        python=seen.python,
        torch=seen.torch,
        triton=seen.triton,
        cuda=seen.cuda,
        transformers=seen.transformers,
        distributions={
            name: ExpectedDistribution(
                version=pin.version,
                record_sha256=pin.files_sha256,
                binaries={p: d for p, d in seen.binaries.items() if _owns(name, p, a.environment)},
            )
            for name, pin in sorted(kernels.items())
        },
        capability=seen.capability if gpu else None,
        gpu=seen.gpu if gpu else "",
        driver=seen.driver if gpu else "",
        driver_floor=a.floor if gpu else "",
    )


def _owns(distribution: str, path: str, environment: Environment | None) -> bool:
    """Whether a binary, by its path below site-packages, is one of a distribution's."""
    known = (environment.distributions or {}).get(distribution) if environment is not None else None
    tops = known.top_level if known is not None else (distribution.replace("-", "_"),)
    first = path.partition("/")[0]
    return any(first == top or first.startswith(f"{top}.") for top in tops)


def _path(path: FastPath, a: Admitted) -> ExpectedPath:
    where = (path.binding.module, path.symbol)
    bound, target = next(
        chain(
            ((b.bound_to.value, b.target) for b in _bindings(a) if (b.module, b.symbol) == where),
            ((u.bound_to, u.target) for u in a.verdict.fast_paths if (u.called_in, u.symbol) == where and u.bound_to),
        ),
        (BoundTo.KERNEL.value, ""),
    )
    return ExpectedPath(
        symbol=path.symbol,
        bound_to=target,
        mechanism=_MECHANISM.get(bound, "package"),
        module=path.binding.module,
        package=path.package,
        layers=path.layers,
        training=Phase.TRAINING in path.phases,
    )


def _bindings(a: Admitted) -> tuple[Binding, ...]:
    return a.bindings.bindings if a.bindings is not None else ()


def _known(row: Names, verdict: Verdict) -> bool:
    """Whether the kernel names are those of the version that was measured."""
    try:
        version = Version(verdict.fingerprint.distributions.get(row.distribution, ""))
    except InvalidVersion:
        return False
    return row.versions.contains(version, prereleases=True)


def _probes(a: Admitted) -> Iterator[Mapping[str, Any]]:
    """One short case of each kernel that was measured, with a configuration that was right instead of a tuning run."""
    if a.admission.level <= Level.IMPORT:
        return
    measured = {(p.package, p.symbol): p for p in a.verdict.probes}
    for request in a.requests:
        probe = measured.get((request.package, request.symbol))
        if probe is None or not request.op or not request.cases:
            continue
        # With a warm cache the autotuner's own choice is there, and it is what the training will run.
        pin = None if a.warm_cache is not None else _right_row(probe)
        case = replace(request.cases[0], force=False, repeats=1, pin=pin)
        row = replace(request, cases=(case,)).to_json(device="")
        del row["device"]
        del row["budget_s"]
        yield row


def _right_row(probe: ProbeResult) -> int | None:
    """The first row of configurations of which every kernel's was right; None: let the autotuner choose."""
    kernels: dict[str, list[Configuration]] = {}
    for configuration in probe.configurations:
        kernels.setdefault(configuration.kernel, []).append(configuration)
    if not kernels:
        return None
    rows = max(len(found) for found in kernels.values())
    for row in range(rows):
        if all(found[row % len(found)].state == "right" for found in kernels.values()):
            return row
    return None


def _isolation(a: Admitted, *, gpu: bool) -> Mapping[str, Any] | None:
    """The run's own signals in a model of one layer of each kind."""
    if not a.intent.packed or a.admission.level <= Level.IMPORT:
        return None
    signals = a.intent.signals if a.intent.signals is not None else _ALL_SIGNALS
    return {
        "parts": [{"model_type": p.model_type, "raw": dict(p.raw)} for p in language_parts(a.declaration)],
        "checks": [{"signals": list(signals), "parameters": False}],
        "dtype": a.intent.dtype if gpu else "float32",
        "lengths": list(LENGTHS if gpu else _SHORT_LENGTHS),
        "attn_implementation": a.intent.attn_implementation,
        "experts_implementation": a.intent.experts_implementation,
        "grouped_heads": a.intent.grouped_heads,
    }


def _variables(a: Admitted) -> dict[str, str]:
    found = cache_variables(a.warm_cache) if a.warm_cache is not None else {}
    if a.admission.level is Level.INTERPRETED:
        found["TRITON_INTERPRET"] = "1"
    return {name: value for name, value in found.items() if name in VARIABLES}
