"""What changed between two runs? Every fact that both could tell, most suspicious first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernelguard.matrix import kernel_packages
from kernelguard.report.difference import Document, Suspicion, compare
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.render import NONE

_TITLES = {
    Suspicion.BINDING: "What the kernels are bound to, and what was measured",
    Suspicion.KERNEL: "Kernel packages, triton and its assembler",
    Suspicion.STACK: "torch, CUDA, transformers, the GPU",
    Suspicion.SYSTEM: "Driver, C library, environment variables",
    Suspicion.OTHER: "Everything else",
}
_NUMBERS = {
    "step_s": ("seconds a step", 3),
    "tokens_per_s": ("useful tokens a second and GPU", 0),
    "trained_tokens_per_s": ("trained tokens a second and GPU", 0),
    "density": ("useful share of computed tokens", 3),
    "mfu": ("MFU", 3),
    "data_wait_s": ("seconds of waiting for data a step", 4),
    "peak_gib": ("peak memory, GiB", 1),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference; None: not there at all."""

    subject: str
    a: str | None
    b: str | None
    suspicion: Suspicion
    ratio: str = ""
    """For numbers: how many times the second is the first."""


def changes(a: Gathered, b: Gathered) -> list[tuple[str, list[Change]]]:
    """Grouped under what they are about."""
    found = [*_numbers(a, b), *_verdicts(a, b), *_checks(a, b), *_profiles(a, b)]
    return [
        (title, rows)
        for suspicion, title in _TITLES.items()
        if (rows := [change for change in found if change.suspicion is suspicion])
    ]


def speed(a: Gathered, b: Gathered) -> float | None:
    """How many times as fast the second is: by useful tokens, else by the length of a step; None: not known."""
    if a.run is not None and b.run is not None:
        one, two = a.run.tokens_per_s, b.run.tokens_per_s
        return two / one if one and two else a.run.step_s / b.run.step_s
    if a.profile is not None and b.profile is not None:
        first, second = a.profile["trace"], b.profile["trace"]
        if first is not None and second is not None and second["step_us"]:
            return float(first["step_us"] / second["step_us"])
    return None


def _checks(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.check is None or b.check is None:
        return
    first = Document(source=a.source, kind="check", content=a.check)
    second = Document(source=b.source, kind="check", content=b.check)
    for row in compare(first, second, kernel_packages().values()):
        yield Change(subject=row.subject, a=row.a, b=row.b, suspicion=row.suspicion)


def _verdicts(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.verdict is None or b.verdict is None:
        return
    first, second = dict(_verdict_facts(a.verdict)), dict(_verdict_facts(b.verdict))
    for key in sorted(first.keys() | second.keys(), key=lambda k: (-k[0], k[1])):
        if first.get(key) != second.get(key):
            yield Change(subject=key[1], a=first.get(key), b=second.get(key), suspicion=key[0])


def _verdict_facts(verdict: Mapping[str, Any]) -> Iterator[tuple[tuple[Suspicion, str], str]]:
    for probe in verdict["probes"]:
        worst = max(
            (t["error"] / t["allowed"] for c in probe["cases"] for t in c["tensors"] if t["error"] and t["allowed"]),
            default=None,
        )
        share = "" if worst is None else f", {worst:.0%} of the allowed error"
        yield (Suspicion.BINDING, f"measured {probe['symbol']}"), f"{probe['outcome']}{share}"
    print_of = verdict["fingerprint"]
    for name in ("torch", "cuda", "gpu", "transformers"):
        yield (Suspicion.STACK, name), str(print_of[name])
    for name in ("triton", "ptxas"):
        yield (Suspicion.KERNEL, name), str(print_of[name])
    for name in ("driver", "python", "machine"):
        yield (Suspicion.SYSTEM, name), str(print_of[name])
    for name, version in print_of["distributions"].items():
        yield (Suspicion.KERNEL, f"distribution {name}"), str(version)


def _profiles(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.profile is None or b.profile is None:
        return
    first, second = a.profile["verdict"], b.profile["verdict"]
    if first["bound_by"] != second["bound_by"]:
        yield Change(subject="bound by", a=first["bound_by"], b=second["bound_by"], suspicion=Suspicion.BINDING)
    one, two = a.profile["trace"], b.profile["trace"]
    if one is None or two is None:
        return
    numbers = (
        ("milliseconds a step", one["step_us"] / 1e3, two["step_us"] / 1e3, 1),
        ("launches a step", one["totals"]["launches_per_step"], two["totals"]["launches_per_step"], 0),
        ("GPU busy share", one["totals"]["gpu_busy_share"], two["totals"]["gpu_busy_share"], 2),
    )
    for subject, x, y, digits in numbers:
        yield from _number(subject, x, y, digits)


def _numbers(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.run is None or b.run is None:
        return
    for name, (subject, digits) in _NUMBERS.items():
        yield from _number(subject, getattr(a.run, name), getattr(b.run, name), digits)


def _number(subject: str, x: float | None, y: float | None, digits: int) -> Iterator[Change]:
    if x == y:
        return
    yield Change(
        subject=subject,
        a=None if x is None else f"{x:,.{digits}f}",
        b=None if y is None else f"{y:,.{digits}f}",
        suspicion=Suspicion.BINDING,
        ratio=f"{y / x:.2f} times" if x and y else NONE,
    )
