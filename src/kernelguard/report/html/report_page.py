"""The page of a check, a verdict, a build or a training run, and of what changed between two of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kernelguard.report.html import charts
from kernelguard.report.html.changes import changes, speed
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.profile_page import run_charts
from kernelguard.report.html.render import num, pct, render

_WORSE = ("none", "pass", "warn", "unknown", "fail")
_RIGHT = {"right", "no-backward"}
_MOST_TENSORS = 60
"""Of one case; a verdict's file has all."""
_YES = {
    "resolve": "Kernels exist for every fast path of this model here",
    "import": "The model is bound to its fused kernels",
    "interpreted": "The model is bound to its fused kernels, and they ran in an interpreter",
    "gpu": "The model runs on its fused kernels, and they compute the right thing",
}
"""By the level that was reached: no level claims what only the next one shows."""
_NO = {"fail": "No: this run would not be on its fused kernels", "unknown": "It cannot be told yet"}


def render_report(sources: Sequence[Gathered]) -> str:
    """The whole page, of one source or of two.

    Args:
        sources: One or two; with two, what changed comes first.
    """
    runs = [_run(source, f"run{number}", several=len(sources) > 1) for number, source in enumerate(sources)]
    changed = changes(*sources) if len(sources) == 2 else []
    headline, lead = runs[0]["headline"], runs[0]["lead"]
    if len(sources) == 2:
        headline, lead = _changed_headline(changed, speed(*sources), {run["status"] for run in runs} - {"none"})
    return render(
        "report.html.j2",
        {
            "title": f"{headline} · kernelguard report",
            "headline": headline,
            "lead": lead,
            "runs": runs,
            "changed": changed,
            "several": len(sources) == 2,
        },
    )


def _changed_headline(
    changed: Sequence[tuple[str, Sequence[Any]]], faster: float | None, answers: AbstractSet[str]
) -> tuple[str, str]:
    """What it comes to, and how much there is to read; `faster`: how many times as fast the second is."""
    count = sum(len(rows) for _, rows in changed)
    many = f"{count} thing{'s' if count != 1 else ''} changed"
    if not count:
        return "Nothing that both tell has changed", ""
    if faster is not None and not 0.98 < faster < 1.02:
        how = f"is {num(faster, 2)} times as fast" if faster > 1 else f"takes {num(1 / faster, 2)} times as long"
        return f"B {how} as A", f"{many}."
    return (f"{many}, and with them the answer" if len(answers) > 1 else many), ""


def _run(source: Gathered, key: str, *, several: bool) -> dict[str, Any]:
    """Everything that the template shows of one source."""
    check, verdict = source.check, source.verdict
    headline, lead = _headline(source)
    return {
        "key": key,
        "name": source.source,
        "several": several,
        "headline": headline,
        "lead": lead,
        "status": _status(source),
        "check": check,
        "fixes": _fixes(source),
        "model": _model(check) if check else None,
        "paths": _paths(check) if check else [],
        "not_used": _not_used(check) if check else [],
        "probes": [_probe(probe) for probe in verdict["probes"]] if verdict else [],
        "isolation": verdict["isolation"] if verdict else [],
        "verdict": verdict,
        "build": verdict.get("image") if verdict else None,
        "versions": _versions(source),
        "run": source.run,
        "charts": run_charts(_run_dict(source)),
        "profile": source.profile,
        "attestation": _flat(source.attestation) if source.attestation else [],
        "left_out": source.left_out,
    }


def _run_dict(source: Gathered) -> dict[str, Any] | None:
    if source.run is None:
        return None
    return {"walls": source.run.walls, "losses": source.run.losses, "step_s": source.run.step_s}


def _status(source: Gathered) -> str:
    if source.check is not None:
        return str(source.check["status"])
    if source.verdict is not None:
        words = [_numbers_word(probe) for probe in source.verdict["probes"]]
        return max(words, key=_WORSE.index, default="unknown")
    return "none"


def _numbers_word(probe: Mapping[str, Any]) -> str:
    if probe["outcome"] in _RIGHT:
        return str(probe.get("numbers") or "pass")
    return "fail" if probe["outcome"] in {"wrong", "raised", "crashed"} else "unknown"


def _headline(source: Gathered) -> tuple[str, str]:
    if source.check is not None:
        return _check_headline(source.check), _check_lead(source.check)
    if source.verdict is not None:
        return _verdict_headline(source.verdict)
    if source.run is not None:
        rate = source.run.tokens_per_s
        head = (
            f"{num(rate)} useful tokens a second and GPU" if rate is not None else f"{source.run.step_s:.2f} s a step"
        )
        waiting = source.run.data_wait_s / source.run.step_s
        text = f"{source.run.steps} steps of {source.run.step_s * 1000:,.0f} ms, {waiting:.1%} of it waiting for data."
        return head, text
    if source.profile is not None:
        head, _, rest = str(source.profile["verdict"]["sentence"]).partition(": ")
        return head, rest
    return "What ran here", "The attestation of a launch."


