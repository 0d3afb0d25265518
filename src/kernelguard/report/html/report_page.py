"""The page of a check, a verdict, a build or a training run, and of what changed between two of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from kernelguard.judge.values import Finding, Status, worst
from kernelguard.report.html import charts
from kernelguard.report.html.answers import (
    PACKING,
    Answer,
    kernel_status,
    probe_status,
    verdict_findings,
    worst_answer,
)
from kernelguard.report.html.changes import changes, flat, speed
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.profile_page import implementation, run_charts
from kernelguard.report.html.render import num, pct, render
from kernelguard.report.html.words import on_cpu, per, sent, versions_of_run

_WORSE = ("none", "pass", "warn", "unknown", "fail")
_MOST_TENSORS = 60
"""Of one case; a verdict's file has all."""


def render_report(sources: Sequence[Gathered]) -> str:
    """The whole page, of one source or of two.

    Args:
        sources: One or two; with two, what changed comes first.

    Raises:
        InputError: two hold nothing of one kind.
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
    answers = source.answers()
    headline, lead = _headline(source, answers)
    found = verdict_findings(verdict, check) if verdict else ()
    return {
        "key": key,
        "name": source.source,
        "several": several,
        "headline": headline,
        "lead": lead,
        "answers": answers if len(answers) > 1 else (),
        "status": str(worst(answer.status for answer in answers)) if answers else "none",
        "check": check,
        "fixes": _fixes(source, found),
        "model": _model(check) if check else None,
        "paths": _paths(check) if check else [],
        "not_used": _not_used(check) if check else [],
        "probes": [_probe(verdict, number) for number in range(len(verdict["probes"]))] if verdict else [],
        "isolation": [_isolation(row, verdict["level"]) for row in verdict["isolation"]] if verdict else [],
        "told": [row for row in found if row.status is not Status.PASS and not _shown_beside(row)],
        "verdict": verdict,
        "build": verdict.get("image") if verdict else None,
        "versions": _versions(source),
        "run": source.run,
        "per": per(source.run.summary) if source.run else "GPU",
        "charts": run_charts(_run_dict(source)),
        "implementations": [implementation(row) for row in _trace_of(source)],
        "attestation": flat(source.attestation) if source.attestation else [],
        "left_out": source.left_out,
    }


def _trace_of(source: Gathered) -> Sequence[Mapping[str, Any]]:
    trace = source.profile["trace"] if source.profile is not None else None
    return trace["implementations"] if trace else ()


def _run_dict(source: Gathered) -> dict[str, Any] | None:
    if source.run is None:
        return None
    return {"walls": source.run.walls, "losses": source.run.losses, "step_s": source.run.step_s}


def _headline(source: Gathered, answers: Sequence[Answer]) -> tuple[str, str]:
    """The worst of all answers; numbers of a run or of a trace only where no answer is worse than they are telling."""
    decides = worst_answer(answers)
    only_numbers = all(answer.about in {"trace", "launch"} for answer in answers)
    if decides is not None and not (only_numbers and decides.status in {Status.PASS, Status.WARN}):
        return decides.headline, decides.lead
    if source.run is not None:
        rate, unit = source.run.tokens_per_s, per(source.run.summary)
        where = ", on the CPU" if on_cpu(source.run.summary) else ""
        head = (
            f"{num(rate)} useful tokens a second and {unit}{where}"
            if rate is not None
            else f"{source.run.step_s:.2f} s a step{where}"
        )
        waiting = source.run.data_wait_s / source.run.step_s
        text = f"{source.run.steps} steps of {source.run.step_s * 1000:,.0f} ms, {waiting:.1%} of it waiting for data."
        return head, text
    if source.profile is not None:
        head, _, rest = str(source.profile["verdict"]["sentence"]).partition(": ")
        return head, rest
    return (decides.headline, decides.lead) if decides else ("What ran here", "The attestation of a launch.")


def _fixes(source: Gathered, found: Sequence[Finding]) -> list[dict[str, Any]]:
    """What to do, each once, the definite failures first; what a profile would save has its share and no answer."""
    rows: list[dict[str, Any]] = []
    if source.check is not None:
        rows += [
            _fix(path["status"], path["symbol"], path["reason"], path["fix"])
            for path in source.check["fast_paths"]
            if path["fix"] and path["status"] != "pass"
        ]
        rows += [
            _fix(row["status"], row["fast_path"] or row["code"], row["reason"], row["fix"])
            for row in source.check["findings"]
            if row["fix"] and row["status"] != "pass"
        ]
    if source.verdict is not None:
        rows += [
            _fix(str(row.status), row.fast_path or row.code, row.reason, fix)
            for row in found
            if row.status is not Status.PASS and (fix := row.fix or _own_fix(row, source.verdict))
        ]
    rows.sort(key=lambda row: -_WORSE.index(row["status"]))
    if source.profile is not None:
        fixes = source.profile["verdict"]["fixes"]
        rows += [_fix("none", fix["title"], fix["why"], fix["how"]) | {"gain": fix["gain"]} for fix in fixes]
    once: dict[str, dict[str, Any]] = {}
    for row in rows:
        once.setdefault(row["fix"], row)
    return list(once.values())


def _fix(status: str, about: str, reason: str, fix: str) -> dict[str, Any]:
    return {"status": status, "about": about, "reason": reason, "fix": fix, "gain": None}


def _own_fix(finding: Finding, verdict: Mapping[str, Any]) -> str:
    """Where `verify` names no fix of its own."""
    model = (verdict.get("subject") or {}).get("source") or "MODEL"
    again = f"kernelguard verify {model} -o verdict.json"
    if finding.code == "packed-samples-leak":
        rows = [row for row in verdict["isolation"] if not row.get("left_out") and row.get("isolated") is False]
        if all(_only_logits(row) and "allowed_logit" not in row for row in rows):
            return f"{again}  # this file does not say what rounding alone does to a logit; a new one does"
        return "turn packing off for this model (no set of signals that was tried keeps its samples apart)"
    if finding.code in {"verify-problem", "isolation-not-verified", "numbers"}:
        return again
    return ""


def _only_logits(row: Mapping[str, Any]) -> bool:
    error, allowed = row.get("worst_error"), row.get("allowed")
    return not row.get("leak_gradient") and not (error is not None and allowed is not None and error > allowed)


def _shown_beside(finding: Finding) -> bool:
    """Beside the kernel's own numbers or in the table of signals."""
    return finding.code in {
        "wrong-result", "wrong-configuration", "kernel-crashes", "kernel-raises", "could-not-interpret", "loads",
        "interpreted", "packed-samples-leak",
    } or finding.code.startswith("could-not-verify-")  # fmt: skip


