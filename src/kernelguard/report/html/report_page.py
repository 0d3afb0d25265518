"""The page of a check, a verdict, a build or a training run, and of what changed between two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kernelguard.judge.values import Finding, Status, worst
from kernelguard.report.html import charts
from kernelguard.report.html.answers import (
    PACKING,
    Answer,
    kernel_status,
    worst_answer,
)
from kernelguard.report.html.changes import changes, flat, speed
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.measured import isolation_row, own_fix, probes, reason_of, shown_beside
from kernelguard.report.html.profile_page import implementation, run_charts
from kernelguard.report.html.render import num, render
from kernelguard.report.html.run_stack import Ran, run_layers, what_ran
from kernelguard.report.html.words import on_cpu, per, versions_of_run

_WORSE = ("none", "pass", "warn", "unknown", "fail")


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
        headline, lead = _changed_headline(changed, speed(*sources), runs[0]["status"], runs[1]["status"])
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
    changed: Sequence[tuple[str, Sequence[Any]]], faster: float | None, first: str, second: str
) -> tuple[str, str]:
    """What it comes to, and how much there is to read; `faster`: how many times as fast the second is.

    However fast the second is, an answer that got worse with it stands in the same line.
    """
    count = sum(len(rows) for _, rows in changed)
    many = f"{count} thing{'s' if count != 1 else ''} changed"
    other = first != second and "none" not in {first, second}
    if not count:
        same = f"The answer of both is {first}." if first == second and first in {"fail", "unknown"} else ""
        return "Nothing that both tell has changed", same
    if faster is not None and not 0.98 < faster < 1.02:
        how = f"is {num(faster, 2)} times as fast" if faster > 1 else f"takes {num(1 / faster, 2)} times as long"
        worse = other and _WORSE.index(second) > _WORSE.index(first)
        more = f", and its answer is {second}" if worse else ""
        return f"B {how} as A{more}", f"{many}{f', and {first} became {second}' if other else ''}."
    return (
        f"{many}, and with them the answer" if other else many
    ), f"{first.capitalize()} became {second}." if other else ""


def _run(source: Gathered, key: str, *, several: bool) -> dict[str, Any]:
    """Everything that the template shows of one source."""
    check, verdict = source.check, source.verdict
    answers = source.answers()
    headline, lead = _headline(source, answers)
    found = source.findings()
    model, no_stack = _stack(source)
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
        "model": model,
        "no_stack": no_stack,
        "paths": _paths(check) if check else [],
        "not_used": _not_used(check) if check else [],
        "probes": probes(source),
        "isolation": [isolation_row(row, verdict["level"]) for row in verdict["isolation"]] if verdict else [],
        "told": [row for row in found if row.status is not Status.PASS and not shown_beside(row)],
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
            _fix(str(row.status), row.fast_path or row.code, reason_of(row, source.verdict), fix)
            for row in found
            if row.status is not Status.PASS and (fix := row.fix or own_fix(row, source.verdict))
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


def _model(check: Mapping[str, Any], ran: Ran) -> dict[str, Any]:
    """The stack of layers, each coloured by the worst of what its fused kernels came to.

    What packed samples see of each other is another matter, and is told in words.
    """
    status = {
        path["symbol"]: str(worst(map(Status, (kernel_status(check, path), ran.get(path["symbol"], ("pass", ""))[0]))))
        for path in check["fast_paths"]
    }
    leaks = {row["fast_path"]: row["status"] for row in check["findings"] if row["code"] in PACKING}
    counts: Mapping[str, int] = check["model"].get("layers") or {}
    matched, unplaced = _placed(check["fast_paths"], counts)
    order = check["model"].get("layer_order") or [kind for kind, count in counts.items() for _ in range(count)]
    rows = {
        kind: [
            {
                "symbol": path["symbol"],
                "status": status[path["symbol"]],
                "packing": leaks.get(path["symbol"], "pass"),
                "bound_to": "; ".join(filter(None, (path["bound_to"], ran.get(path["symbol"], ("", ""))[1])))
                or "not observed",
            }
            for path in paths
        ]
        for kind, paths in matched.items()
    }
    observed = any(path["bound_to"] or path["symbol"] in ran for path in check["fast_paths"])
    about = (
        "Coloured by what the fused kernels of each layer are really bound to"
        if observed
        else "Coloured by whether kernels exist for each layer; nothing was run"
    )
    if not check["model"].get("layer_order"):
        about += "; the order of the layers is not in this report, so they stand grouped by kind"
    drawn = _drawn(list(order), rows, about)
    return drawn | {"unplaced": unplaced, "packing": any(word != "pass" for word in leaks.values())}


def _placed(
    paths: Iterable[Mapping[str, Any]], counts: Mapping[str, int]
) -> tuple[dict[str, list[Mapping[str, Any]]], list[str]]:
    """By kind of layer the fast paths that it calls, by how many layers do; and those that fit no kind."""
    matched: dict[str, list[Mapping[str, Any]]] = {kind: [] for kind in counts}
    unplaced, total = [], sum(counts.values())
    for path in paths:
        kinds = [kind for kind, count in counts.items() if count == path["layers"]]
        if len(kinds) == 1:
            matched[kinds[0]].append(path)
        elif path["layers"] == total and total:
            for own in matched.values():
                own.append(path)
        else:
            unplaced.append(path["symbol"])
    return matched, unplaced


def _verified(source: Gathered) -> tuple[dict[str, Any] | None, str]:
    """The layers of a verdict's model, each coloured by what its kernels were bound to and how they were measured."""
    verdict = source.verdict or {}
    order = (verdict.get("subject") or {}).get("layers") or []
    if not order:
        return None, "The layers of the model are not in this verdict: kernelguard check MODEL --json draws them"
    found, ran = source.findings(), what_ran(source)
    used = [path for path in verdict["fast_paths"] if path["training"]]
    matched, unplaced = _placed(used, Counter(order))

    def row(path: Mapping[str, Any]) -> dict[str, str]:
        own = [finding.status for finding in found if finding.fast_path == path["symbol"]]
        if path.get("bound_to") == "torch":
            own.append(Status.FAIL)
        if path["symbol"] in ran:
            own.append(Status(ran[path["symbol"]][0]))
        what = "; ".join(
            filter(None, (path.get("target") or path.get("bound_to"), ran.get(path["symbol"], ("", ""))[1]))
        )
        told = {"symbol": path["symbol"], "packing": "pass", "bound_to": what or "not observed"}
        return told | {"status": str(worst(own)) if own else "unknown"}

    rows = {kind: [row(path) for path in paths] for kind, paths in matched.items()}
    drawn = _drawn(order, rows, "Coloured by how the fused kernels of each layer were measured")
    return drawn | {"unplaced": unplaced}, ""