def _check_headline(check: Mapping[str, Any]) -> str:
    if check["status"] in _NO:
        return _NO[check["status"]]
    if not check["fast_paths"]:
        return "This run needs no fused kernel that transformers would fall back from"
    more = ", with something to know" if check["status"] == "warn" else ""
    return f"Yes: {_YES[check['reached']][:1].lower()}{_YES[check['reached']][1:]}{more}"


def _check_lead(check: Mapping[str, Any]) -> str:
    counts = Counter(path["status"] for path in check["fast_paths"])
    said = ", ".join(f"{counts[word]} {word}" for word in ("fail", "unknown", "warn", "pass") if counts[word])
    level, reached = check["level"], check["reached"]
    levels = f"level {level} was asked for, {reached} was reached" if level != reached else f"level {level}"
    total = len(check["fast_paths"])
    paths = f"{total} fast path{'s' if total != 1 else ''}" + (f" ({said})" if said else "")
    return f"{check['model']['model_type']}: {paths}; {levels}; exit\u00a0{check['exit_code']}."


def _verdict_headline(verdict: Mapping[str, Any]) -> tuple[str, str]:
    probes = verdict["probes"]
    wrong = [probe["symbol"] for probe in probes if probe["outcome"] in {"wrong", "raised", "crashed"}]
    right = [probe for probe in probes if probe["outcome"] in _RIGHT]
    leaks = [row for row in verdict["isolation"] if row["isolated"] is False and not row["left_out"]]
    print_of = verdict["fingerprint"]
    where = f"level {verdict['level']}, {print_of['gpu'] or 'no GPU'}, torch {print_of['torch'] or 'not known'}"
    lead = f"{len(right)} of {len(probes)} kernels compute the right thing, forward and backward; {where}."
    if wrong:
        return f"No: {', '.join(wrong)} compute{'s' if len(wrong) == 1 else ''} the wrong thing", lead
    if leaks:
        return "No: packed samples see each other", lead
    if probes and all(_numbers_word(probe) == "pass" for probe in probes):
        return "The kernels compute the right thing", lead
    if probes and len(right) == len(probes):
        return "Right in what was measured, and not everything was", lead
    if not probes and verdict["isolation"]:
        held = all(row["isolated"] for row in verdict["isolation"] if not row["left_out"])
        return ("Packed samples stay apart" if held else "It cannot be told yet"), where.capitalize() + "."
    return "It cannot be told yet", lead


def _fixes(source: Gathered) -> list[dict[str, str]]:
    """What to do, each once, the definite failures first."""
    rows: list[dict[str, str]] = []
    if source.check is not None:
        rows += [
            {"status": path["status"], "about": path["symbol"], "reason": path["reason"], "fix": path["fix"]}
            for path in source.check["fast_paths"]
            if path["fix"] and path["status"] != "pass"
        ]
        rows += [_finding(row) for row in source.check["findings"] if row["fix"] and row["status"] != "pass"]
    if source.verdict is not None:
        rows += [_finding(row) for row in source.verdict.get("findings", []) if row["fix"] and row["status"] != "pass"]
    if source.profile is not None:
        rows += [
            {"status": "warn", "about": fix["title"], "reason": fix["why"], "fix": fix["how"]}
            for fix in source.profile["verdict"]["fixes"]
        ]
    rows.sort(key=lambda row: -_WORSE.index(row["status"]))
    once: dict[str, dict[str, str]] = {}
    for row in rows:
        once.setdefault(row["fix"], row)
    return list(once.values())


def _finding(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        "status": row["status"],
        "about": row["fast_path"] or row["code"],
        "reason": row["reason"],
        "fix": row["fix"],
    }


def _model(check: Mapping[str, Any]) -> dict[str, Any]:
    """The stack of layers, each coloured by the worst of what its fused kernels came to."""
    counts: Mapping[str, int] = check["model"].get("layers") or {}
    matched: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in counts}
    unplaced = []
    total = sum(counts.values())
    for path in check["fast_paths"]:
        kinds = [kind for kind, count in counts.items() if count == path["layers"]]
        if len(kinds) == 1:
            matched[kinds[0]].append(path)
        elif path["layers"] == total and total:
            for paths in matched.values():
                paths.append(path)
        else:
            unplaced.append(path["symbol"])
    worst = {
        kind: max((path["status"] for path in paths), key=_WORSE.index, default="none")
        for kind, paths in matched.items()
    }
    order = check["model"].get("layer_order") or [kind for kind, count in counts.items() for _ in range(count)]
    rows = [
        {
            "kind": kind,
            "count": counts[kind],
            "status": worst[kind],
            "narrower": bool(order) and kind != order[0],
            "paths": [
                {"symbol": path["symbol"], "status": path["status"], "bound_to": path["bound_to"] or "not observed"}
                for path in paths
            ],
        }
        for kind, paths in matched.items()
    ]
    label = "; ".join(f"{row['count']} layers of {row['kind']}: {_said(row)}" for row in rows)
    return {
        "rows": rows,
        "unplaced": unplaced,
        "observed": any(path["bound_to"] for path in check["fast_paths"]),
        "ordered": bool(check["model"].get("layer_order")),
        "svg": charts.stack([charts.Layer(kind=kind, css=worst.get(kind, "none")) for kind in order], label)
        if order
        else "",
    }


