"""A verdict for a person: one line per kernel with both errors of its worst tensor, then what it means."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kernelguard.judge.values import Finding
from kernelguard.report.terminal import line, note, print_finding
from kernelguard.verify.values import ProbeResult, Verdict


def print_verdict(console: Console, verdict: Verdict, findings: Sequence[Finding]) -> None:
    """Print the whole verdict."""
    console.print()
    line(console, Text(f"verified at level {verdict.level.name.lower()} in {verdict.seconds:.0f} s", style="bold"))
    if not verdict.probes:
        line(console, Text("no kernel that the model is bound to was there to be measured"))
    for probe in verdict.probes:
        note(console, str(probe.outcome), f"{probe.symbol}: {_numbers(probe)}", width=14)
    if verdict.trace is not None and verdict.trace.first_step_seconds is not None:
        later = verdict.trace.step_seconds
        text = f"first step of a new process {verdict.trace.first_step_seconds:.1f} s"
        note(console, "step", text + (f", a later one {later:.2f} s" if later is not None else ""), width=14)
    for finding in findings:
        print_finding(console, finding)


def _numbers(probe: ProbeResult) -> str:
    """The tensor that is nearest to its allowed error, and how many configurations were measured."""
    tensors = [
        (tensor.error / tensor.allowed, case.name, tensor)
        for case in probe.cases
        for tensor in case.tensors
        if tensor.error is not None and tensor.allowed
    ]
    texts = [probe.reason] if probe.reason else []
    if tensors:
        share, case_name, tensor = max(tensors, key=lambda row: row[0])
        texts.append(
            f"{len(tensors)} tensors; nearest to its limit is {tensor.label} ({case_name}): error {tensor.error:.2g}, "
            f"plain torch {tensor.plain or 0.0:.2g}, allowed {tensor.allowed:.2g} ({share:.0%})"
        )
    if probe.configurations:
        measured = sum(c.state != "not-measured" for c in probe.configurations)
        texts.append(f"{measured} of {len(probe.configurations)} autotuner configurations measured")
    others = [f"{name} {state}" for name, state in probe.backends.items() if state == "ran" or "declined" in state]
    if others:
        texts.append(f"handed on: {', '.join(others)}")
    return "; ".join(texts) or "no numbers at this level"
