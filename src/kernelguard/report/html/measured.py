"""What does a verdict show on a page? Each kernel's errors beside what is allowed, each set of signals, its fixes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from kernelguard.judge.values import Finding
from kernelguard.report.html import charts
from kernelguard.report.html.answers import probe_status
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.render import pct
from kernelguard.report.html.words import sent

_MOST_TENSORS = 60
"""Of one case; a verdict's file has all."""


def own_fix(finding: Finding, verdict: Mapping[str, Any]) -> str:
    """Where `verify` names no fix of its own."""
    model = (verdict.get("subject") or {}).get("source") or "MODEL"
    again = f"kernelguard verify {model} -o verdict.json"
    if finding.code == "packed-samples-leak":
        if _undecided(verdict):
            return again
        return "turn packing off for this model (no set of signals that was tried keeps its samples apart)"
    if finding.code in {"verify-problem", "isolation-not-verified", "numbers"}:
        return again
    return ""


def _undecided(verdict: Mapping[str, Any]) -> bool:
    """All that tells of a leak is a logit that moved, in a file that does not say how much rounding moves it."""
    rows = [row for row in verdict["isolation"] if not row.get("left_out") and row.get("isolated") is False]
    return all(_only_logits(row) and "allowed_logit" not in row for row in rows)


def reason_of(finding: Finding, verdict: Mapping[str, Any]) -> str:
    """The finding's reason, and what the file lacks that would decide it."""
    if finding.code == "packed-samples-leak" and _undecided(verdict):
        return f"{finding.reason}; this file does not say how much rounding alone moves them, and a new one does"
    return finding.reason


def _only_logits(row: Mapping[str, Any]) -> bool:
    error, allowed = row.get("worst_error"), row.get("allowed")
    return not row.get("leak_gradient") and not (error is not None and allowed is not None and error > allowed)


def shown_beside(finding: Finding) -> bool:
    """Beside the kernel's own numbers or in the table of signals."""
    return finding.code in {
        "wrong-result", "wrong-configuration", "kernel-crashes", "kernel-raises", "could-not-interpret", "loads",
        "interpreted", "packed-samples-leak",
    } or finding.code.startswith("could-not-verify-")  # fmt: skip


def isolation_row(row: Mapping[str, Any], level: str) -> dict[str, Any]:
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


def probes(source: Gathered) -> list[dict[str, Any]]:
    """Each kernel that was measured."""
    verdict, measured = source.verdict, source.measured
    if verdict is None or measured is None:
        return []
    words = [str(probe_status(verdict, measured, number)) for number in range(len(verdict["probes"]))]
    return [_probe(probe, word) for probe, word in zip(verdict["probes"], words, strict=True)]


def _probe(probe: Mapping[str, Any], word: str) -> dict[str, Any]:
    """One kernel's cases with a chart each."""
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
        "word": word,
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
