"""The page of a profile: the verdict first, then the fixes, then the numbers; drawn from the profile's document."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kernelguard.report.html import charts
from kernelguard.report.html.answers import path_status
from kernelguard.report.html.render import NONE, ms, num, pct, render
from kernelguard.report.html.words import per, ran_on

_CSS = {
    "host launch": "launch",
    "data": "data",
    "the script's own Python": "script",
    "padding": "padding",
    "communication": "communication",
    "straggler": "straggler",
    "GEMM": "gemm",
    "memory": "memory",
    "delta rule, scans, convolution": "sequence",
    "kernels of unknown kind": "other",
    "not known": "unknown",
}
_WHAT = {
    "host launch": "the GPU waits for the next launch, or runs kernels shorter than 10 µs",
    "data": "the GPU stands still while the host reads a batch",
    "the script's own Python": "the GPU stands still and no thread runs anything of torch",
    "padding": "computing on tokens that belong to no sample",
    "communication": "communication that no computing hides",
    "straggler": "waiting in collectives for the slowest rank",
    "GEMM": "matrix products and attention",
    "memory": "elementwise work, norms, copies, the optimizer: moves bytes",
    "delta rule, scans, convolution": "kernels of linear attention",
    "kernels of unknown kind": "names that matrices/kernel_parts.toml does not know",
    "not known": "needs a trace",
}
_AVOIDABLE = {"host launch", "data", "the script's own Python", "padding", "communication", "straggler"}
_GROUPS = {
    "gemm": "matrix products, attention",
    "sequence": "delta rule, scans, convolution",
    "memory": "memory: elementwise, norms, copies, optimizer",
    "communication": "communication alone",
    "other": "other kernels",
}


def render_profile(document: Mapping[str, Any]) -> str:
    """The whole page.

    Args:
        document: What `report.profile.to_document` made, or read back from its JSON.
    """
    trace, run = document["trace"], document["run"]
    verdict = _verdict(document)
    headline, lead = _headline(verdict["sentence"])
    return render(
        "profile.html.j2",
        {
            "title": f"{headline} · kernelguard profile",
            "source": document["source"],
            "headline": headline,
            "lead": lead,
            "verdict": verdict,
            "trace": _trace(trace, run) if trace else None,
            "timeline": _timeline(trace["timeline"]) if trace and trace["timeline"] else None,
            "run": run,
            "per": per(run["summary"]) if run else "GPU",
            "charts": run_charts(run),
            "ranks": document["ranks"],
        },
    )


def _headline(sentence: str) -> tuple[str, str]:
    """The verdict in a few words, and the numbers behind it."""
    head, colon, rest = sentence.partition(": ")
    if not colon:
        return sentence[:1].upper() + sentence[1:], ""
    return head[:1].upper() + head[1:], rest[:1].upper() + rest[1:]


def _verdict(document: Mapping[str, Any]) -> dict[str, Any]:
    verdict, trace, run = document["verdict"], document["trace"], document["run"]
    step = trace["step_us"] if trace else run["step_s"] * 1e6 if run else 0.0
    rows = [
        {
            "cause": row["cause"],
            "css": _CSS.get(row["cause"], "other"),
            "what": _WHAT.get(row["cause"], ""),
            "share": row["share"],
            "us": row["share"] * step,
        }
        for row in verdict["shares"]
    ]
    first = rows[0] if rows else None
    return {
        **verdict,
        "shares": rows,
        "avoidable": first is not None and first["cause"] in _AVOIDABLE,
        "top_share": first["share"] if first else None,
        "top_label": f"of the step: {first['what']}" if first else "",
        "bar_label": ", ".join(f"{row['cause']} {pct(row['share'])}" for row in rows),
    }


def _trace(trace: Mapping[str, Any], run: Mapping[str, Any] | None) -> dict[str, Any]:
    totals = trace["totals"]
    steps = max(1, len(trace["steps"]))
    said = run["gpu_utilization"] if run else None
    return {
        **trace,
        "seen": said / 100 if said is not None else totals["utilization_share"],
        "seen_by": "utilization, as NVML said while it trained"
        if said is not None
        else "utilization, as a counter sees it: of each millisecond, whether any kernel ran",
        "waits_per_step": sum(wait["count"] for wait in trace["waits"]) / steps,
        "parts": [_part(part, steps) for part in trace["parts"]],
        "implementations": [implementation(row) for row in trace["implementations"]],
    }


def _part(part: Mapping[str, Any], steps: int) -> dict[str, Any]:
    rate, of_peak = NONE, None
    if part["tflops"] is not None:
        rate, of_peak = f"{num(part['tflops'])} TFLOP/s", part["peak_share"]
    elif part["gb_s"] is not None:
        rate, of_peak = f"{num(part['gb_s'])} GB/s", part["memory_share"]
    return {
        **part,
        "step_us": part["busy_us"] / steps,
        "step_launches": part["launches"] / steps,
        "rate": rate,
        "of_peak": of_peak,
    }


def implementation(row: Mapping[str, Any]) -> dict[str, Any]:
    """One fast path of a trace: the answer, what it ran on, and which ways."""
    ways = " and ".join(way for way in ("forward", "backward") if row[way])
    return {**row, "status": str(path_status(row)), "ran_on": ran_on(row), "ways": ways or NONE}


def _timeline(data: Mapping[str, Any]) -> dict[str, Any]:
    groups = {name: tuple(values) for name, values in data["groups"].items()}
    order = [name for name in _GROUPS if name in groups]
    count = len(data["host"])
    busy = [min(1.0, sum(groups[name][slot] for name in order)) for slot in range(count)]
    idle = tuple(1.0 - value for value in busy)
    host, waiting = tuple(data["host"]), tuple(data["waiting"])
    lanes = (
        charts.Lane(title="CPU", layers=(("host", host), ("waiting", waiting))),
        charts.Lane(title="GPU", layers=tuple((name, groups[name]) for name in order)),
        charts.Lane(title="GPU idle", layers=(("launch", idle),)),
    )
    label = (
        f"{data['title']}, {ms(data['width'])}: CPU busy {pct(_mean(host))}, "
        f"waiting for the GPU {pct(_mean(waiting))}, "
        f"GPU busy {pct(_mean(busy))}, idle {pct(_mean(idle))}"
    )
    read = {"CPU": host, "waiting": waiting, "GPU": busy, "idle": idle}
    slices = {
        "lanes": [[name, [round(100 * value) for value in values]] for name, values in read.items()],
        "width": data["width"],
        "left": charts.LEFT,
        "right": charts.RIGHT,
    }
    legend = [
        {"css": "host", "title": "CPU: in operators and launches", "share": _mean(host)},
        {"css": "waiting", "title": "CPU: waiting for the GPU", "share": _mean(waiting)},
        *({"css": name, "title": f"GPU: {_GROUPS[name]}", "share": _mean(groups[name])} for name in order),
        {"css": "launch", "title": "GPU: idle", "share": _mean(idle)},
    ]
    return {
        "svg": charts.timeline(lanes, data["width"], label),
        "slices": json.dumps(slices, separators=(",", ":")),
        "legend": legend,
    }


def _mean(values: Any) -> float:
    return sum(values) / len(values) if len(values) else 0.0


def run_charts(run: Mapping[str, Any] | None) -> dict[str, Any]:
    """The drawings of a training run's own numbers; empty ones where there is nothing to draw."""
    if run is None:
        return {"walls": "", "losses": ""}
    walls, losses = run["walls"], run["losses"]
    return {
        "walls": charts.line(walls, f"seconds of {len(walls)} steps, median {run['step_s']:.3g}", unit="s"),
        "losses": charts.line(
            losses,
            f"loss from {losses[0][1]:.3g} to {losses[-1][1]:.3g}" if losses else "",
            "sequence",
            unit="nats",
            from_zero=False,
        ),
    }
