"""What does all that mean? From what the code declares and what was observed to one answer per fast path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from packaging.version import Version

from kernelguard.declare.values import Declaration, FastPath, Intent, Phase, Requirement
from kernelguard.judge.bound import (
    blocked_by_compile,
    declared_at,
    find_binding,
    gpu_state_text,
    install_command,
    judge_binding,
)
from kernelguard.judge.hub import installed, kernels_problem
from kernelguard.judge.hub_builds import OFFLINE_FIX, offline_problem
from kernelguard.judge.modes import judge_modes
from kernelguard.judge.packing import judge_attention_packing, judge_packing
from kernelguard.judge.remote import judge_remote
from kernelguard.judge.tags import other_torch
from kernelguard.judge.unowned import judge_unowned
from kernelguard.judge.values import Assessment, FastPathAnswer, Finding, Level, NotUsed, Status, worst
from kernelguard.matrix import KernelPackage
from kernelguard.observe.values import Binding, Bindings, Environment, GpuState

if TYPE_CHECKING:
    from kernelguard.resolve.values import Resolution


_HUB_BY_VERSION = Version("5.2")
"""From here on the table of lazily loaded kernels has versions (integrations/hub_kernels.py); before, revisions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything an assessment is made from."""

    declaration: Declaration
    intent: Intent
    environment: Environment
    bindings: Bindings | None
    """None: nothing was executed (level resolve)."""
    rule_findings: tuple[Finding, ...]
    kernels: Mapping[str, KernelPackage]
    told_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Rules that say nothing beside a finding of these codes: one fault is one finding."""
    resolution: Resolution | str = "nothing was asked about builds"
    """Of a target: the set of builds that is known to fit it, or why none was looked for."""
    locked: Mapping[str, str] | None = None
    """Of a lock: what serves each symbol; None: it is no lock that is checked."""
    lock_command: str = "kernelguard lock"
    """What asks the package index, too."""


def assess(evidence: Evidence, level: Level) -> Assessment:
    """Judge every fast path and the run as a whole against the claim of `level`. Pure."""
    needed, not_used = _split(evidence.declaration, evidence.intent, evidence.bindings)
    reached = Level.RESOLVE if evidence.bindings is None else Level.IMPORT
    answers: list[FastPathAnswer] = []
    findings: list[Finding] = []
    claimed: set[int] = set()
    of_run = tuple(_judge_run(evidence, level, reached, needed))
    for path in needed:
        mine = [_softened(path, finding) for finding in _judge_path(path, evidence, level)]
        for index, finding in enumerate(evidence.rule_findings):
            if finding.fast_path == path.symbol:
                claimed.add(index)
                if not _is_told(finding, mine, evidence):
                    mine.append(finding)
        mine.extend(other_torch(path, mine, evidence.environment))
        answers.append(_answer(path, mine, evidence.bindings))
        findings.extend(mine)
    symbols = {path.symbol for path in needed}
    findings.extend(
        f
        for i, f in enumerate(evidence.rule_findings)
        if i not in claimed
        and (f.fast_path is None or f.fast_path in symbols)
        and not _is_told(f, (*of_run, *evidence.rule_findings), evidence)
    )
    findings.extend(of_run)
    return Assessment(
        level=level,
        reached=min(level, reached),
        fast_paths=tuple(answers),
        not_used=tuple(not_used),
        findings=tuple(dict.fromkeys(findings)),
    )


def _is_told(finding: Finding, others: Iterable[Finding], evidence: Evidence) -> bool:
    """Whether another finding says the same as a rule, closer to what is really there."""
    codes = evidence.told_by.get(finding.code, ())
    return any(other.code in codes for other in others)


def needed_paths(declaration: Declaration, intent: Intent, bindings: Bindings | None = None) -> tuple[FastPath, ...]:
    """The declared fast paths that this run needs, as far as was observed."""
    return tuple(_split(declaration, intent, bindings)[0])


def layer_count(path: FastPath, bindings: Bindings | None) -> int | None:
    """Layers that call the kernel: counted in the built model where that was possible, else read from the source.

    A zero from the source stays one: a layer may be there and, with this configuration, never call the kernel.
    """
    if path.layers != 0 and bindings is not None and bindings.layer_counts and path.binding.owner is not None:
        return bindings.layer_counts.get(path.binding.owner, 0)
    return path.layers


def _split(declaration: Declaration, intent: Intent, bindings: Bindings | None) -> tuple[list[FastPath], list[NotUsed]]:
    """The fast paths this run needs, and the declared ones that it does not need, with the reason."""
    wanted: list[FastPath] = []
    unused: list[tuple[FastPath, str]] = []
    for path in declaration.fast_paths:
        reason = _why_not_used(path, intent, layer_count(path, bindings))
        if reason is None:
            wanted.append(path)
        else:
            unused.append((path, reason))
    # An all-or-nothing gate makes a decode-only kernel a condition for the training kernels beside it.
    gated = {(p.binding.module, p.gate.name) for p in wanted if p.gate is not None and p.gate.decides}
    not_used = []
    for path, reason in unused:
        in_gate = path.gate is not None and path.gate.decides and (path.binding.module, path.gate.name) in gated
        if in_gate and layer_count(path, bindings) != 0 and path.requirement is not Requirement.OPT_IN:
            wanted.append(path)
        else:
            not_used.append(NotUsed(symbol=path.symbol, model_type=path.model_type, reason=reason))
    return wanted, not_used


