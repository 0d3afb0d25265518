"""A verdict for a person: for each kernel the answer, why, and both errors of its worst tensor; then one line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from kernelguard.judge.values import Finding, Status, exit_code, worst
from kernelguard.report.terminal import close, count, line, note, print_entry, print_finding
from kernelguard.verify.values import ProbeResult, Verdict


def print_verdict(
    console: Console,
    verdict: Verdict,
    findings: Sequence[Finding],
    *,
    status: Status,
    strict: bool,
    paths: Sequence[Status] = (),
) -> None:
    """Print what was measured. `status` is the whole command's; `paths`: the bindings, told before this."""
    symbols = dict.fromkeys(probe.symbol for probe in verdict.probes)
    answers = {symbol: worst(f.status for f in findings if f.fast_path == symbol) for symbol in symbols}
    line(console, Text("kernels", style="bold"))
    for symbol, answer in answers.items():
        probes = [probe for probe in verdict.probes if probe.symbol == symbol]
        own = [finding for finding in findings if finding.fast_path == symbol]
        said = [*(finding.reason for finding in own), *filter(None, map(_numbers, probes))]
        outcome = ", ".join(dict.fromkeys(str(probe.outcome) for probe in probes))
        fixes = dict.fromkeys(finding.fix for finding in own)
        print_entry(console, answer, symbol, outcome, reasons=said, fixes=fixes)
    if not symbols:
        line(console, Text("no kernel that the model is bound to was there to be measured"))
    others = [finding for finding in findings if finding.fast_path not in symbols]
    for finding in others:
        print_finding(console, finding)
    if verdict.trace is not None and verdict.trace.first_step_seconds is not None:
        later = verdict.trace.step_seconds
        text = f"first step of a new process {verdict.trace.first_step_seconds:.1f} s"
        note(console, "step", text + (f", a later one {later:.2f} s" if later is not None else ""))
    about = [verdict.fingerprint.model_type, *([count("fast path", paths)] if paths else [])]
    about.append(count("measured kernel", answers.values()))
    if others:
        about.append(count("other finding", (finding.status for finding in others)))
    said = [", ".join(about), f"level {verdict.level.name.lower()}", f"{verdict.seconds:.0f} s"]
    close(console, status, *said, code=exit_code(status, strict=strict))


def verdict_header(verdict: Verdict, image: str) -> Iterator[tuple[str, str]]:
    """What a verdict is about, where no check of this machine has said so already."""
    seen = verdict.fingerprint
    yield "image", image
    yield "model", seen.model_type
    yield "transformers", seen.transformers or "not installed"
    versions = (seen.torch or "not installed", f"CUDA {seen.cuda}" if seen.cuda else "", f"triton {seen.triton}")
    yield "torch", ", ".join(filter(None, versions[: 3 if seen.triton else 2]))
    capability = f" (sm_{seen.capability[0]}{seen.capability[1]})" if seen.capability else ""
    driver = f", driver {seen.driver}" if seen.driver else ""
    yield "gpu", f"{seen.gpu or 'none'}{capability}{driver}"


def _numbers(probe: ProbeResult) -> str:
    """The tensor that is nearest to its allowed error, and how many configurations were measured."""
    tensors = [
        (tensor.error / tensor.allowed, case.name, tensor)
        for case in probe.cases
        for tensor in case.tensors
        if tensor.error is not None and tensor.allowed
    ]
    texts = []
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
    return "; ".join(texts)
