"""What changed between two runs? Every fact that both could tell, most suspicious first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kernelguard.errors import InputError
from kernelguard.judge.values import Finding
from kernelguard.matrix import kernel_packages
from kernelguard.report.difference import Document, Suspicion, compare
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.render import NONE
from kernelguard.report.html.words import per, ran_on, sent, versions_of_run

_TITLES = {
    Suspicion.BINDING: "What the kernels are bound to, and what was measured",
    Suspicion.KERNEL: "Kernel packages, triton and its assembler",
    Suspicion.STACK: "torch, CUDA, transformers, the GPU",
    Suspicion.SYSTEM: "Driver, C library, environment variables",
    Suspicion.OTHER: "Everything else",
}
_NUMBERS = {
    "step_s": ("seconds a step", 3),
    "tokens_per_s": ("useful tokens a second and {per}", 0),
    "trained_tokens_per_s": ("trained tokens a second and {per}", 0),
    "density": ("useful share of computed tokens", 3),
    "mfu": ("MFU", 3),
    "data_wait_s": ("seconds of waiting for data a step", 4),
    "peak_gib": ("peak memory, GiB", 1),
}
_IDLE = {
    "launch": "waiting for the next launch",
    "after_wait": "of that, right after the host had waited for it",
    "data": "waiting for data",
    "compiling": "waiting for a compiler",
    "script": "in the script's own Python",
    "device": "between kernels that were queued",
}
Facts = Iterable[tuple[tuple[Suspicion, str], str]]
"""(what it is about, its name) and what is said of it."""


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
    """Grouped under what they are about.

    Raises:
        InputError: they hold nothing of one kind, so that nothing could be told of both.
    """
    _refuse_two_kinds(a, b)
    found = [
        *_held(a, b),
        *_profiles(a, b),
        *_numbers(a, b),
        *_verdicts(a, b),
        *_checks(a, b),
        *_attestations(a, b),
    ]
    return [
        (title, rows)
        for suspicion, title in _TITLES.items()
        if (rows := [change for change in found if change.suspicion is suspicion])
    ]


def _refuse_two_kinds(a: Gathered, b: Gathered) -> None:
    if not set(a.kinds) & set(b.kinds):
        raise InputError(
            f"{a.source} is {' and '.join(a.kinds)}, and {b.source} is {' and '.join(b.kinds)}: no fact is in both",
            hint="compare two of one kind, or make a page of each: kernelguard report FILE -o FILE.html",
        )


def _held(a: Gathered, b: Gathered) -> Iterator[Change]:
    """What one of the two does not hold at all is no equality."""
    for kind in dict.fromkeys((*a.kinds, *b.kinds)):
        if (kind in a.kinds) != (kind in b.kinds):
            here = ["there" if kind in one.kinds else None for one in (a, b)]
            yield Change(subject=kind, a=here[0], b=here[1], suspicion=Suspicion.BINDING)


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
    if a.verdict is not None and b.verdict is not None:
        yield from _differing(
            _verdict_facts(a.verdict, a.findings()),
            _verdict_facts(b.verdict, b.findings()),
        )


def _differing(one: Facts, other: Facts) -> Iterator[Change]:
    """In the order in which the facts are told."""
    first, second = dict(one), dict(other)
    for suspicion, subject in dict.fromkeys((*first, *second)):
        x, y = first.get((suspicion, subject)), second.get((suspicion, subject))
        if x != y:
            yield Change(subject=subject, a=x, b=y, suspicion=suspicion)


def _verdict_facts(verdict: Mapping[str, Any], found: Iterable[Finding]) -> Facts:
    yield (Suspicion.BINDING, "level"), str(verdict["level"])
    yield from _probe_facts(verdict)
    for row in verdict["isolation"]:
        yield (Suspicion.BINDING, f"packed samples, {sent(row)}"), _isolation_fact(row)
    if "signals" in verdict:
        signals = verdict["signals"]
        yield (Suspicion.BINDING, "signals"), "not packed" if signals is None else ", ".join(signals) or "none"
    for path in verdict.get("fast_paths") or ():
        target = f", {path['target']}" if path.get("target") else ""
        bound = f"{path.get('bound_to') or 'not looked at'}{target} ({path.get('package') or 'not known'})"
        yield (Suspicion.BINDING, f"bound {path['symbol']}"), bound
    for path in (verdict.get("trace") or {}).get("fast_paths") or ():
        ways = " and ".join(way for way in ("forward", "backward") if path.get(way)) or "did not run"
        slow = f"; the slow path: {', '.join(path['fallbacks'])}" if path.get("fallbacks") else ""
        yield (Suspicion.BINDING, f"in a training step {path['symbol']}"), f"{path['package']}, {ways}{slow}"
    # What is said of a kernel stands above already; what is said of the measurement stands nowhere else.
    for finding in found:
        if finding.fast_path is None and finding.code not in {"packed-samples-leak", "isolated"}:
            name = finding.reason if finding.code == "verify-problem" else finding.code
            yield (Suspicion.BINDING, f"finding {name}"), str(finding.status)
    subject = verdict.get("subject") or {}
    for name in ("model_type", "config_sha256", "lock", "length"):
        if subject.get(name):
            yield (Suspicion.OTHER, f"of {name.replace('_', ' ')}"), str(subject[name])
    for name, value in (verdict.get("image") or {}).items():
        yield (Suspicion.OTHER, f"image {name.replace('_', ' ')}"), str(value)
    yield from _fingerprint_facts(verdict["fingerprint"])


def _probe_facts(verdict: Mapping[str, Any]) -> Facts:
    """Each kernel's outcome; one that was measured more than once has a number."""
    seen: Counter[str] = Counter()
    for probe in verdict["probes"]:
        seen[probe["symbol"]] += 1
        again = f" ({seen[probe['symbol']]})" if seen[probe["symbol"]] > 1 else ""
        worst = max(
            (
                t["error"] / t["allowed"]
                for c in probe.get("cases") or ()
                for t in c.get("tensors") or ()
                if t.get("error") and t.get("allowed")
            ),
            default=None,
        )
        share = "" if worst is None else f", {worst:.0%} of the allowed error"
        # A right outcome whose numbers are not all known is another answer than one that is whole.
        partly = f", numbers {probe['numbers']}" if probe["numbers"] != "pass" else ""
        yield (Suspicion.BINDING, f"measured {probe['symbol']}{again}"), f"{probe['outcome']}{share}{partly}"