def _said(row: Mapping[str, Any]) -> str:
    if row["status"] == "none":
        return "no fused kernel is needed that transformers would fall back from"
    return ", ".join(f"{path['symbol']} {path['status']}" for path in row["paths"])


def _paths(check: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each fast path with the findings about it: the trace of the decision."""
    return [
        {**path, "findings": [row for row in check["findings"] if row["fast_path"] == path["symbol"]]}
        for path in check["fast_paths"]
    ]


def _not_used(check: Mapping[str, Any]) -> list[tuple[str, str]]:
    reasons: dict[str, list[str]] = {}
    for row in check["not_used"]:
        reasons.setdefault(row["reason"], []).append(row["symbol"])
    return [(", ".join(dict.fromkeys(symbols)), reason) for reason, symbols in reasons.items()]


def _probe(probe: Mapping[str, Any]) -> dict[str, Any]:
    """One kernel's cases with a chart each."""
    states = Counter(configuration["state"] for configuration in probe["configurations"])
    measured = sum(count for state, count in states.items() if state != "not-measured")
    return {
        **probe,
        "word": _numbers_word(probe),
        "charts": [_case(case, probe["symbol"]) for case in probe["cases"]],
        "worst": _worst(probe),
        "measured": measured,
        "total": len(probe["configurations"]),
        "wrong_configurations": [
            configuration for configuration in probe["configurations"] if configuration["state"] in {"wrong", "raised"}
        ][:20],
    }


def _case(case: Mapping[str, Any], symbol: str) -> dict[str, Any]:
    tensors = sorted(case["tensors"], key=lambda row: -_share(row))
    rows = [
        charts.ErrorRow(
            label=_tensor(row),
            error=row["error"],
            plain=row["plain"],
            allowed=row["allowed"],
            right=row["state"] == "right",
        )
        for row in tensors[:_MOST_TENSORS]
    ]
    label = f"{symbol}, case {case['name']}: " + ", ".join(
        f"{row.label} {'not measured' if row.error is None else f'error {row.error:.1e}'}" for row in rows[:12]
    )
    return {**case, "tensors": tensors[:_MOST_TENSORS], "left_out": max(0, len(tensors) - _MOST_TENSORS),
            "svg": charts.errors(rows, label)}  # fmt: skip


def _tensor(row: Mapping[str, Any]) -> str:
    return f"{row['role']} {row['name']}" if row["name"] != row["role"] else str(row["name"])


def _share(row: Mapping[str, Any]) -> float:
    if row["error"] is None or not row["allowed"]:
        return math.inf if row["state"] not in {"right", "absent"} else 0.0
    return float(row["error"]) / float(row["allowed"])


def _worst(probe: Mapping[str, Any]) -> str:
    shares = [
        (float(row["error"]) / float(row["allowed"]), _tensor(row), case["name"])
        for case in probe["cases"]
        for row in case["tensors"]
        if row["error"] is not None and row["allowed"]
    ]
    if not shares:
        return str(probe["reason"] or "no numbers at this level")
    share, tensor, case = max(shares)
    return f"nearest to its limit: {tensor} in case {case}, {pct(share)} of what is allowed"


def _versions(source: Gathered) -> list[tuple[str, str]]:
    """Name and version, from whichever document has them."""
    rows: dict[str, str] = {}
    if source.verdict is not None:
        print_of = source.verdict["fingerprint"]
        rows |= {name: str(print_of[name] or "not known") for name in ("gpu", "driver", "torch", "cuda", "triton")}
        rows |= {name: str(print_of[name] or "not known") for name in ("ptxas", "transformers", "python", "machine")}
        rows |= {str(name): str(version) for name, version in print_of["distributions"].items() if name not in rows}
    if source.check is not None:
        environment = source.check["environment"]
        rows |= {"transformers": str(source.check["transformers"]["version"])}
        names = {"torch": "torch", "torch_cuda": "cuda", "triton": "triton", "driver": "driver", "python": "python"}
        rows |= {label: str(environment[name]) for name, label in names.items() if environment.get(name)}
        if environment.get("gpus"):
            rows["gpu"] = ", ".join(gpu["name"] for gpu in environment["gpus"])
    if source.run is not None:
        rows |= {k: str(source.run.summary[k]) for k in ("torch", "gpu", "gpus") if source.run.summary.get(k)}
    return list(rows.items())


def _flat(document: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """An attestation's facts one by one."""
    rows: list[tuple[str, str]] = []
    for key, value in document.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            rows += _flat(value, f"{name} ")
        elif isinstance(value, list):
            rows.append((name, "; ".join(str(item) for item in value) or "none"))
        else:
            rows.append((name, "not known" if value is None else str(value)))
    return rows
