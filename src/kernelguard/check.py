"""The walk of `kernelguard check`: declare, observe, resolve, judge. Wires the rooms for the command line.

What looks into an interpreter is imported only where one is looked into: it would be a tenth of a static check.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from kernelguard.data import matrices
from kernelguard.declare.choices import unasked
from kernelguard.declare.config import read_config
from kernelguard.declare.declaration import declare
from kernelguard.declare.intent import resolve_intent
from kernelguard.declare.tree import find_tree, tree_of_version
from kernelguard.declare.values import Declaration, Intent, ModelConfig, TransformersTree
from kernelguard.errors import InputError, UndeterminedError
from kernelguard.judge.assess import Evidence, assess
from kernelguard.judge.attention import attention_module
from kernelguard.judge.rules import Facts, OpenRule, Rule, apply_rules, load_rules
from kernelguard.judge.unowned import as_imported
from kernelguard.judge.values import Finding, Level, Status
from kernelguard.matrix import kernel_packages
from kernelguard.observe.values import Bindings, Environment
from kernelguard.report.document import Check

if TYPE_CHECKING:
    from kernelguard.resolve.values import Resolution


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked on the command line."""

    model: str
    python: Path | None = None
    environment: Path | None = None
    target: str | None = None
    lock: Path | None = None
    transformers: str | None = None
    flags: Mapping[str, Any]
    intent_file: Path | None = None
    train_config: Path | None = None
    level: str | None = None
    strict: bool = False
    timeout: float = 300.0


def run_check(request: Request, environ: Mapping[str, str]) -> Check:
    """Answer one check.

    Raises:
        InputError: an argument or a file is unusable.
        UndeterminedError: the question cannot be answered here.
    """
    deadline = time.monotonic() + request.timeout
    chosen = [n for n in ("python", "environment", "target", "lock") if getattr(request, n) is not None]
    if len(chosen) > 1:
        raise InputError(f"--{chosen[0]} and --{chosen[1]} name two different things to check", hint="give one of them")
    config = read_config(request.model)
    lock = _lock(request)
    environment = lock.environment if lock is not None else _environment(request, environ, deadline)
    level = _level(request, environment)
    tree = _tree(request, environment, environ, deadline)
    intent = resolve_intent(
        request.flags, request.intent_file, request.train_config, versions=_versions(environment, tree)
    )
    assumed = "trust_remote_code" in intent.assumed
    declaration = declare(
        config,
        tree,
        leave_out=unasked(intent),
        trusted=None if assumed else intent.trust_remote_code,
    )
    intent = _with_trust(intent, declaration)
    bindings = _bindings(declaration, intent, environment, level, deadline)
    kernels = kernel_packages()
    facts = Facts.of(
        environment=as_imported(declaration.fast_paths, environment, bindings, kernels),
        declaration=declaration,
        intent=intent,
        executed=bindings is not None,
    )
    rules = load_rules(matrices() / "rules.toml")
    rule_findings, open_rules = apply_rules(rules, facts, today=datetime.now(UTC).date())
    evidence = Evidence(
        declaration=declaration,
        intent=intent,
        environment=environment,
        bindings=bindings,
        rule_findings=rule_findings,
        told_by={rule.id: rule.told_by for rule in rules if rule.told_by},
        kernels=kernels,
    )
    if lock is not None:
        evidence = replace(
            evidence,
            locked=lock.served,
            lock_command=_lock_command(request, lock.target),
            rule_findings=(*rule_findings, *lock.other_model(config, _lock_command(request, lock.target))),
        )
    if environment.distributions is None:
        resolution = _known_set(evidence, rules)
        evidence = replace(evidence, resolution=resolution, lock_command=_lock_command(request))
        if not isinstance(resolution, str) and resolution.complete:
            evidence, open_rules = _with_cautions(evidence, resolution, rules, open_rules)
    if environment.live:
        # Imported here, because a static check has no files to read and shall not pay for it.
        from kernelguard.binaries import binary_findings  # noqa: PLC0415

        evidence = replace(evidence, rule_findings=(*rule_findings, *binary_findings(evidence)))
    return Check(
        declaration=declaration,
        intent=intent,
        environment=environment,
        assessment=assess(evidence, level),
        bindings=bindings,
        open_rules=open_rules,
        strict=request.strict,
    )


