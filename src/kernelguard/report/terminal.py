"""A check for a person at a terminal: header, one line per fast path with reason and fix, one summary line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kernelguard.judge.values import FastPathAnswer, Finding, Status, worst
from kernelguard.observe.values import Environment
from kernelguard.report.document import Check, assumed_texts
from kernelguard.report.lines import filled

if TYPE_CHECKING:
    # Only names of types: importing the rooms of other commands would cost a static check a twentieth of its time.
    from kernelguard.judge.rules import Explanation, OpenRule, Rule
    from kernelguard.matrix import KernelPackage
    from kernelguard.report.difference import Difference

_WORD = {Status.PASS: "pass", Status.WARN: "warn", Status.FAIL: "FAIL", Status.UNKNOWN: "unknown"}
# Named ANSI colours follow the terminal's own theme, so they read on dark and on light; the word carries the meaning.
_STYLE = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.UNKNOWN: "magenta"}
_INDENT = 9


def print_check(console: Console, check: Check, *, closes: bool = True) -> None:
    """Print the whole report; without its closing line where a command goes on."""
    print_header(console, _header(check))
    for path in check.assessment.fast_paths:
        _print_path(console, path)
    if not check.assessment.fast_paths:
        remote = check.declaration.remote
        is_foreign = remote is not None and remote.runs
        line(
            console,
            Text(
                "Which fused kernels the checkpoint's own code needs is not known."
                if is_foreign
                else "This run needs no fused kernel that transformers would fall back from."
            ),
        )
    for finding in check.assessment.findings:
        if finding.fast_path is None:
            print_finding(console, finding)
    _print_open_rules(console, check.open_rules)
    for reason in dict.fromkeys(n.reason for n in check.assessment.not_used):
        names = dict.fromkeys(n.symbol for n in check.assessment.not_used if n.reason == reason)
        note(console, "not used", f"{', '.join(names)}: {reason}")
    if check.intent.source not in {"nothing was said", "command line"}:
        note(console, "intent", check.intent.source)
    assumed = assumed_texts(check.intent)
    if assumed:
        note(console, "assumed", " ".join(assumed))
    if closes:
        paths = count("fast path", (path.status for path in check.assessment.fast_paths))
        level, reached = check.assessment.level.name.lower(), check.assessment.reached.name.lower()
        far = f"level {level}" + (f" asked, {reached} reached" if level != reached else "")
        close(console, check.status, f"{check.declaration.config.model_type}, {paths}", far, code=check.exit_code)


def print_header(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print what the answer is about, one thing a line; not wrapped, because paths and names are copied from here."""
    for label, value in rows:
        console.print(Text(f"{label:<13}", style="dim") + Text(value), soft_wrap=True, highlight=False)
    console.print()


def count(noun: str, statuses: Iterable[Status]) -> str:
    """`3 findings (1 FAIL, 2 pass)`, the worst first."""
    found = list(statuses)
    counts = {s: found.count(s) for s in (Status.FAIL, Status.UNKNOWN, Status.WARN, Status.PASS)}
    said = ", ".join(f"{number} {_WORD[s]}" for s, number in counts.items() if number)
    return f"{len(found) or 'no'} {noun}{'s' if len(found) != 1 else ''}" + (f" ({said})" if said else "")


def close(console: Console, status: Status, *said: str, code: int | None, apart: bool = True) -> None:
    """Print the one line that says it all, the last of every answer; `apart`: something stands above it."""
    parts = [*said, *([] if code is None else [f"exit {code}"])]
    if apart:
        console.print()
    line(console, Text(_WORD[status].upper(), style=_STYLE[status]) + Text(f": {'; '.join(parts)}", style="default"))


def print_findings(console: Console, about: str, findings: Sequence[Finding], *, code: int | None) -> None:
    """Print findings that belong to no fast path in particular, and the closing line; `code` None: it goes on."""
    for finding in findings:
        print_finding(console, finding)
    statuses = [finding.status for finding in findings]
    close(console, worst(statuses), f"{about}, {count('finding', statuses)}", code=code, apart=bool(findings))


def print_explanation(console: Console, explanation: Explanation) -> None:
    """Print one rule for a person."""
    line(console, Text(explanation.id, style="bold") + Text(f"  ({explanation.status})"))
    rows = {
        "what": explanation.title,
        "effect": explanation.effect,
        "when": explanation.condition,
        "fix": explanation.fix,
        "note": explanation.note,
        "bounds": "" if explanation.bounds_established else "where this begins and ends is not established",
        "expires": f"{explanation.expires}; after that it only warns" if explanation.expires else "",
        "evidence": "\n".join(explanation.evidence),
        "looked at": explanation.retrieved,
    }
    for label, value in rows.items():
        if value:
            note(console, label, value, width=12)


def print_matrix(console: Console, rules: Iterable[Rule], packages: Iterable[KernelPackage]) -> None:
    """Print the list of rules and of kernel packages."""
    line(console, Text("rules (kernelguard explain RULE)", style="bold"))
    for rule in rules:
        line(console, _status(rule.status) + Text(rule.id))
        line(console, Text(rule.title, style="dim"), indent=_INDENT)
    console.print()
    line(console, Text("kernel packages (kernelguard matrix show kernels/PACKAGE)", style="bold"))
    for package in packages:
        note(console, package.package, ", ".join(package.symbols) or "no symbols listed", width=16)