def _stack(source: Gathered) -> tuple[dict[str, Any] | None, str]:
    """The model's layers, of the check or else of the training run; without any, why there is none."""
    if source.check is not None:
        return _model(source.check, what_ran(source)), ""
    if source.verdict is not None and source.run is None:
        return _verified(source)
    kinds, rows, how = run_layers(source)
    if not kinds:
        return None, how
    return _drawn(kinds, {kind: rows.get(kind, []) for kind in dict.fromkeys(kinds)}, f"Coloured {how}"), ""


def _drawn(order: Sequence[str], by_kind: Mapping[str, Sequence[Mapping[str, str]]], about: str) -> dict[str, Any]:
    """The drawing, and a row for each kind of layer."""
    counts = Counter(order)
    answer = {
        kind: max((row["status"] for row in rows), key=_WORSE.index, default="none") for kind, rows in by_kind.items()
    }
    rows = [
        {
            "kind": kind,
            "count": counts[kind],
            "status": answer[kind],
            "narrower": kind != order[0],
            "paths": paths,
        }
        for kind, paths in by_kind.items()
    ]
    label = "; ".join(f"{row['count']} layers of {row['kind']}: {_said(row)}" for row in rows)
    layers = [charts.Layer(kind=kind, css=answer.get(kind, "none")) for kind in order]
    return {
        "rows": rows,
        "unplaced": [],
        "packing": False,
        "about": about,
        "svg": charts.stack(layers, label) if layers else "",
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