def _known_set(evidence: Evidence, rules: Sequence[Rule]) -> Resolution | str:
    """The builds that are known to fit a target; where it contradicts what is published, why none was looked for."""
    from kernelguard.fits import known_set  # noqa: PLC0415 - an interpreter has its builds already

    try:
        return known_set(evidence.declaration, evidence.intent, evidence.environment, rules)
    except InputError as error:
        return error.message


def _with_cautions(
    evidence: Evidence, resolution: Resolution, rules: Sequence[Rule], open_rules: Sequence[OpenRule]
) -> tuple[Evidence, tuple[OpenRule, ...]]:
    """What the rules say once the set is known: the search has held it against each of them."""
    from kernelguard.judge.fits import judge_cautions  # noqa: PLC0415

    said = {finding.code for finding in evidence.rule_findings}
    cautions = tuple(f for f in judge_cautions(resolution, rules) if f.code not in said)
    decided = {finding.code for finding in cautions}
    unsure = {caution.rule for caution in resolution.cautions if not caution.certain}
    still_open = tuple(
        rule
        for rule in open_rules
        if rule.rule_id not in decided and (rule.status is Status.WARN or rule.rule_id in unsure)
    )
    return replace(evidence, rule_findings=(*evidence.rule_findings, *cautions)), still_open


def _lock_command(request: Request, target: str | None = None) -> str:
    wanted = (target or request.target or "cpu").split(" + ")  # so a lock writes down a fleet
    return shlex.join(["kernelguard", "lock", request.model, *(word for t in wanted for word in ("--target", t))])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Locked:
    """What a check takes from a lock."""

    environment: Environment
    served: Mapping[str, str]
    target: str
    model_sha256: str

    def other_model(self, config: ModelConfig, command: str) -> Iterator[Finding]:
        """A finding, where the lock was made for another configuration."""
        from kernelguard.judge.fits import judge_locked_model  # noqa: PLC0415
        from kernelguard.lock.parts import locked_model  # noqa: PLC0415

        return judge_locked_model(self.model_sha256, locked_model(config).sha256, command)


def _lock(request: Request) -> _Locked | None:
    if request.lock is None:
        return None
    # Imported here, as most checks have no lock to read.
    from kernelguard.lock.described import environment_of  # noqa: PLC0415
    from kernelguard.lock.document import load_lock  # noqa: PLC0415

    lock = load_lock(request.lock)
    return _Locked(
        environment=environment_of(lock, f"lock {request.lock}"),
        served={path.symbol: path.served_by for path in lock.fast_paths},
        target=lock.target.spec,
        model_sha256=lock.model.sha256,
    )


def _with_trust(intent: Intent, declaration: Declaration) -> Intent:
    """The intent as it was taken: trust in code of the checkpoint's own is no question where there is none."""
    remote = declaration.remote
    if remote is None:
        return replace(intent, assumed=tuple(name for name in intent.assumed if name != "trust_remote_code"))
    return replace(intent, trust_remote_code=intent.trust_remote_code or remote.runs)


def _environment(request: Request, environ: Mapping[str, str], deadline: float) -> Environment:
    if request.target is not None:
        from kernelguard.observe.targets import target  # noqa: PLC0415

        return target(request.target)
    if request.environment is not None:
        from kernelguard.observe.files import load_environment  # noqa: PLC0415

        return load_environment(request.environment)
    return _look(request.python, environ, deadline, gpu=request.level != "resolve")


def _look(python: Path | None, environ: Mapping[str, str], deadline: float, *, gpu: bool) -> Environment:
    """The environment of an interpreter on this machine."""
    from kernelguard.observe.interpreter import find_interpreter, observe  # noqa: PLC0415

    return observe(find_interpreter(python, environ), timeout=_left(deadline), gpu=gpu)


def _versions(environment: Environment, tree: TransformersTree) -> dict[str, Version]:
    """Releases of what brings a training configuration: which signals it sends depends on them."""
    versions = {"transformers": tree.version}
    for name, found in (environment.distributions or {}).items():
        with suppress(InvalidVersion):
            versions.setdefault(name, Version(found.version))
    return versions


def _level(request: Request, environment: Environment) -> Level:
    if request.level is not None:
        return Level[request.level.upper()]
    return Level.GPU if environment.live else Level.RESOLVE