def print_differences(console: Console, a: str, b: str, differences: Sequence[Difference]) -> None:
    """Print what changed, most suspicious first."""
    if not differences:
        line(console, Text(f"{a} and {b} do not differ"))
        return
    line(console, Text(f"- {a}", style="red"))
    line(console, Text(f"+ {b}", style="green"))
    heading = None
    for difference in differences:
        if difference.suspicion is not heading:
            heading = difference.suspicion
            console.print()
            line(console, Text(heading.name.lower(), style="bold"))
        line(console, Text(difference.subject), indent=2)
        line(console, Text(f"- {_or_absent(difference.a)}", style="red"), indent=4)
        line(console, Text(f"+ {_or_absent(difference.b)}", style="green"), indent=4)


def _or_absent(value: str | None) -> str:
    return "(not there)" if value is None else value


def _header(check: Check) -> Iterator[tuple[str, str]]:
    declaration, environment = check.declaration, check.environment
    kinds = ", ".join(f"{k.count} {k.name}" for k in declaration.layer_kinds)
    yield "model", f"{declaration.config.model_type} ({declaration.config.source})"
    if kinds:
        yield "layers", kinds
    tree = declaration.transformers
    yield "transformers", f"{tree.version} (from {tree.origin})"
    yield "environment", _environment(environment)
    yield "torch", _torch(environment)
    yield "gpu", _gpu(environment)


def _environment(environment: Environment) -> str:
    python = f", Python {environment.python}" if environment.python else ""
    return f"{environment.origin}{python}"


def _torch(environment: Environment) -> str:
    if environment.torch is None:
        return "not installed" if environment.live else "not given"
    cuda = "CPU build" if environment.torch_is_cpu else f"CUDA {environment.torch_cuda or 'not known'}"
    triton = f"triton {environment.triton}" if environment.triton else "no triton" if environment.live else ""
    return ", ".join(filter(None, (f"{environment.torch}", cuda, triton)))


def _gpu(environment: Environment) -> str:
    driver = f", driver {environment.driver}" if environment.driver else ""
    if environment.gpus:
        first = environment.gpus[0]
        capability = f" (sm_{first.capability[0]}{first.capability[1]})" if first.capability else ""
        count = f"{len(environment.gpus)} x " if len(environment.gpus) > 1 else ""
        detail = f"; {environment.gpu_detail}" if environment.gpu_detail else ""
        return f"{count}{first.name}{capability}{driver}{detail}"
    return (environment.gpu_detail or f"{environment.gpu_state}") + driver


def _print_path(console: Console, path: FastPathAnswer) -> None:
    layers = "layers not known" if path.layers is None else f"{path.layers} layer{'s' if path.layers != 1 else ''}"
    fix = "" if path.status is Status.PASS else path.fix
    print_entry(console, path.status, path.symbol, f"{layers} of {path.model_type}", reasons=[path.reason], fixes=[fix])


def print_finding(console: Console, finding: Finding) -> None:
    """Print one finding with its reason and fix."""
    print_entry(
        console, finding.status, finding.code, finding.fast_path or "", reasons=[finding.reason], fixes=[finding.fix]
    )


def print_entry(
    console: Console, status: Status, name: str, about: str, *, reasons: Iterable[str], fixes: Iterable[str]
) -> None:
    """Print one answer: its line, and under it what it rests on and what to do about it."""
    line(console, _status(status) + Text(name, style="bold") + Text(f"  {about}" if about else "", style="dim"))
    for reason in reasons:
        line(console, Text(reason), indent=_INDENT)
    for fix in filter(None, fixes):
        print_fix(console, fix)


def print_fix(console: Console, fix: str) -> None:
    """Print what to do; a command in it stays on one line, however long it is."""
    head = "fix: "
    for text in filled(fix, max(console.width - _INDENT - len(head), 20)):
        row = Text(" " * _INDENT) + Text(head, style="cyan") + Text(text)
        console.print(row, soft_wrap=True, highlight=False)
        head = " " * len(head)


def _print_open_rules(console: Console, rules: Sequence[OpenRule]) -> None:
    """Which known bad combinations only a missing fact keeps from applying; `explain` and --json tell the rest."""
    if not rules:
        return
    many = f"{len(rules)} known bad combinations depend" if len(rules) > 1 else "1 known bad combination depends"
    note(console, "open", f"{many} on what was left open (kernelguard explain):")
    for rule in rules:
        note(console, "", f"{rule.rule_id}: {rule.title}")


def note(console: Console, label: str, text: str, *, width: int = _INDENT) -> None:
    """Print a dim label in a column of its own, and text that wraps beside it."""
    lines = [line for part in text.split("\n") for line in Text(part).wrap(console, max(console.width - width, 20))]
    for index, line in enumerate(lines):
        line.rstrip()
        head = f"{label if index == 0 else '':<{width}}"
        console.print(Text(head, style="dim") + line, soft_wrap=True, highlight=False)


def _status(status: Status) -> Text:
    return Text(f"{_WORD[status]:<{_INDENT}}", style=_STYLE[status])


def line(console: Console, text: Text, *, indent: int = 0) -> None:
    """Print wrapped text whose every line is indented, without trailing blanks that a log would keep."""
    for line in text.wrap(console, max(console.width - indent, 20)):
        line.rstrip()
        console.print(Text(" " * indent) + line, soft_wrap=True, highlight=False)
