"""How are the ladder's rungs read, rated and shown? Used by ladder.py, and without torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

UNIT = 8192
"""Tokens that operator counts and times are given for: rungs differ in how many an update has."""
SHAPE = {"hidden": 5120, "inner": 17_408, "vocabulary": 248_320, "channels": 10_240, "values": 6144, "layers": 8,
         "recurrent": 6, "attention": 2, "heads": 24, "head": 256,
         "parameters": 5.587e9, "products": 4.315e9}  # fmt: skip
"""Eight of the 64 layers of the 27B; `products` are the parameters that a token is multiplied with."""


QUEUED = ("cpu_queue_ms_per_8192", "gpu_busy_ms_per_8192", "gpu_ops_per_8192")
"""What the host needs to queue 8192 computed tokens, what the GPU needs to run them, in how many kernels and copies."""


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}  # the rung ended before it was written; its row says why
    return found


def read(folder: Path, settings: dict[str, Any], *, trainer: bool) -> dict[str, Any]:
    """What a rung left in its folder, under the table's names; `trainer`: it was the trainer that ran."""
    seen, profile = _json(folder / "rung.json"), _json(folder / "profile.json")
    summary = _json(folder / ("summary.json" if trainer else "rung.loop.json"))
    names = ("tokens_per_s", "computed_tokens_per_s", "trained_tokens_per_s", "mfu", "mfu_with_attention", "peak_gib",
             "density", "steps", "step_p50_s", "data_wait_s", "torch", "gpu", "eager_tokens_per_s", "eager_loss",
             "graph_loss", "problem")  # fmt: skip
    row: dict[str, Any] = {name: summary[name] for name in names if name in summary}
    if "step_s" in summary:
        row["step_ms"] = 1000 * summary["step_s"]
    lines = (
        (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines() if (folder / "steps.jsonl").exists() else []
    )
    steps = [json.loads(text) for text in lines]
    row["losses"] = [step["loss"] for step in steps]
    row["step_times_s"] = [step["step_s"] for step in steps]
    row["settings"] = settings
    row |= {key: value for key, value in seen.items() if key not in {"imports_s", "seconds", "tuned_late"}}
    if "problem" in profile:
        row["profile_problem"] = profile["problem"]
    elif profile:
        row["profile"] = profile
        scale = UNIT / profile["tokens"] if profile.get("tokens") else 1.0
        for name in ("cpu_queue_ms", "gpu_busy_ms", "gpu_ops", "cpu_ops"):
            row[f"{name}_per_8192"] = profile[name] * scale
    return row


def rate(result: dict[str, Any]) -> None:
    """Adds each row's ratio to the first rung's tokens per second."""
    rows = result["rungs"]
    first = rows[0].get("tokens_per_s") if rows and rows[0]["rung"] == "naive" else None
    for row in rows:
        if first and row.get("tokens_per_s") and row["model"] == "27b":
            row["ratio"] = row["tokens_per_s"] / first
    for model in {row["model"] for row in rows} - {"27b"}:
        own = [row for row in rows if row["model"] == model and row.get("tokens_per_s")]
        naive = next((row for row in own if row["rung"].endswith("naive")), None)
        for row in own:
            row.pop("ratio", None)
            if naive:
                row["ratio"] = row["tokens_per_s"] / naive["tokens_per_s"]


def line(row: dict[str, Any]) -> str:
    """One row for the console."""
    if "tokens_per_s" not in row:
        return f"{row['rung']}: {row.get('problem', 'no result')[-600:]}"
    mfu = f"MFU {100 * row['mfu']:.1f} %, " if "mfu" in row else ""
    text = f"{row['rung']}: {row['tokens_per_s']:,.0f} tokens/s, {row.get('ratio', 0):.2f}x, {mfu}"
    return (
        text + f"{row.get('peak_gib', 0):.0f} GiB" + (f" PROBLEM {row['problem'][-300:]}" if "problem" in row else "")
    )


def headline(problem: str) -> str:
    """The line of a problem that says the most: the last exception's, or else the first."""
    lines = [re.sub(r"^\[rank\d+\]: ", "", line.strip()) for line in problem.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line) or "Error: " in line]
    return " ".join((errors or lines or [""])[-1 if errors else 0].split())[:160]


