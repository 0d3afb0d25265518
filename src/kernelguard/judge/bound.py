"""Is one fast path bound to its kernel, and if not, why not? Each reason has its own code and its own fix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from packaging.version import Version

from kernelguard.declare.values import FastPath, Gate, Intent, TransformersTree
from kernelguard.judge.values import Finding, Status
from kernelguard.matrix import KernelPackage
from kernelguard.observe.values import (
    Binding,
    Bindings,
    BoundTo,
    Environment,
    ImportFact,
    ImportOutcome,
)

_DIED = {
    ImportOutcome.CRASHED: ("crashes", "importing {module} kills the process with {signal}"),
    ImportOutcome.HUNG: ("hangs", "importing {module} does not return within the time limit"),
    ImportOutcome.EXITED: ("exits", "importing {module} ends the process"),
}


def judge_binding(
    path: FastPath,
    *,
    environment: Environment,
    bindings: Bindings,
    tree: TransformersTree,
    kernels: Mapping[str, KernelPackage],
) -> Finding:
    """What an observed interpreter says about one fast path.

    The bound function decides. The imports made in processes of their own only explain it, with one exception: a
    package whose import kills the process is a definite no even when nothing could be read after that.
    """
    binding = find_binding(path, bindings)
    if binding is not None and binding.bound_to in {BoundTo.KERNEL, BoundTo.HUB}:
        return _judge_reached(path, bindings, binding, kernels)
    cause = _import_cause(path, environment, bindings, kernels)
    if cause is not None:
        return cause
    if binding is None or binding.bound_to is BoundTo.UNKNOWN:
        failed = _model_import_failure(path, bindings, tree)
        if failed is not None:
            return failed
    return _judge_unexplained(path, environment, bindings, binding, tree)


def find_binding(path: FastPath, bindings: Bindings) -> Binding | None:
    """The observed binding of this fast path; None when the worker did not get that far."""
    return next(
        (b for b in bindings.bindings if b.symbol == path.symbol and b.module == path.binding.module),
        None,
    )


def _judge_reached(
    path: FastPath,
    bindings: Bindings,
    binding: Binding,
    kernels: Mapping[str, KernelPackage],
) -> Finding:
    """The function is the kernel's. Does the code that calls it get that far?"""
    gate = path.gate
    if gate is not None and gate.decides:
        is_open, detail = _gate_state(path, gate, bindings)
        if is_open is None:
            return Finding(
                code="gate-unknown",
                status=Status.UNKNOWN,
                fast_path=path.symbol,
                reason=f"bound to {binding.target}, but whether `{gate.name}` lets the model use it could not be read"
                + (f": {detail}" if detail else ""),
            )
        if not is_open:
            return _fail(
                path,
                "gated-off",
                f"bound to {binding.target}, but `{gate.name}` is False"
                + (f" because {detail} is missing" if detail else "")
                + f": the whole layer runs {path.fallback}",
                install_command(path, kernels),
                (declared_at(path),),
            )
    where = "the kernels hub" if binding.bound_to is BoundTo.HUB else binding.distribution or path.distribution
    return Finding(
        code="bound",
        status=Status.PASS,
        fast_path=path.symbol,
        reason=f"bound to {binding.target} of {where}",
        evidence=(binding.file,) if binding.file else (),
    )


def blocked_by_compile(path: FastPath, intent: Intent) -> Iterator[Finding]:
    """What the source alone says: whatever the kernel is worth, a compiled model goes around it."""
    gate = path.gate
    if gate is not None and gate.blocked_by_compile and intent.compile and not path.disabled_by:
        yield _fail(
            path,
            "blocked-by-compile",
            "this transformers refuses the kernel while torch.compile traces the model and runs "
            f"{path.fallback} instead, without a message",
            "pip install 'transformers>=5.17', or leave torch.compile off for these layers",
            (declared_at(path),),
        )


def _gate_state(path: FastPath, gate: Gate, bindings: Bindings) -> tuple[bool | None, str]:
    """Whether an all-or-nothing gate is open, and what closes it; None: could not be read, and why."""
    members = [b for b in bindings.bindings if b.module == path.binding.module and b.symbol in gate.members]
    missing = ", ".join(b.symbol for b in members if b.bound_to is BoundTo.TORCH)
    if gate.module_global:
        fact = next((g for g in bindings.gates if g.module == path.binding.module and g.name == gate.name), None)
        if fact is None or fact.value is None:
            return None, fact.detail if fact is not None else ""
        return fact.value, missing
    # A local of a method: it is what its members make it.
    if missing:
        return False, missing
    known = {b.symbol for b in members if b.bound_to in {BoundTo.KERNEL, BoundTo.HUB}}
    unread = [name for name in gate.members if name not in known]
    return (None, f"{', '.join(unread)} was not read") if unread else (True, "")