def _why_not_used(path: FastPath, intent: Intent, layers: int | None) -> str | None:
    if layers == 0:
        return "no layer of this configuration uses it"
    if intent.phase not in path.phases:
        return "only called while decoding with a cache" if intent.phase is Phase.TRAINING else "only used in training"
    if path.requirement is Requirement.OPT_IN:
        if path.disabled_by:
            return f"not asked for ({path.disabled_by})"
        if not intent.use_kernels:
            return "only used when asked for (use_kernels=True)"
    return None


def _judge_path(path: FastPath, evidence: Evidence, level: Level) -> Iterator[Finding]:
    binding = None
    blocked = tuple(blocked_by_compile(path, evidence.intent))
    if path.disabled_by:
        yield _switched_off(path)
    elif evidence.bindings is not None:
        binding = find_binding(path, evidence.bindings)
        found = judge_binding(
            path,
            environment=evidence.environment,
            bindings=evidence.bindings,
            tree=evidence.declaration.transformers,
            kernels=evidence.kernels,
        )
        if not (blocked and found.status is Status.PASS):
            yield found
        yield from judge_unowned(
            path, environment=evidence.environment, bindings=evidence.bindings, kernels=evidence.kernels
        )
    else:
        yield _judge_unexecuted(path, evidence, level)
    yield from blocked
    if _carries_state(path, evidence):
        yield from judge_packing(
            path,
            intent=evidence.intent,
            binding=binding,
            observed=evidence.bindings is not None,
            tree=evidence.declaration.transformers,
            kernels=evidence.kernels,
        )


def _softened(path: FastPath, finding: Finding) -> Finding:
    """A small part (a norm, an activation) that runs without its kernel is worth a warning, not a no."""
    return replace(finding, status=Status.WARN) if path.optional and finding.status is Status.FAIL else finding


def _switched_off(path: FastPath) -> Finding:
    name, _, value = path.disabled_by.partition("=")
    # Taking it out is no fix: it may well be the default.
    fix = f"set {name} to true in the configuration"
    if value != "False":
        fix = f"set {name} in the configuration to a kernel of {path.distribution}; {value} is PyTorch code"
    return Finding(
        code="switched-off",
        status=Status.FAIL,
        fast_path=path.symbol,
        reason=f"the configuration, or its default, says {path.disabled_by}, so the model runs {path.fallback} "
        "whatever is installed",
        fix=fix if value else f"remove {path.disabled_by} from the configuration",
        evidence=(declared_at(path),),
    )


def _carries_state(path: FastPath, evidence: Evidence) -> bool:
    """Whether the kernel mixes positions of a training sequence; norms and decode steps do not."""
    package = evidence.kernels.get(path.package)
    symbol = package.symbols.get(path.symbol) if package is not None else None
    return evidence.intent.phase in path.phases and (symbol is None or symbol.mixes_tokens)


def _judge_unexecuted(path: FastPath, evidence: Evidence, level: Level) -> Finding:
    """Without running anything: what is certainly absent is a no; whether a build fits is for the resolver to say."""
    # With it comes all of the resolver, which a check of an interpreter has no use for.
    from kernelguard.judge.fits import judge_fit, judge_locked  # noqa: PLC0415

    if evidence.locked is not None:
        return judge_locked(path, evidence.locked, evidence.lock_command)
    if path.hub_first and (asked := _judge_hub_first(path, evidence)) is not None:
        return asked
    known = evidence.environment.distributions
    package = evidence.kernels.get(path.package)
    names = package.distributions if package is not None else (path.distribution,)
    fix = install_command(path, evidence.kernels)
    if known is not None and not any(name in known for name in names):
        return Finding(
            code="not-installed",
            status=Status.FAIL,
            fast_path=path.symbol,
            reason=f"{path.distribution} is not installed: the model runs {path.fallback}",
            fix=fix,
        )
    if known is not None:
        version = next(f"{known[n].name} {known[n].version}" for n in names if n in known)
        return Finding(
            code="not-executed",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"{version} is listed, but nothing was executed: whether it loads is not known",
            fix="kernelguard check MODEL --level import   # on that machine"
            if level is Level.RESOLVE
            else "run this check on that machine, without --environment",
        )
    return judge_fit(path, evidence.resolution, evidence.lock_command)