def join(results: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """Several calls on one machine as one table, in the order of the rungs' names.

    The first is the one that counts: a later one only adds rungs that it lacks, or that came to nothing in it. Each row
    names its call, and each call its command.
    """
    joined = {**results[0], "rungs": [], "calls": []}
    rows: dict[str, dict[str, Any]] = {}
    for number, result in enumerate(results, 1):
        if result["versions"].get("gpu") != results[0]["versions"].get("gpu"):
            raise ValueError(
                f"call {number} ran on {result['versions'].get('gpu')}, not on {joined['versions']['gpu']}"
            )
        joined["calls"].append({"command": result["command"], "left_out": result.get("left_out", [])})
        joined["versions"] = result["versions"] | joined["versions"]
        for row in result["rungs"]:
            if "tokens_per_s" not in rows.get(row["rung"], {}):
                rows[row["rung"]] = row | {"call": number}
    joined["rungs"] = sorted(rows.values(), key=lambda row: order.index(row["rung"]))
    joined.pop("left_out", None)
    rate(joined)
    return joined


def table(rows: list[dict[str, Any]]) -> str:
    """The rungs as a Markdown table."""
    columns = ("tokens/s", "ratio", "MFU", "peak GiB", "step ms", "tokens/step", "CPU ms", "GPU ms", "GPU ops")
    lines = [f"| rung | adds | {' | '.join(columns)} |", "|---|---|" + "--:|" * len(columns)]
    for row in rows:
        if "tokens_per_s" not in row:
            why = headline(row.get("problem", "")) or "no result"
            lines.append(f"| {row['rung']} | {row['adds']} | {why} |" + " |" * (len(columns) - 1))
            continue
        mfu = f"{100 * row['mfu']:.1f} %" if "mfu" in row else ""
        tokens = row["tokens_per_s"] * row["step_ms"] / 1000
        ratio = f"{row['ratio']:.2f}" if "ratio" in row else ""
        lines.append(
            f"| {row['rung']} | {row['adds']} | {row['tokens_per_s']:,.0f} | {ratio} | {mfu} | "
            f"{row.get('peak_gib', 0):.0f} | {row['step_ms']:,.0f} | {tokens:,.0f} | "
            + " | ".join(f"{row[key]:,.0f}" if key in row else "" for key in QUEUED)
            + " |"
        )
    return "\n".join(lines)


def profiles(rows: list[dict[str, Any]], shown: int = 10) -> str:
    """For each recorded rung its totals, and the operators that take the CPU's and the GPU's time."""
    parts = []
    for row in rows:
        profile = row.get("profile")
        if not profile or "top_cpu" not in profile:
            continue
        parts.append(
            f"### {row['rung']}: {profile['tokens']:,} tokens and one update\n\n"
            f"CPU {profile['cpu_queue_ms']:,.0f} ms in {profile['cpu_ops']:,} operators, "
            f"GPU {profile['gpu_busy_ms']:,.0f} ms in {profile['gpu_ops']:,} kernels and copies\n\n"
            "| CPU operator | calls | self ms |\n|---|--:|--:|\n"
            + "\n".join(f"| `{r['name'][:60]}` | {r['calls']:,} | {r['ms']:,.1f} |" for r in profile["top_cpu"][:shown])
            + "\n\n| GPU kernel | calls | ms |\n|---|--:|--:|\n"
            + "\n".join(f"| `{r['name'][:60]}` | {r['calls']:,} | {r['ms']:,.1f} |" for r in profile["top_gpu"][:shown])
        )
    return "\n\n".join(parts)


def bounds(squared_per_token: float, ceilings: dict[str, float], tokens_per_update: float) -> dict[str, float]:
    """Least milliseconds per 8192 tokens of each part: operations or bytes over the measured ceilings.

    Args:
        squared_per_token: Sum of squared sample lengths over the tokens.
        ceilings: `tflops` of the best bf16 product and `tb_s` of a large copy, reads and writes counted.
        tokens_per_update: Over which the optimizer's bytes are spread.
    """
    s = SHAPE
    flop = UNIT / ceilings["tflops"] / 1e9
    byte = UNIT * 2 / ceilings["tb_s"] / 1e9  # per bf16 element of each token
    mixing = 2 * 2048 + s["values"]
    attention = 3.5 * 4 * s["attention"] * s["heads"] * s["head"] * squared_per_token / 2
    wide_norms = (2 * s["layers"] + 1) * s["hidden"] + s["attention"] * 28 * s["head"]
    return {
        "products": 6 * s["products"] * flop,
        "delta rule": s["recurrent"] * (3 * mixing + 2 * s["values"]) * byte,
        "convolution": s["recurrent"] * 5 * s["channels"] * byte,
        "attention": attention * flop,
        "norms": (5 * wide_norms + 8 * s["recurrent"] * s["values"]) * byte,
        "activations": s["layers"] * 9 * s["inner"] * byte,
        "cross entropy": 3 * s["vocabulary"] * byte,
        "optimizer": 38 * s["parameters"] / ceilings["tb_s"] / 1e9 * UNIT / tokens_per_update,
        "other elementwise": 4 * 3 * s["layers"] * s["hidden"] * byte,
        "copies": 0.0,
    }


def roofline(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each part of the last bf16 rung's step: milliseconds per 8192 tokens, least possible, what lies between."""
    row = next((r for r in reversed(result["rungs"]) if r["rung"] == "final" and r.get("profile")), None)
    if row is None or not result.get("ceilings") or "step_ms" not in row:
        return []
    per_update = row["computed_tokens_per_s"] * row["step_ms"] / 1000
    recorded = row["profile"]
    least = bounds(1391.0, result["ceilings"], per_update)
    found, busy = [], 0.0
    for part in {*recorded["parts"], *least}:
        own = recorded["parts"].get(part, {"ms": 0.0})["ms"]
        tokens = per_update if part == "optimizer" else recorded["tokens"]
        ms = own * UNIT / tokens
        busy += ms
        found.append({"part": part, "ms": ms, "bound_ms": least.get(part, 0.0)})
    whole = UNIT / row["computed_tokens_per_s"] * 1000
    found.append({"part": "idle (step less the recorded step's kernels)", "ms": whole - busy, "bound_ms": 0.0})
    for entry in found:
        entry["lost_ms"] = entry["ms"] - entry["bound_ms"]
    found.sort(key=lambda entry: -entry["lost_ms"])
    return [
        *found,
        {"part": "step", "ms": whole, "bound_ms": sum(least.values()), "lost_ms": whole - sum(least.values())},
    ]


def roofline_table(entries: list[dict[str, Any]], ceilings: dict[str, float]) -> str:
    """The roofline as Markdown."""
    head = (
        f"Ceilings measured on this GPU: {ceilings['tflops']:.0f} TFLOP/s in short bf16 products "
        f"({ceilings.get('tflops_sustained', 0):.0f} when they go on for a second: the power limit), "
        f"{ceilings['tb_s']:.2f} TB/s.\n\n| part, per 8192 tokens | ms | least ms | between |\n|---|--:|--:|--:|\n"
    )
    return head + "\n".join(
        f"| {e['part']} | {e['ms']:.1f} | {e['bound_ms']:.1f} | {e['lost_ms']:.1f} |" for e in entries
    )


def extrapolation(result: dict[str, Any]) -> dict[str, Any]:
    """64 layers on 32 GPUs, from the last bf16 rung. Computed, not measured: each assumption is in the result."""
    row = next((r for r in reversed(result["rungs"]) if r["rung"] == "final" and r.get("profile")), None)
    if row is None or "computed_tokens_per_s" not in row:
        return {}
    s = SHAPE
    layers, head = 8, s["vocabulary"] * s["hidden"]
    share = 1 - head / s["products"]
    per_unit = UNIT / row["computed_tokens_per_s"]
    compute = per_unit * (share * 64 / layers + (1 - share))
    parameters = 64 / layers * (s["products"] - head) + 2 * head
    matmul = 64 / layers * (s["products"] - head) + head
    node = 8 * 50e9  # bytes per second: eight links of 400 Gb/s, each of which carries its own ring
    moved = parameters * (2 * 2 + 4)  # gathered twice in bf16, gradients scattered in float32
    communication = moved / node
    slowest = max(compute, communication)
    found = {}
    for name, seconds in (("hidden", slowest), ("in the open", compute + communication)):
        rate_ = UNIT / seconds
        found[name] = {"step_s": seconds, "tokens_per_s_per_gpu": rate_, "mfu": 6 * matmul * rate_ / 989e12}
    return {
        "measured": False, "compute_s": compute, "communication_s": communication, **found,
        "assumptions": [
            "8192 tokens per GPU and update, as published; layers and output layer cost what they do in the slice",
            "all activations kept, about 205 KB per token and layer: 107 GB; parameters and optimizer state: 13.5 GB",
            "FSDP over all 32: weights gathered twice in bf16, gradients scattered in float32; 8 x 400 Gb/s a node",
            "hidden: all of it behind the computation; in the open: none of it. FSDP's own copies are not counted",
        ],
    }  # fmt: skip


def plot(rows: list[dict[str, Any]]) -> str:
    """The 27B's rungs as bars, in SVG."""
    shown = [row for row in rows if row["model"] == "27b" and "tokens_per_s" in row]
    if not shown:
        return ""
    most = max(row["tokens_per_s"] for row in shown)
    colours = {"bf16": "#2f6f9f", "float8": "#b5651d", "masked": "#7a9a3a", "beside": "#888888", "variant": "#8d7fb8"}
    height, left, width = 26, 190, 470
    view = f'viewBox="0 0 800 {height * len(shown) + 40}" font-family="sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {view} role="img" aria-label="tokens per second of each rung">',
        f'<rect width="800" height="{height * len(shown) + 40}" fill="white"/>',
        '<text x="10" y="20" font-weight="bold">8 layers of the 27B on one GPU, tokens per second</text>',
    ]
    for number, row in enumerate(shown):
        top = 32 + number * height
        long = width * row["tokens_per_s"] / most
        note = f"{row['tokens_per_s']:,.0f} ({row.get('ratio', 0):.1f}x"
        note += f", {100 * row['mfu']:.0f} %)" if "mfu" in row else ")"
        parts += [
            f'<text x="{left - 8}" y="{top + 16}" text-anchor="end">{row["rung"]}</text>',
            f'<rect x="{left}" y="{top + 3}" width="{long:.1f}" height="{height - 7}" fill="{colours[row["kind"]]}"/>',
            f'<text x="{left + long + 6:.1f}" y="{top + 16}">{note}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def write(result: dict[str, Any], folder: Path, name: str, hidden: dict[str, str]) -> None:
    """NAME.json, NAME.md and NAME.svg, as far as they are known; a path in `hidden` is written as its word there."""

    def shown(text: str) -> str:
        for path, word in sorted(hidden.items(), key=lambda item: -len(item[0])):
            text = text.replace(path, word) if path else text
        return text

    folder.mkdir(parents=True, exist_ok=True)
    entries = roofline(result)
    result["roofline"], result["extrapolation"] = entries, extrapolation(result)
    (folder / f"{name}.json").write_text(shown(json.dumps(result, indent=1)) + "\n", encoding="utf-8")
    calls = result.get("calls") or [result]
    text = [f"# {name}\n", *(f"`{call['command']}`\n" for call in calls)]
    text.append(", ".join(f"{key} {value}" for key, value in result["versions"].items()) + "\n")
    text.append(table(result["rungs"]) + "\n")
    if entries:
        text += ["## Where the time goes\n", roofline_table(entries, result["ceilings"]) + "\n"]
    if result["extrapolation"]:
        text += ["## 64 layers on 32 GPUs: computed, not measured\n", "```json"]
        text += [json.dumps(result["extrapolation"], indent=1), "```\n"]
    text += ["## Profiles\n", profiles(result["rungs"]) + "\n"]
    (folder / f"{name}.md").write_text(shown("\n".join(text)), encoding="utf-8")
    (folder / f"{name}.svg").write_text(plot(result["rungs"]), encoding="utf-8")