def _import_cause(
    path: FastPath, environment: Environment, bindings: Bindings, kernels: Mapping[str, KernelPackage]
) -> Finding | None:
    """Why the package cannot give the symbol; None when its own import is fine or was not tried."""
    fact = import_fact(path, bindings)
    if fact is None or fact.outcome is ImportOutcome.NOT_TRIED:
        return None
    if fact.outcome in _DIED:
        code, text = _DIED[fact.outcome]
        return _fail(
            path,
            code,
            text.format(module=fact.module, signal=fact.signal or "a signal") + _owned(fact),
            f"reinstall a build for this torch: {install_command(path, kernels)}",
            (f"{fact.error_type}: {fact.error}".strip(": "),),
        )
    if _is_leftover_folder(fact):
        return _fail(
            path,
            "shadowed",
            f"{', '.join(fact.search_path)} is a folder named `{path.package}` without a package in it; "
            "it hides whatever is installed under that name",
            f"remove that folder, then: {install_command(path, kernels)}",
        )
    if fact.outcome is ImportOutcome.ABSENT:
        others = _other_distributions(path, environment, kernels)
        if others:
            return _fail(
                path,
                "broken",
                f"{' and '.join(others)} is installed, but it has no importable module `{path.package}`",
                f"reinstall it: {_reinstall(install_command(path, kernels))}",
            )
        return _fail(
            path,
            "not-installed",
            f"{path.distribution} is not installed: the model runs {path.fallback}",
            install_command(path, kernels),
        )
    if fact.outcome is ImportOutcome.RAISED:
        return _raised(path, fact, kernels)
    if fact.symbols.get(path.symbol) is False:
        return _fail(
            path,
            "symbol-missing",
            f"{_name_version(path, fact, environment)} imports, but has no `{path.import_path}`: it is too old or "
            "too new for this transformers",
            f"pip install --upgrade {path.distribution}",
            (fact.file,),
        )
    return None


def _raised(path: FastPath, fact: ImportFact, kernels: Mapping[str, KernelPackage]) -> Finding:
    """An import that raises: a missing dependency, a missing part, or a broken binary."""
    original = f"{fact.error_type}: {fact.error}"
    package = kernels.get(path.package)
    missing = fact.missing_module.partition(".")[0]
    if missing and missing != path.package:
        needed = package is not None and missing in package.needs_modules
        return _fail(
            path,
            "missing-dependency",
            f"{path.distribution} is installed without {missing}: {original}",
            f"pip install {missing}" if not needed else install_command(path, kernels),
            (original,),
        )
    if missing == path.package:
        return _fail(
            path,
            "symbol-missing",
            f"{path.package} is installed, but has no module `{fact.missing_module}` that holds `{path.symbol}`",
            f"pip install --upgrade {path.distribution}",
            (original,),
        )
    return _fail(
        path,
        "broken",
        f"{path.distribution} is installed but broken: {original}",
        f"reinstall a build for this torch and CUDA: {_reinstall(install_command(path, kernels))}",
        (original, fact.file) if fact.file else (original,),
    )


def _model_import_failure(path: FastPath, bindings: Bindings, tree: TransformersTree) -> Finding | None:
    """The model's own code cannot be imported: whatever the kernel is worth, nothing will train on it here."""
    fact = next((m for m in bindings.modules if m.module == path.binding.module), None)
    if fact is None or fact.outcome not in {ImportOutcome.RAISED, ImportOutcome.CRASHED, ImportOutcome.EXITED}:
        return None
    original = ": ".join(filter(None, (fact.error_type or fact.signal, fact.error))) or str(fact.outcome)
    return _fail(
        path,
        "model-import-fails",
        f"transformers {tree.version} cannot import {fact.module} in this interpreter: {original}",
        f"make this work: python -c 'import {fact.module}'",
        (original,),
    )