def _judge_hub_first(path: FastPath, evidence: Evidence) -> Finding | None:
    """Where `kernels` can be used, the hub is asked and the installed package is not tried; None: it cannot be."""
    environment, tree = evidence.environment, evidence.declaration.transformers
    window = path.hub_window
    if window is None or not installed(environment, "kernels") or kernels_problem(window, environment):
        return None
    away = offline_problem(environment) if tree.version >= _HUB_BY_VERSION else ""
    if away:
        return Finding(
            code="hub-offline",
            status=Status.FAIL,
            fast_path=path.symbol,
            reason=f"transformers {tree.version} asks the hub for {path.package} and does not try an installed one, "
            f"but {away}",
            fix=f"{OFFLINE_FIX}; without the kernels package an installed {path.distribution} is used",
        )
    return Finding(
        code="not-executed",
        status=Status.UNKNOWN,
        fast_path=path.symbol,
        reason=f"transformers {tree.version} asks the hub for {path.package} and does not try an installed one; "
        "whether the hub has a build for this machine was not looked at",
        fix="kernelguard check MODEL --level import   # on that machine",
    )


def _judge_run(evidence: Evidence, level: Level, reached: Level, needed: Iterable[FastPath]) -> Iterator[Finding]:
    """Findings on the run as a whole."""
    declaration = evidence.declaration
    for text in declaration.unknowns:
        yield Finding(code="not-understood", status=Status.UNKNOWN, reason=text)
    yield from judge_remote(declaration, evidence.intent)
    yield from judge_attention_packing(evidence.intent, has_attention=_has_attention(declaration))
    imports = evidence.bindings.imports if evidence.bindings is not None else ()
    yield from judge_modes(declaration, evidence.intent, evidence.environment, imports)
    yield from _judge_torch(evidence.environment, level)
    if level <= reached:
        return
    if reached is Level.RESOLVE:
        yield Finding(
            code="level-not-reached",
            status=Status.UNKNOWN,
            reason=f"level {level.name.lower()} was asked for, but nothing could be executed",
            fix="run this check on that machine with --python, or ask for --level resolve",
        )
        return
    if level is Level.GPU and evidence.environment.gpu_state is not GpuState.USABLE:
        yield _no_gpu(evidence.environment)
        return
    yield Finding(
        code="not-verified",
        status=Status.UNKNOWN,
        reason="the output and the gradients of "
        + (", ".join(sorted({p.symbol for p in needed})) or "this model")
        + " were not computed: a check looks, and goes up to level import",
        fix="kernelguard verify, with the same arguments, runs them against a reference",
    )


def _judge_torch(environment: Environment, level: Level) -> Iterator[Finding]:
    """A CPU-only torch on a machine with a GPU is wrong whatever the model."""
    claimed = level > Level.RESOLVE or not environment.live  # a captured machine is what it is, at every level
    if environment.gpu_state is GpuState.CPU_TORCH and environment.gpus and claimed:
        yield Finding(
            code="cpu-torch-on-gpu-machine",
            status=Status.FAIL,
            reason=f"torch {environment.torch} is a CPU-only build, but this machine has "
            + ", ".join(gpu.name for gpu in environment.gpus),
            fix="install the CUDA build of torch for this driver",
        )


def _no_gpu(environment: Environment) -> Finding:
    code, fix = {
        GpuState.NONE: ("no-gpu", "run this check on the GPU machine, or ask for --level import"),
        GpuState.HIDDEN: ("gpu-hidden", "unset CUDA_VISIBLE_DEVICES"),
        GpuState.CPU_TORCH: ("cpu-torch", "install a CUDA build of torch, or ask for --level import"),
        GpuState.BROKEN: ("gpu-broken", "make `nvidia-smi` and `python -c 'import torch; torch.zeros(1).cuda()'` work"),
    }.get(environment.gpu_state, ("gpu-unknown", "run this check on the GPU machine, or ask for --level import"))
    return Finding(
        code=code,
        status=Status.UNKNOWN,
        reason=f"the claim is for a GPU, and none can be used here: {gpu_state_text(environment)}",
        fix=fix,
    )


def _has_attention(declaration: Declaration) -> bool:
    """Whether any layer attends over positions; unknown layer kinds count as yes, so that a leak is not missed."""
    kinds = declaration.layer_kinds
    return not kinds or any("mamba" not in k.name and "conv" not in k.name and "linear" not in k.name for k in kinds)


def _answer(path: FastPath, findings: list[Finding], bindings: Bindings | None) -> FastPathAnswer:
    status = worst(f.status for f in findings)
    deciding = [f for f in findings if f.status is status]
    binding: Binding | None = find_binding(path, bindings) if bindings is not None else None
    return FastPathAnswer(
        symbol=path.symbol,
        package=path.package,
        distribution=path.distribution,
        model_type=path.model_type,
        layers=layer_count(path, bindings),
        status=status,
        bound_to=(binding.target or None) if binding is not None else None,
        reason="; ".join(dict.fromkeys(f.reason for f in deciding)),
        fix="; ".join(dict.fromkeys(f.fix for f in deciding if f.fix)),
        codes=tuple(dict.fromkeys(f.code for f in findings)),
        declared_at=declared_at(path),
        notice="; ".join(f"{n.level or 'nothing'} at {n.when}" for n in path.notices) or "nothing is logged",
    )
