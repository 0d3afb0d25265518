"""A profile as a JSON document (`kernelguard profile --json`) and at a terminal; its form is `profile.schema.json`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.text import Text

from kernelguard.judge.values import Status
from kernelguard.report.terminal import close, line, note, print_fix
from kernelguard.trace.bound import RECORD, Cause
from kernelguard.trace.device import SHORT_US, PartTime
from kernelguard.trace.profile import Profile
from kernelguard.trace.ranks import Spread
from kernelguard.trace.runs import RunFacts

SCHEMA = 1
"""Version of the document. Keys are only ever added."""
TOP = 30
"""Rows of the tables of operators and kernels; the totals are of all."""


def to_document(found: Profile | None, run: RunFacts | None, ranks: Spread | None = None) -> dict[str, Any]:
    """The document of one profile: a trace, a training run of ours, or both. Times are microseconds."""
    return {
        "schema": SCHEMA,
        "kind": "profile",
        "source": found.source if found else run.folder if run else "",
        "verdict": _verdict(found, run),
        "trace": _trace(found) if found else None,
        "run": _run(run) if run else None,
        "ranks": _ranks(ranks) if ranks and len(ranks.rows) > 1 else None,
    }


def _verdict(found: Profile | None, run: RunFacts | None) -> dict[str, Any]:
    if found is None:
        return _verdict_of_run(run)
    bound = found.bound
    return {
        "bound_by": str(bound.cause),
        "known": bound.cause is not Cause.UNKNOWN,
        "sentence": bound.sentence,
        "utilization_paradox": bound.paradox,
        "shares": [{"cause": str(cause), "share": share} for cause, share in bound.shares],
        "fixes": [asdict(fix) for fix in bound.fixes],
    }


def _verdict_of_run(run: RunFacts | None) -> dict[str, Any]:
    """Without a trace only data and padding can be told, and what is left cannot."""
    if run is None:
        raise ValueError("a profile is of a trace, of a run, or of both")
    waited = min(1.0, run.data_wait_s / run.step_s)
    padded = (1 - waited) * (1 - run.density) if run.density is not None else 0.0
    causes = {Cause.DATA: waited, Cause.PADDING: padded, Cause.UNKNOWN: max(0.0, 1 - waited - padded)}
    cause = max(causes, key=lambda c: causes[c])
    fix = {
        "title": "Record two steps with torch.profiler",
        "why": "steps.jsonl tells how long a step takes, not what the GPU does in it",
        "how": RECORD,
        "gain": 0.0,
    }
    said = {
        Cause.DATA: f"Bound by data: {waited:.0%} of a step waits for its batch",
        Cause.PADDING: f"Bound by padding: {padded:.0%} of a step computes padding",
        Cause.UNKNOWN: f"Not known without a trace what bounds it: {waited:.0%} of a step waits for data and "
        f"{padded:.0%} computes padding; of the rest steps.jsonl says nothing",
    }
    return {
        "bound_by": str(cause),
        "known": cause is not Cause.UNKNOWN,
        "sentence": f"{said[cause]}. {run.step_s * 1000:,.0f} ms a step.",
        "utilization_paradox": False,
        "shares": [{"cause": str(c), "share": s} for c, s in sorted(causes.items(), key=lambda row: -row[1]) if s],
        "fixes": [fix],
    }


def _trace(found: Profile) -> dict[str, Any]:
    steps = found.step_count
    return {
        "source": found.source,
        "rank": found.rank,
        "gpu": found.gpu or None,
        "versions": dict(found.versions),
        "peak": asdict(found.peak) if found.peak else None,
        "window_us": found.wall,
        "steps": [
            {"number": s.number, "wall_us": s.wall, "busy_us": s.busy, "launches": s.launches} for s in found.steps
        ],
        "step_us": found.wall / steps,
        "totals": {
            "self_cpu_us": found.self_host,
            "gpu_us": found.kernels_total,
            "gpu_busy_us": found.busy,
            "gpu_busy_share": found.busy / found.wall if found.wall else 0.0,
            "utilization_share": found.coarse,
            "launches": found.launches,
            "launches_per_step": found.launches / steps,
            "short_launches": found.short,
            "short_us": found.short_us,
            "short_limit_us": SHORT_US,
            "mean_kernel_us": sum(r.microseconds for r in found.kernels) / found.launches if found.launches else 0.0,
            "operator_calls": sum(o.calls for o in found.operators if o.name.startswith("aten::")),
        },
        "idle": {**asdict(found.idle), "total": found.idle.total},
        "communication": {"total_us": found.communication, "exposed_us": found.exposed_communication},
        "parts": [_part(part, found) for part in found.parts],
        "operators": [
            {**asdict(o), "kind": o.kind.name.lower(), "mean_host": o.total_host / o.calls}
            for o in found.operators[:TOP]
        ],
        "operators_total": len(found.operators),
        "kernels": [
            {**asdict(k), "label": readable(k.name), "mean": k.microseconds / k.count} for k in found.kernels[:TOP]
        ],
        "kernels_total": len(found.kernels),
        "waits": [asdict(wait) for wait in found.waits],
        "stalls": [asdict(stall) for stall in found.stalls],
        "recomputed_us": found.recomputed,
        "copies_to_host": found.copies_to_host,
        "compilations": {"count": found.compilations, "us": found.compile_us, "modules_loaded": found.module_loads},
        "implementations": [asdict(i) for i in found.implementations],
        "timeline": asdict(found.timeline) if found.timeline else None,
        "has_shapes": found.has_shapes,
        "notes": list(found.notes),
        "events": found.events,
        "json_bytes": found.json_bytes,
    }


def _part(part: PartTime, found: Profile) -> dict[str, Any]:
    """One part of the step, and how near it comes to what the GPU can do."""
    tflops = part.operations / part.operations_time / 1e6 if part.operations_time else None
    gb_s = part.bytes / part.bytes_time / 1e3 if part.bytes_time and part.bound == "memory" else None
    return {
        "name": part.name,
        "title": part.title,
        "bound": part.bound,
        "busy_us": part.busy,
        "share": part.busy / found.wall if found.wall else 0.0,
        "kernels_us": part.kernels,
        "launches": part.launches,
        "short_us": part.short_us,
        "tflops": tflops,
        "peak_share": tflops / found.peak.bf16_tflops if tflops and found.peak else None,
        "gb_s": gb_s,
        "memory_share": gb_s / found.peak.memory_gb_s if gb_s and found.peak else None,
    }


def _run(run: RunFacts) -> dict[str, Any]:
    return {
        **asdict(run),
        "losses": [list(point) for point in run.losses],
        "walls": [list(point) for point in run.walls],
        "summary": dict(run.summary),
    }


def _ranks(ranks: Spread) -> dict[str, Any]:
    return {
        "rows": [asdict(row) for row in ranks.rows],
        "slowest": ranks.slowest.rank if ranks.slowest else None,
        "waiting_share": ranks.waiting,
    }


def print_profile(console: Console, document: Mapping[str, Any], *, code: int) -> None:
    """Print the verdict, what to do, the tables, and the line that says it all, for a terminal."""
    verdict, trace, run = document["verdict"], document["trace"], document["run"]
    line(console, Text(verdict["sentence"], style="bold"))
    console.print()
    for fix in verdict["fixes"]:
        gain = f"{fix['gain']:>6.0%}" if fix["gain"] else " first"
        note(console, gain, f"{fix['title']}: {fix['why']}")
        print_fix(console, fix["how"])
    _print_facts(console, document)
    about = f"bound by {verdict['bound_by']}" if verdict["known"] else "not known what bounds it"
    step = trace["step_us"] if trace else run["step_s"] * 1e6
    count = len(verdict["fixes"])
    fixes = f"{count or 'no'} fix{'' if count == 1 else 'es'}"
    close(console, Status.UNKNOWN if code else Status.PASS, about, f"{_ms(step)} a step", fixes, code=code)


def _print_facts(console: Console, document: Mapping[str, Any]) -> None:
    verdict, trace, run = document["verdict"], document["trace"], document["run"]
    if run:
        console.print()
        _print_name(console, "folder", run["folder"])
        for label, value in _run_lines(run):
            note(console, label, value, width=16)
    if trace is None:
        return
    if verdict["shares"]:
        console.print()
        line(console, Text("where the step goes", style="bold"))
        for row in verdict["shares"]:
            note(console, f"{row['share']:>6.1%}", row["cause"])
    console.print()
    _print_name(console, "trace", trace["source"])
    if document["ranks"]:
        note(console, "ranks", _ranks_line(document["ranks"], trace["rank"]), width=16)
    for label, value in _total_lines(trace):
        note(console, label, value, width=16)
    for found in trace["implementations"]:
        note(console, "fast path", _implementation(found), width=16)
    _print_operators(console, trace)
    _print_kernels(console, trace)
    if trace["notes"]:
        console.print()
    for text in trace["notes"]:
        note(console, "note", text, width=16)


def _print_name(console: Console, label: str, name: str) -> None:
    """Not wrapped: what is copied from here must be whole."""
    console.print(Text(f"{label:<16}", style="dim") + Text(name), soft_wrap=True, highlight=False)


def _ranks_line(ranks: Mapping[str, Any], shown: int | None) -> str:
    walls = [row["wall"] for row in ranks["rows"]]
    which = "" if shown is None else f", rank {shown} is shown"
    waits = "" if ranks["slowest"] is None else f"; the others wait for rank {ranks['slowest']}"
    return f"{len(walls)} traces{which}; a step takes {_ms(min(walls))} to {_ms(max(walls))}{waits}"


def _run_lines(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        (
            "run",
            f"{run['steps']} steps of {run['step_s'] * 1000:,.0f} ms, data wait {run['data_wait_s'] * 1000:,.1f} ms",
        )
    ]
    if run["tokens_per_s"] is not None:
        density = f", {1 - run['density']:.1%} of what is computed is padding" if run["density"] is not None else ""
        unit = "GPU" if (run.get("summary") or {}).get("gpu") else "rank"
        rows.append(("tokens", f"{run['tokens_per_s']:,.0f} useful a second and {unit}{density}"))
    if run["mfu"] is not None:
        rows.append(("MFU", f"{run['mfu']:.1%}"))
    return rows


def _total_lines(trace: Mapping[str, Any]) -> list[tuple[str, str]]:
    totals = trace["totals"]
    waits = sum(wait["count"] for wait in trace["waits"])
    share = totals["short_launches"] / max(1, totals["launches"])
    versions = [f"{name} {version}" for name, version in trace.get("versions", {}).items()]
    small = f"{share:.0%} shorter than {totals['short_limit_us']:.0f} µs"
    rows = [
        ("gpu", ", ".join([trace["gpu"] or "the trace names none", *versions])),
        ("CPU total", f"{_ms(totals['self_cpu_us'])} (self CPU time of all operators)"),
    ]
    if not totals["launches"]:
        return rows
    return [
        *rows,
        ("GPU total", f"{_ms(totals['gpu_us'])} (all kernels and copies)"),
        (
            "GPU busy",
            f"{totals['gpu_busy_share']:.0%}; a utilization counter would say {totals['utilization_share']:.0%}",
        ),
        ("launches", f"{totals['launches_per_step']:,.0f} a step, {totals['mean_kernel_us']:,.1f} µs each, {small}"),
        ("waits for GPU", f"{waits / max(1, len(trace['steps'])):,.0f} a step"),
        ("compilations", f"{trace['compilations']['count']} in {_ms(trace['compilations']['us'])}"),
    ]


def _implementation(found: Mapping[str, Any]) -> str:
    symbols = ", ".join(found["symbols"])
    if not found["package"]:
        return f"{symbols}: the slow path's operators ran: {', '.join(found['fallbacks'])}"
    ways = " and ".join(way for way in ("forward", "backward") if found[way])
    both = f"; the slow path's operators too: {', '.join(found['fallbacks'])}" if found["fallbacks"] else ""
    return f"{symbols}: {found['package']}, {ways}, {found['launches']} launches, {_ms(found['microseconds'])}{both}"


def _print_operators(console: Console, trace: Mapping[str, Any]) -> None:
    _print_table(
        console,
        "top operators on the host",
        ("operator", "self", "total", "calls", "mean"),
        [
            (o["name"], _ms(o["self_host"]), _ms(o["total_host"]), f"{o['calls']:,}", f"{o['mean_host']:,.1f} µs")
            for o in trace["operators"][:10]
        ],
    )


def _print_kernels(console: Console, trace: Mapping[str, Any]) -> None:
    _print_table(
        console,
        "top kernels on the GPU",
        ("kernel", "total", "calls", "mean"),
        [
            (k["label"], _ms(k["microseconds"]), f"{k['count']:,}", f"{k['mean']:,.1f} µs")
            for k in trace["kernels"][:10]
        ],
    )


def _print_table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Names are shortened to what the numbers leave them: a number must never be."""
    if not rows:
        return
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    left = max(16, console.width - sum(widths[1:]) - 2 * (len(columns) - 1))
    widths[0] = min(widths[0], left)
    console.print()
    line(console, Text(title, style="bold"))
    for index, row in enumerate((columns, *rows)):
        name = row[0] if len(row[0]) <= widths[0] else row[0][: widths[0] - 1] + "…"
        cells = [f"{name:<{widths[0]}}", *(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))]
        console.print(Text("  ".join(cells), style="dim" if index == 0 else ""), soft_wrap=True)


_NOISE = re.compile(
    r"^void\s+|\(anonymous namespace\)::|at::native::|c10::|std::|TensorList\w*Metadata<\d+>,\s*|at_cuda_detail::|"
    r"binary_internal::"
)


def readable(kernel: str) -> str:
    """A C++ kernel's name without what all of them share and without its parameters: the functor tells what it does."""
    bare = _NOISE.sub("", kernel)
    depth = 0
    for position, sign in enumerate(bare):
        depth += (sign == "<") - (sign == ">" and bare[position - 1 : position + 1] != "->")
        if sign == "(" and depth == 0:
            return bare[:position]
    return bare


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1000:,.1f} ms"
