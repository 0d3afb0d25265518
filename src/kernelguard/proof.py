"""The walk of `kernelguard verify`: a check at level import, then the kernels themselves. Wires the rooms."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelguard.check import Request, run_check
from kernelguard.errors import InputError
from kernelguard.judge.unowned import unpinned
from kernelguard.judge.values import Finding, Level, Status, worst
from kernelguard.matrix import kernel_packages
from kernelguard.report.document import Check
from kernelguard.verify.findings import findings
from kernelguard.verify.first_step import FirstStep
from kernelguard.verify.plan import TRAINING_LENGTH
from kernelguard.verify.run import verify
from kernelguard.verify.values import Verdict

if TYPE_CHECKING:
    from kernelguard.declare.training_configs import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was found out about the model's kernels by running them."""

    check: Check
    """At level import: a kernel that the model is not bound to need not be measured, and is a no already."""
    verdict: Verdict
    findings: tuple[Finding, ...]
    """Those of the verdict, and of the environment held against the lock, when one was given."""

    @property
    def status(self) -> Status:
        """The worst of everything that was found."""
        return worst([self.check.status, *(f.status for f in self.findings)])


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedRun:
    """What a lock says is to be verified."""

    model: str
    flags: Mapping[str, object]
    """The lock's intent, without what was only assumed when it was made."""
    digest: str


def of_lock(path: Path, *, model: str = "") -> LockedRun:
    """The model and the run of a lock; `model` says where its configuration lies now.

    Raises:
        InputError: it is no lock, or its model is not to be found or another one.
    """
    from kernelguard.image.subject import intent_document, subject_of  # noqa: PLC0415 - most runs have no lock
    from kernelguard.lock import load_lock  # noqa: PLC0415
    from kernelguard.lock.document import to_document  # noqa: PLC0415

    lock = load_lock(path)
    flags = {k: tuple(v) if isinstance(v, list) else v for k, v in intent_document(lock).items()}
    return LockedRun(
        model=str(subject_of(lock, path, model=model).model), flags=flags, digest=str(to_document(lock)["digest"])
    )


def run_verify(
    request: Request,
    environ: Mapping[str, str],
    *,
    level: Level,
    length: int | None,
    warm_cache: Path | None,
    say: Callable[[str], None],
    lock: Path | None = None,
    trace: Path | None = None,
    resume: Path | None = None,
) -> Proof:
    """Measure the kernels that the model is bound to, within `request.timeout` seconds.

    `length` is the training length in tokens; None: what the training configuration says, if it does, else
    `TRAINING_LENGTH`. With `warm_cache` and a configuration of the bundled trainer, the folder gets what the trainer's
    first step compiles too.

    With `lock`, the environment is held against it first, and the verdict carries its digest. `trace` is where the
    profiler trace of one training step goes. `resume` is a verdict of the same environment whose time was up.

    Raises:
        InputError: an argument or a file is unusable.
        UndeterminedError: nothing can be executed in that interpreter.
    """
    deadline = time.monotonic() + request.timeout
    if trace is not None and level is not Level.GPU:
        raise InputError("--trace records what a GPU runs", hint="leave it out, or verify with --level gpu on a GPU")
    earlier = _earlier(resume)
    training = _training(request)
    first_step = None
    if training is not None and training.bundled and request.train_config is not None:
        first_step = FirstStep(config=request.train_config, model=request.model)
    digest = of_lock(lock, model=request.model).digest if lock is not None else ""
    say("reading what the model is bound to")
    began = time.monotonic()
    check = run_check(replace(request, level="import"), environ)
    checked = round(time.monotonic() - began, 2)
    locked = _held_against(lock, check, deadline)
    verdict = verify(
        check.declaration,
        check.intent,
        check.environment,
        bindings=check.bindings,
        level=level,
        timeout=max(deadline - time.monotonic(), 1.0),
        length=length or (training.length if training is not None else None) or TRAINING_LENGTH,
        warm_cache=warm_cache,
        lock=digest,
        trace=trace,
        earlier=earlier,
        first_step=first_step,
        progress=say,
    )
    loose = unpinned(check.declaration.fast_paths, check.environment, check.bindings, kernel_packages())
    phases = {"check": checked, **verdict.phases}
    verdict = replace(verdict, phases=phases, problems=(*verdict.problems, *loose))
    fixes = {f.fast_path: f.fix for f in check.assessment.findings if f.fast_path and f.fix}
    return Proof(check=check, verdict=verdict, findings=(*locked, *findings(verdict, fixes)))


def _training(request: Request) -> Reading | None:
    if request.train_config is None:
        return None
    from kernelguard.declare.training_configs import read_training_config  # noqa: PLC0415 - most runs have none

    return read_training_config(request.train_config, {})


def _earlier(path: Path | None) -> Verdict | None:
    if path is None:
        return None
    from kernelguard.verify.files import load_verdict  # noqa: PLC0415 - it brings a schema validator

    return load_verdict(path)


def _held_against(lock: Path | None, check: Check, deadline: float) -> tuple[Finding, ...]:
    """Whether the interpreter has exactly the lock's bytes: a verdict about others says nothing about the lock."""
    if lock is None or check.environment.executable is None:
        return ()
    from kernelguard.lock import check_lock, load_lock  # noqa: PLC0415

    left = max(deadline - time.monotonic(), 30.0)
    return check_lock(load_lock(lock), Path(check.environment.executable), timeout=left)