def _judge_unexplained(
    path: FastPath, environment: Environment, bindings: Bindings, binding: Binding | None, tree: TransformersTree
) -> Finding:
    """The package's own import is fine, and yet the kernel is not what the model is bound to."""
    fact = import_fact(path, bindings)
    usable = fact is not None and fact.outcome is ImportOutcome.OK
    if binding is None or binding.bound_to is BoundTo.UNKNOWN:
        detail = binding.detail if binding is not None else _first_problem(bindings)
        return Finding(
            code="binding-unknown",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"what `{path.binding.name}` is bound to could not be read" + (f": {detail}" if detail else ""),
            evidence=(declared_at(path),),
        )
    if binding.bound_to is BoundTo.OTHER:
        return Finding(
            code="replaced",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"something else put {binding.target} in the place of {path.symbol}; kernelguard does not know it",
            evidence=(binding.file,),
        )
    if not usable:
        return Finding(
            code="binding-unknown",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"the model is bound to {binding.target or 'PyTorch code'}, and importing {path.import_module} in a "
            "process of its own gave no answer" + (f": {_first_problem(bindings)}" if bindings.problems else ""),
        )
    if path.availability_missing:
        return _fail(
            path,
            "ignored",
            f"{path.import_path} is installed and works, but transformers {tree.version} asks for "
            f"`{path.availability_check}`, which does not exist, and so never uses it",
            _fix_ignored(path, tree),
            (declared_at(path),),
        )
    if path.availability_needs_gpu and not bindings.cuda_available:
        return Finding(
            code="needs-gpu-to-bind",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"{path.import_path} imports, but transformers {tree.version} looks it up only where a GPU is "
            f"visible (`{path.availability_check}`): {gpu_state_text(environment)}",
            fix="run this check on the GPU machine",
        )
    if path.hub_first and _has(environment, "kernels"):
        return Finding(
            code="hub-first",
            status=Status.UNKNOWN,
            fast_path=path.symbol,
            reason=f"transformers {tree.version} asks the kernels hub before the installed {path.distribution}, and "
            "the hub gave nothing here (a check downloads nothing)" + (f": {binding.detail}" if binding.detail else ""),
            fix="export USE_HUB_KERNELS=NO, so that the installed package is used",
        )
    return Finding(
        code="ignored",
        status=Status.FAIL,
        fast_path=path.symbol,
        reason=f"{path.import_path} is installed and works, but transformers {tree.version} does not find it and "
        f"runs {path.fallback}" + ("" if path.notices else ", without a message"),
        fix=_fix_ignored(path, tree),
        evidence=(declared_at(path), *((binding.detail,) if binding.detail else ())),
    )


def _fix_ignored(path: FastPath, tree: TransformersTree) -> str:
    """Releases before 5.17 look only at the package's root (huggingface/transformers#48148, fixed by #48221)."""
    if tree.version >= Version("5.17"):
        return (
            f"import {path.import_module} before the model's code; if that helps, another import of your program "
            "made the first look-up fail"
        )
    upgrade = "pip install 'transformers>=5.17'"
    # Before 5.15 the look-up is a guarded import, which an early import does not change.
    early = path.mechanism == "decorator"
    return upgrade + (f", or import {path.import_module} before the model's code" if early else "")


def install_command(path: FastPath, kernels: Mapping[str, KernelPackage]) -> str:
    """The command that gets this kernel."""
    package = kernels.get(path.package)
    return package.install if package is not None else f"pip install {path.distribution}"


def declared_at(path: FastPath) -> str:
    """File and line of the declaration, relative to the transformers folder."""
    return f"{path.file}:{path.line}"


def gpu_state_text(environment: Environment) -> str:
    """Why no GPU can be used here, in words."""
    return environment.gpu_detail or f"GPU state: {environment.gpu_state}"


def _fail(path: FastPath, code: str, reason: str, fix: str, evidence: tuple[str, ...] = ()) -> Finding:
    return Finding(
        code=code,
        status=Status.FAIL,
        fast_path=path.symbol,
        reason=reason,
        fix=fix,
        evidence=tuple(e for e in evidence if e),
    )


def import_fact(path: FastPath, bindings: Bindings) -> ImportFact | None:
    """The import of the symbol's module, or of its package when only that was tried."""
    facts = {f.module: f for f in bindings.imports}
    exact = facts.get(path.import_module)
    return exact if exact is not None else facts.get(path.package)


def _is_leftover_folder(fact: ImportFact) -> bool:
    """A namespace package: a folder on the path with no `__init__.py`, such as a deleted package leaves behind."""
    return not fact.file and bool(fact.search_path) and fact.outcome is not ImportOutcome.ABSENT


def _owned(fact: ImportFact) -> str:
    return f" (owned by {', '.join(fact.distributions)})" if fact.distributions else ""


def _other_distributions(
    path: FastPath, environment: Environment, kernels: Mapping[str, KernelPackage]
) -> tuple[str, ...]:
    package = kernels.get(path.package)
    names = package.distributions if package is not None else (path.distribution,)
    return tuple(n for n in names if _has(environment, n))


def _has(environment: Environment, distribution: str) -> bool:
    return environment.distributions is not None and distribution in environment.distributions


def _name_version(path: FastPath, fact: ImportFact, environment: Environment) -> str:
    for name in (*fact.distributions, path.distribution):
        found = (environment.distributions or {}).get(name)
        if found is not None:
            return f"{found.name} {found.version}"
    return path.distribution


def _reinstall(command: str) -> str:
    return command.replace("pip install", "pip install --force-reinstall --no-deps --no-cache-dir", 1)


def _first_problem(bindings: Bindings) -> str:
    return bindings.problems[0] if bindings.problems else ""
