"""What runs inside a container: the toolbox's own entry. Reads a request, writes an answer, exits.

Everything it looks at is a path of the container, so check and verify work as they do on any machine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

IN = Path("/kernelguard-box/in")
"""Where the request and the files that it names lie."""
OUT = Path("/kernelguard-out")
REQUEST = IN / "request.json"
ANSWER = OUT / "answer.json"


def main() -> None:
    """Do what the request asks for, and exit with its code."""
    request = json.loads(REQUEST.read_text("utf-8"))
    if request["do"] == "command":
        from kernelguard.cli import run  # noqa: PLC0415

        sys.exit(run(request["arguments"]))
    sys.exit(_verify(request))


def _verify(request: Mapping[str, Any]) -> int:
    from kernelguard.errors import KernelguardError  # noqa: PLC0415

    try:
        answer = _evidence(request)
        code = 0
    except KernelguardError as error:
        answer = {"error": error.message, "hint": error.hint or "", "exit_code": error.exit_code}
        code = error.exit_code
    ANSWER.write_text(json.dumps(answer), "utf-8")
    return code


def _evidence(request: Mapping[str, Any]) -> dict[str, Any]:
    from dataclasses import asdict  # noqa: PLC0415

    from kernelguard.check import Request  # noqa: PLC0415
    from kernelguard.judge.values import Level  # noqa: PLC0415
    from kernelguard.proof import run_verify  # noqa: PLC0415
    from kernelguard.report.document import to_document as check_document  # noqa: PLC0415
    from kernelguard.verify.files import to_document as verdict_document  # noqa: PLC0415

    python = request["python"]
    findings = list(_lock_findings(request, python))
    proof = run_verify(
        Request(
            model=request["model"],
            python=Path(python),
            flags={},
            intent_file=Path(request["intent"]) if request.get("intent") else None,
            timeout=float(request["timeout"]),
        ),
        dict(os.environ),
        level=Level[request["level"].upper()],
        length=int(request["length"]),
        warm_cache=Path(request["cache"]) if request.get("cache") else None,
        say=lambda text: print(f"kernelguard: {text}", file=sys.stderr, flush=True),  # noqa: T201 - the host reads it
    )
    findings += [*proof.check.assessment.findings, *proof.findings]
    findings += _gpu_code(proof.check.environment, request.get("capabilities", ()))
    return {
        "verdict": verdict_document(proof.verdict),
        "check": check_document(proof.check),
        "findings": [asdict(finding) for finding in findings],
    }


def _lock_findings(request: Mapping[str, Any], python: str) -> Iterator[Any]:
    """Whether the image has exactly the lock's bytes."""
    if not request.get("lock"):
        return
    from kernelguard.lock import check_lock, load_lock  # noqa: PLC0415

    yield from check_lock(load_lock(Path(request["lock"])), Path(python), timeout=float(request["timeout"]))


def _gpu_code(environment: Any, capabilities: Any) -> Iterator[Any]:
    """Whether what is compiled holds code for the lock's GPUs: flags say what was asked for, files what was made."""
    from kernelguard.judge.values import Finding, Status  # noqa: PLC0415
    from kernelguard.matrix import kernel_packages  # noqa: PLC0415
    from kernelguard.observe.extensions import inspect_extensions  # noqa: PLC0415

    by_owner: dict[str, list[tuple[str, Any]]] = {}
    for extension in inspect_extensions(environment, kernel_packages()):
        if extension.elf is not None and extension.elf.gpu_code:
            by_owner.setdefault(extension.distribution, []).append((extension.path, extension.elf))
    for owner, files in by_owner.items():
        for text in capabilities:
            major, minor = map(int, text.split("."))
            # A package may bring one module for each generation.
            if any(elf.runs_on((major, minor)) for _, elf in files):
                continue
            codes = ", ".join(dict.fromkeys(str(code) for _, elf in files for code in elf.gpu_code))
            yield Finding(
                code="no-gpu-code",
                status=Status.FAIL,
                reason=f"{owner} holds GPU code for {codes} only; the lock is for compute capability {text}",
                fix="build it for the lock's GPU: the arch list did not reach its compiler",
                evidence=tuple(path for path, _ in files),
            )