def _tree(request: Request, environment: Environment, environ: Mapping[str, str], deadline: float) -> TransformersTree:
    """The transformers source to read: what was asked for, else the environment's own, else the interpreter's here."""
    if request.transformers is not None:
        return _named_tree(request.transformers, environ)
    if environment.live:
        if environment.transformers_root is None:
            raise UndeterminedError(
                f"transformers is not installed in {environment.executable}",
                hint=f"{_typed(environment)} -m pip install transformers, or name one with --python or "
                "--transformers 5.24.0",
            )
        return find_tree(Path(environment.transformers_root), origin="interpreter")
    if environment.transformers_version is not None:
        return tree_of_version(str(environment.transformers_version), cache_folder(environ))
    return _own_tree(environ, deadline)


def transformers_tree(wanted: str | None, environ: Mapping[str, str]) -> TransformersTree:
    """The transformers source that was named, else the one of the interpreter that `check` would look into.

    Raises:
        InputError: there is no such thing.
        UndeterminedError: none was named, and the interpreter has none.
    """
    return _own_tree(environ, time.monotonic() + 60.0) if wanted is None else _named_tree(wanted, environ)


def _typed(environment: Environment) -> str:
    """The interpreter, as it is typed in a shell."""
    return shlex.quote(str(environment.executable))


def _named_tree(wanted: str, environ: Mapping[str, str]) -> TransformersTree:
    """A folder, or a released version."""
    return find_tree(Path(wanted)) if Path(wanted).exists() else tree_of_version(wanted, cache_folder(environ))


def _own_tree(environ: Mapping[str, str], deadline: float) -> TransformersTree:
    """The transformers of the interpreter that would be observed."""
    beside = _tree_of_virtual_environment(environ)
    if beside is not None:
        return beside
    here = _look(None, environ, deadline, gpu=False)
    if here.transformers_root is None:
        raise UndeterminedError(
            f"which transformers to read was not said, and {here.executable} has none",
            hint="--transformers 5.24.0, or a folder that holds a transformers tree",
        )
    return find_tree(Path(here.transformers_root), origin="interpreter")


def _tree_of_virtual_environment(environ: Mapping[str, str]) -> TransformersTree | None:
    """The transformers in the site-packages of that interpreter, where it is certain that this is what it imports.

    Starting the interpreter to ask it would be a quarter of a static check.
    """
    python = Path(environ["VIRTUAL_ENV"], "bin", "python") if environ.get("VIRTUAL_ENV") else _on_path(environ)
    if python is None or environ.get("PYTHONPATH") or not (python.parent.parent / "pyvenv.cfg").is_file():
        return None
    for site in python.parent.parent.glob("lib/python3*/site-packages"):
        if (site / "transformers" / "models").is_dir():
            return find_tree(site / "transformers", origin="interpreter")
    return None


def _on_path(environ: Mapping[str, str]) -> Path | None:
    found = shutil.which("python", path=environ.get("PATH", os.defpath))
    return Path(found) if found else None


def _bindings(
    declaration: Declaration,
    intent: Intent,
    environment: Environment,
    level: Level,
    deadline: float,
) -> Bindings | None:
    """What the model is really bound to; None where nothing can or shall be executed."""
    if level is Level.RESOLVE or not environment.live or environment.executable is None:
        return None
    tree = declaration.transformers
    if environment.transformers_root is None or Path(environment.transformers_root).resolve() != tree.root.resolve():
        # Another transformers than the interpreter's was asked for: what this one binds says nothing about that one.
        return None
    if environment.torch is None:
        raise UndeterminedError(
            f"torch is not installed in {environment.executable}, so the model cannot be loaded there",
            hint=f"{_typed(environment)} -m pip install torch, or name another interpreter with --python",
        )
    from kernelguard.observe.bindings import observe_bindings  # noqa: PLC0415

    attention = attention_module(intent)
    return observe_bindings(
        environment.executable, declaration, also=() if attention is None else (attention,), timeout=_left(deadline)
    )


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where downloaded transformers sources are kept (XDG base directories)."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or tempfile.gettempdir(), ".cache")
    return Path(base, "kernelguard")


def _left(deadline: float) -> float:
    """Seconds left; never zero, so that a worker that is started gets to say that it had no time."""
    return max(deadline - time.monotonic(), 1.0)