def _isolation_fact(row: Mapping[str, Any]) -> str:
    if row.get("isolated") is None:
        return "not known"
    if row["isolated"]:
        return "apart"
    parts = []
    if row.get("leak_gradient"):
        parts.append(f"gradient {row['leak_gradient']:.2g}")
    if (row.get("leak_logit") or 0.0) > row.get("allowed_logit", 0.0):
        parts.append(f"logit {row['leak_logit']:.2g}")
    return f"leaks ({', '.join(parts)})" if parts else "leaks"


def _fingerprint_facts(print_of: Mapping[str, Any]) -> Facts:
    for name in ("torch", "cuda", "gpu", "transformers"):
        yield (Suspicion.STACK, name), str(print_of.get(name) or "not known")
    for name in ("triton", "ptxas"):
        yield (Suspicion.KERNEL, name), str(print_of.get(name) or "not known")
    for name in ("driver", "python", "machine"):
        yield (Suspicion.SYSTEM, name), str(print_of.get(name) or "not known")
    for name, version in (print_of.get("distributions") or {}).items():
        yield (Suspicion.KERNEL, f"distribution {name}"), str(version)
    for name, value in (print_of.get("variables") or {}).items():
        yield (Suspicion.SYSTEM, f"variable {name}"), str(value)


def _profiles(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.profile is None or b.profile is None:
        return
    one, two = a.profile["trace"], b.profile["trace"]
    if one is not None and two is not None:
        yield from _differing(_implementation_facts(one), _implementation_facts(two))
    first, second = a.profile["verdict"], b.profile["verdict"]
    if first["bound_by"] != second["bound_by"]:
        yield Change(subject="bound by", a=first["bound_by"], b=second["bound_by"], suspicion=Suspicion.BINDING)
    yield from _both(_trace_numbers(one) if one else {}, _trace_numbers(two) if two else {})
    runs = [profile["run"] or {} for profile in (a.profile, b.profile)]
    unit = per(*(run["summary"] if run else None for run in runs))
    for name, (subject, digits) in _NUMBERS.items():
        yield from _number(subject.format(per=unit), runs[0].get(name), runs[1].get(name), digits)
    gains = [{fix["title"]: fix["gain"] for fix in verdict["fixes"]} for verdict in (first, second)]
    for title in dict.fromkeys((*gains[0], *gains[1])):
        said = [None if title not in gain else f"{gain[title]:.0%} of a step" for gain in gains]
        if said[0] != said[1]:
            yield Change(subject=f"could save at most: {title}", a=said[0], b=said[1], suspicion=Suspicion.BINDING)


def _implementation_facts(trace: Mapping[str, Any]) -> Facts:
    """What each fast path ran on: the first thing to look at where one is slow."""
    told: dict[str, list[str]] = {}
    for row in trace["implementations"]:
        for symbol in row["symbols"]:
            told.setdefault(symbol, []).append(ran_on(row))
    for symbol, texts in told.items():
        yield (Suspicion.BINDING, f"{symbol} ran on"), "; ".join(dict.fromkeys(texts))


def _trace_numbers(trace: Mapping[str, Any]) -> dict[str, tuple[float, int]]:
    """By subject: the number and its digits."""
    steps, totals, idle = max(1, len(trace["steps"])), trace["totals"], trace["idle"]
    causes = {name: title for name, title in _IDLE.items() if name in idle}
    return {
        "milliseconds a step": (trace["step_us"] / 1e3, 1),
        "launches a step": (totals["launches_per_step"], 0),
        "GPU busy share": (totals["gpu_busy_share"], 2),
        **{f"{p['title']}, milliseconds a step": (p["busy_us"] / steps / 1e3, 1) for p in trace["parts"]},
        **{f"GPU idle, {title}, milliseconds a step": (idle[n] / steps / 1e3, 1) for n, title in causes.items()},
        "waits for the GPU a step": (sum(wait["count"] for wait in trace["waits"]) / steps, 1),
        "milliseconds of waiting for the GPU a step": (sum(w["microseconds"] for w in trace["waits"]) / steps / 1e3, 1),
        "copies to the host a step": (trace["copies_to_host"] / steps, 1),
        "compilations": (trace["compilations"]["count"], 0),
        "GPU modules loaded": (trace["compilations"]["modules_loaded"], 0),
    }


def _both(first: Mapping[str, tuple[float, int]], second: Mapping[str, tuple[float, int]]) -> Iterator[Change]:
    for subject in dict.fromkeys((*first, *second)):
        x, y = first.get(subject), second.get(subject)
        yield from _number(subject, x and x[0], y and y[0], (x or y or (0.0, 0))[1])


def _attestations(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.attestation is None or b.attestation is None:
        return
    yield from _differing(_attested(a.attestation), _attested(b.attestation))


def _attested(document: Mapping[str, Any]) -> Facts:
    for name, value in flat(document):
        area = name.split(" ", 1)[0]
        if area in {"written", "preflight_seconds", "collectives"}:
            continue
        binding = area in {"bound", "kernels", "admission", "level", "verdict", "stage"}
        fields = Suspicion.STACK if area in {"fields", "image", "lock"} else Suspicion.OTHER
        yield (Suspicion.BINDING if binding else fields, f"attested {name}"), value


def flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """An attestation's facts one by one."""
    rows: list[tuple[str, str]] = []
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            rows += flat(value, f"{name} ")
        elif isinstance(value, list):
            rows.append((name, "; ".join(str(item) for item in value) or "none"))
        else:
            rows.append((name, "not known" if value is None else str(value)))
    return rows


def _numbers(a: Gathered, b: Gathered) -> Iterator[Change]:
    if a.run is None or b.run is None:
        return
    unit = per(a.run.summary, b.run.summary)
    for name, (subject, digits) in _NUMBERS.items():
        yield from _number(subject.format(per=unit), getattr(a.run, name), getattr(b.run, name), digits)
    losses = [run.losses[-1][1] if run.losses else None for run in (a.run, b.run)]
    yield from _number("last loss", losses[0], losses[1], 4)
    if a.run.summary and b.run.summary:
        yield from _differing(_summary_facts(a.run.summary), _summary_facts(b.run.summary))


def _summary_facts(summary: Mapping[str, Any]) -> Facts:
    for name, value in versions_of_run(summary):
        yield (Suspicion.STACK, name), value


def _number(subject: str, x: float | None, y: float | None, digits: int) -> Iterator[Change]:
    said = [None if value is None else f"{value:,.{digits}f}" for value in (x, y)]
    if said[0] == said[1]:
        return
    yield Change(
        subject=subject,
        a=said[0],
        b=said[1],
        suspicion=Suspicion.BINDING,
        ratio=f"{y / x:.2f} times" if x and y else NONE,
    )
