"""A check for a person at a terminal: header, one line per fast path with reason and fix, one summary line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from kernelguard.judge.values import FastPathAnswer, Finding, Status
from kernelguard.observe.values import Environment
from kernelguard.report.document import Check, assumed_texts

if TYPE_CHECKING:
    # Only names of types: importing the rooms of other commands would cost a static check a twentieth of its time.
    from kernelguard.judge.rules import Explanation, OpenRule, Rule
    from kernelguard.matrix import KernelPackage
    from kernelguard.report.difference import Difference

_WORD = {Status.PASS: "pass", Status.WARN: "warn", Status.FAIL: "FAIL", Status.UNKNOWN: "unknown"}
# Named ANSI colours follow the terminal's own theme, so they read on dark and on light; the word carries the meaning.
_STYLE = {Status.PASS: "green", Status.WARN: "yellow", Status.FAIL: "bold red", Status.UNKNOWN: "magenta"}
_INDENT = 9


def print_check(console: Console, check: Check) -> None:
    """Print the whole report."""
    for label, value in _header(check):
        console.print(Text(f"{label:<13}", style="dim") + Text(value), soft_wrap=True, highlight=False)
    console.print()
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
    console.print()
    line(console, summary(check))


def summary(check: Check) -> Text:
    """The one line that says it all."""
    assessment = check.assessment
    total = len(assessment.fast_paths)
    counts = {s: sum(p.status is s for p in assessment.fast_paths) for s in Status}
    said = [f"{counts[s]} {_WORD[s]}" for s in (Status.FAIL, Status.UNKNOWN, Status.WARN, Status.PASS) if counts[s]]
    model = check.declaration.config.model_type
    text = Text(_WORD[check.status].upper(), style=_STYLE[check.status])
    text.append(f": {model}, ", style="default")
    text.append(f"{total} fast path{'s' if total != 1 else ''}" + (f" ({', '.join(said)})" if said else ""), "default")
    level, reached = assessment.level.name.lower(), assessment.reached.name.lower()
    text.append(
        f"; level {level}" + (f" asked, {reached} reached" if level != reached else "") + f"; exit {check.exit_code}",
        "default",
    )
    return text


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
    head = _status(path.status) + Text(path.symbol, style="bold")
    layers = "layers not known" if path.layers is None else f"{path.layers} layer{'s' if path.layers != 1 else ''}"
    head.append(f"  {layers} of {path.model_type}", style="dim")
    line(console, head)
    line(console, Text(path.reason), indent=_INDENT)
    if path.fix and path.status is not Status.PASS:
        _print_fix(console, path.fix)


def print_finding(console: Console, finding: Finding) -> None:
    """Print one finding with its reason and fix."""
    about = f"  {finding.fast_path}" if finding.fast_path else ""
    line(console, _status(finding.status) + Text(finding.code, style="bold") + Text(about, style="dim"))
    line(console, Text(finding.reason), indent=_INDENT)
    if finding.fix:
        _print_fix(console, finding.fix)


def _print_fix(console: Console, fix: str) -> None:
    # Not wrapped: a command broken over two lines cannot be pasted.
    text = Text(" " * _INDENT) + Text("fix: ", style="cyan") + Text(fix)
    console.print(text, soft_wrap=True, highlight=False)


def _print_open_rules(console: Console, rules: Sequence[OpenRule]) -> None:
    """Which known bad combinations only a missing fact keeps from applying; `explain` and --json tell the rest."""
    if not rules:
        return
    note(console, "open", f"{len(rules)} known bad combinations depend on what was left open (kernelguard explain):")
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
