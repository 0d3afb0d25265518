"""What is common to every kernel that a module-level name is bound to (4.57 to 5.14)."""

from __future__ import annotations

import ast

from kernelguard.declare.availability import Availability
from kernelguard.declare.gates import FoundGate, find_gate
from kernelguard.declare.mechanisms import Context
from kernelguard.declare.notices import SILENT
from kernelguard.declare.reading import kernels_window
from kernelguard.declare.source import ParsedModule, dotted, walk
from kernelguard.declare.values import BindingSite, FastPath, Requirement


def fast_path(
    module: ParsedModule,
    context: Context,
    *,
    symbol: str,
    package: str,
    import_module: str,
    mechanism: str,
    line: int,
    binding: BindingSite,
    availability: Availability | None,
    gate_member: str,
    hub_first: bool = False,
    detail: str = "",
) -> FastPath:
    """Puts one fast path together with its gate, its notices and what runs instead."""
    found = find_gate(module, context, gate_member, binding.owner)
    requirement, disabled_by = Requirement.AUTOMATIC, ""
    if found is not None and found.switch is not None:
        if context.setting(found.switch) is False:
            disabled_by = f"{found.switch}=False"
        elif found.raises:
            requirement = Requirement.HARD
    elif found is not None and found.raises:
        requirement = Requirement.HARD
    return FastPath(
        symbol=symbol,
        package=package,
        distribution=context.distribution(package),
        import_module=import_module,
        mechanism=mechanism,
        requirement=requirement,
        phases=context.phases(package, symbol),
        model_type=context.model_type,
        file=module.file,
        line=line,
        binding=binding,
        layers=None,
        fallback=_fallback(module, binding.owner, gate_member, found),
        notices=(found.notices if found is not None else ()) or (SILENT,),
        gate=found.gate if found is not None else None,
        availability_check=availability.name if availability is not None else None,
        availability_needs_gpu=availability.needs_gpu if availability is not None else False,
        availability_missing=availability is not None and not availability.exists,
        hub_first=hub_first,
        hub_window=kernels_window(context.source) if hub_first else None,
        disabled_by=disabled_by,
        detail=detail,
    )


def _fallback(module: ParsedModule, owner: str | None, name: str, gate: FoundGate | None) -> str:
    """What runs without the kernel, as the owner's code says it."""
    node = module.definitions.get(owner) if owner else None
    if node is None:
        return "PyTorch code of the same file"
    if gate is not None and gate.gate.decides:
        if gate.raises and gate.switch is not None:
            return f"nothing: {owner}.forward raises unless {gate.switch}=False"
        return f"{owner}.{gate.slow_method or 'forward'} (PyTorch, same file)"
    for inner in walk(node):
        # kernel or torch_kernel
        if isinstance(inner, ast.BoolOp) and isinstance(inner.op, ast.Or) and dotted(inner.values[0]) == name:
            other = dotted(inner.values[-1])
            if other is not None:
                return f"{other} (PyTorch, same file)"
        # torch_kernel if kernel is None else kernel, and the other way round
        if isinstance(inner, ast.IfExp) and name in {n.id for n in walk(inner.test) if isinstance(n, ast.Name)}:
            arms = [a.func if isinstance(a, ast.Call) else a for a in (inner.body, inner.orelse)]
            other = next((d for d in map(dotted, arms) if d is not None and d != name), None)
            if other is not None:
                return f"{other} (PyTorch, same file)"
    return f"PyTorch code in {owner} (same file)"