def _isolation(row: Mapping[str, Any], level: str) -> dict[str, Any]:
    """One set of signals: what crossed a boundary, and how much of it rounding alone would explain."""
    isolated = row.get("isolated")
    if isolated is None:
        status = "unknown"
    elif isolated:
        status = "pass" if level == "gpu" else "unknown"
    else:
        status = "warn" if row.get("left_out") else "fail"
    layers = ", ".join(row.get("leaking_layers") or ())
    why = [layers] if layers else []
    if isolated is False and not layers:
        why.append("no layer by itself")
        if _only_logits(row) and "allowed_logit" not in row:
            why.append("only a logit moved, and this file does not say how much rounding alone moves it")
    if isolated and level != "gpu":
        why.append("without a GPU; on one it was not measured")
    return {
        "status": status,
        "sent": sent(row),
        "gradient": row.get("leak_gradient"),
        "logit": row.get("leak_logit"),
        "allowed_logit": row.get("allowed_logit", 0.0),
        "parameter": row.get("worst_error"),
        "allowed": row.get("allowed"),
        "why": "; ".join(filter(None, [*why, row.get("detail")])) or "nothing",
    }


def _model(check: Mapping[str, Any]) -> dict[str, Any]:
    """The stack of layers, each coloured by the worst of what its fused kernels came to.

    What packed samples see of each other is another matter, and is told in words.
    """
    status = {path["symbol"]: kernel_status(check, path) for path in check["fast_paths"]}
    leaks = {row["fast_path"]: row["status"] for row in check["findings"] if row["code"] in PACKING}
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
        kind: max((status[path["symbol"]] for path in paths), key=_WORSE.index, default="none")
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
                {
                    "symbol": path["symbol"],
                    "status": status[path["symbol"]],
                    "packing": leaks.get(path["symbol"], "pass"),
                    "bound_to": path["bound_to"] or "not observed",
                }
                for path in paths
            ],
        }
        for kind, paths in matched.items()
    ]
    label = "; ".join(f"{row['count']} layers of {row['kind']}: {_said(row)}" for row in rows)
    return {
        "rows": rows,
        "unplaced": unplaced,
        "packing": any(word != "pass" for word in leaks.values()),
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


def _probe(verdict: Mapping[str, Any], number: int) -> dict[str, Any]:
    """One kernel's cases with a chart each."""
    probe = verdict["probes"][number]
    configurations = probe.get("configurations") or []
    states = Counter(configuration["state"] for configuration in configurations)
    measured = sum(count for state, count in states.items() if state != "not-measured")
    reason = str(probe.get("reason") or "")
    return {
        "target": "",
        "dtype": "",
        "seconds": 0.0,
        **probe,
        "reason": reason,
        "word": str(probe_status(verdict, number)),
        "charts": [_case(case, probe["symbol"], reason) for case in probe.get("cases") or ()],
        "worst": _worst(probe),
        "measured": measured,
        "total": len(configurations),
        "wrong_configurations": [row for row in configurations if row["state"] in {"wrong", "error"}][:20],
    }


def _case(case: Mapping[str, Any], symbol: str, said: str) -> dict[str, Any]:
    detail = str(case.get("detail") or "")
    tensors = sorted(case.get("tensors") or (), key=lambda row: -_share(row))
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
    return {
        **case,
        # The first case's error is the kernel's reason already.
        "detail": "" if detail in said else detail,
        "lengths": case.get("lengths") or [],
        "tensors": tensors[:_MOST_TENSORS],
        "left_out": max(0, len(tensors) - _MOST_TENSORS),
        "svg": charts.errors(rows, label),
    }


def _tensor(row: Mapping[str, Any]) -> str:
    return f"{row['role']} {row['name']}" if row["name"] != row["role"] else str(row["name"])


def _share(row: Mapping[str, Any]) -> float:
    if row["error"] is None or not row["allowed"]:
        return math.inf if row["state"] not in {"right", "absent"} else 0.0
    return float(row["error"]) / float(row["allowed"])


def _worst(probe: Mapping[str, Any]) -> str:
    shares = [
        (float(row["error"]) / float(row["allowed"]), _tensor(row), case["name"])
        for case in probe.get("cases") or ()
        for row in case.get("tensors") or ()
        if row["error"] is not None and row["allowed"]
    ]
    if not shares:
        cases = [case for case in probe.get("cases") or () if case["outcome"] == probe["outcome"]]
        return f"in case {', '.join(case['name'] for case in cases)}" if cases else "no numbers"
    share, tensor, case = max(shares)
    return f"nearest to its limit: {tensor} in case {case}, {pct(share)} of what is allowed"


def _versions(source: Gathered) -> list[tuple[str, str]]:
    """Name and version, from whichever document has them."""
    rows: dict[str, str] = {}
    if source.verdict is not None:
        print_of = source.verdict["fingerprint"]
        rows |= {name: str(print_of.get(name) or "not known") for name in ("gpu", "driver", "torch", "cuda", "triton")}
        rows |= {
            name: str(print_of.get(name) or "not known") for name in ("ptxas", "transformers", "python", "machine")
        }
        rows |= {
            str(name): str(version)
            for name, version in (print_of.get("distributions") or {}).items()
            if name not in rows
        }
    if source.check is not None:
        environment = source.check["environment"]
        rows |= {"transformers": str(source.check["transformers"]["version"])}
        names = {"torch": "torch", "torch_cuda": "cuda", "triton": "triton", "driver": "driver", "python": "python"}
        rows |= {label: str(environment[name]) for name, label in names.items() if environment.get(name)}
        if environment.get("gpus"):
            rows["gpu"] = ", ".join(gpu["name"] for gpu in environment["gpus"])
    if source.run is not None:
        rows |= dict(versions_of_run(source.run.summary))
    return list(rows.items())
