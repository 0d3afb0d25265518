"""One check as a JSON document (`kernelguard check --json`); its form is `schemas/report.schema.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kernelguard.declare.values import Declaration, Intent
from kernelguard.judge.rules import OpenRule
from kernelguard.judge.values import Assessment, Status, exit_code
from kernelguard.observe.values import Bindings, Environment

SCHEMA = 1
"""Version of the document. Keys are only ever added."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Everything that `kernelguard check` found out; what the reports are made from."""

    declaration: Declaration
    intent: Intent
    environment: Environment
    assessment: Assessment
    bindings: Bindings | None = None
    """What was observed; None: nothing was executed."""
    open_rules: tuple[OpenRule, ...] = ()
    """Rules that a fact left open by a target would decide."""
    strict: bool = False

    @property
    def exit_code(self) -> int:
        """The process exit code for this check."""
        return exit_code(self.assessment.status, strict=self.strict)

    @property
    def status(self) -> Status:
        """The worst of all findings."""
        return self.assessment.status


def assumed_texts(intent: Intent) -> tuple[str, ...]:
    """What nobody said and was therefore assumed, for a person: `packed=False`."""
    return tuple(
        f"{name}={'not known' if name == 'signals' else _plain(getattr(intent, name))}" for name in intent.assumed
    )


def to_document(check: Check) -> dict[str, Any]:
    """The JSON document of a check."""
    assessment, environment = check.assessment, check.environment
    return {
        "schema": SCHEMA,
        "kind": "check",
        "status": str(check.status),
        "exit_code": check.exit_code,
        "strict": check.strict,
        "level": assessment.level.name.lower(),
        "reached": assessment.reached.name.lower(),
        "model": {
            "source": check.declaration.config.source,
            "model_type": check.declaration.config.model_type,
            "architectures": list(check.declaration.config.architectures),
            "layers": {kind.name: kind.count for kind in check.declaration.layer_kinds},
            "layer_order": list(check.declaration.layer_order),
        },
        "transformers": {
            "version": str(check.declaration.transformers.version),
            "origin": check.declaration.transformers.origin,
            "root": str(check.declaration.transformers.root),
        },
        "environment": _environment(environment),
        "intent": {k: v for k, v in asdict(check.intent).items() if k != "assumed"},
        "assumed": list(assumed_texts(check.intent)),
        "fast_paths": [asdict(answer) for answer in assessment.fast_paths],
        "not_used": [asdict(path) for path in assessment.not_used],
        "findings": [asdict(finding) for finding in assessment.findings],
        "open_rules": [asdict(rule) for rule in check.open_rules],
        "unknowns": list(check.declaration.unknowns),
    }


def _environment(environment: Environment) -> dict[str, Any]:
    """The facts that a reader of the report needs; `kernelguard observe` writes all of them."""

    def text(value: object) -> str | None:
        return None if value is None else str(value)

    return {
        "origin": environment.origin,
        "live": environment.live,
        "executable": environment.executable,
        "python": text(environment.python),
        "machine": environment.machine,
        "torch": text(environment.torch),
        "torch_cuda": text(environment.torch_cuda),
        "triton": text(environment.triton),
        "driver": text(environment.driver),
        "gpu_state": str(environment.gpu_state),
        "gpus": [
            {"name": gpu.name, "capability": list(gpu.capability) if gpu.capability else None}
            for gpu in environment.gpus
        ],
        "problems": list(environment.problems),
    }


def _plain(value: object) -> str:
    if value is None:
        return "default"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value)
