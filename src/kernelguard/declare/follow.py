"""How many layers call each kernel, and how do sample boundaries reach it? Builds and runs the model symbolically."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from kernelguard.declare.index import Index
from kernelguard.declare.mechanisms import users_of
from kernelguard.declare.reach import Part
from kernelguard.declare.source import dotted
from kernelguard.declare.symbolic.configs import config_of
from kernelguard.declare.symbolic.machine import Machine
from kernelguard.declare.symbolic.values import (
    UNKNOWN,
    Arguments,
    ClassValue,
    GiveUpError,
    Instance,
    Kernel,
    KernelLoader,
    Seq,
    Signal,
    Table,
    Value,
    is_known,
)
from kernelguard.declare.values import BindingKind, Boundary, FastPath, LayerKind, Requirement
from kernelguard.matrix import KernelPackages

_LAYER_LISTS = ("layer_types", "layers_block_type")
Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """What following the model told."""

    fast_paths: tuple[FastPath, ...]
    """With `layers` and `boundaries` filled in."""
    layer_kinds: tuple[LayerKind, ...]
    reason: str | None = None
    """Why nothing more could be told."""


def follow(index: Index, kernels: KernelPackages, parts: list[Part], paths: tuple[FastPath, ...]) -> Followed:
    """Follows the constructor and the forward of the top part's class for these fast paths."""
    table = _kernel_table(index, paths)
    relevant = _relevant(index, parts, table)
    universe = frozenset((file, name) for part in parts for file, names in part.reached.items() for name in names)
    machine = Machine(index, table, relevant, universe)
    top = parts[0]
    built = run = False
    reason: str | None = None
    try:
        model = _build(machine, index, top)
        built = model is not None
        if model is None:
            reason = f"no class of {top.entry.model_type} could be followed"
        elif any(machine.built.values()):
            machine.calling = True
            machine.call(model, Arguments(rest=Table(is_open=True)))
            run = _complete(machine, model)
    except GiveUpError as error:
        reason = str(error)
    except RecursionError:
        reason = "the code is nested too deeply"
    reason = reason or machine.lost
    reached: dict[str, frozenset[str]] = {}
    for part in parts:
        for file, names in part.reached.items():
            reached[file] = reached.get(file, frozenset()) | names
    done = tuple(_describe(machine, kernels, path, reached, built=built, run=run) for path in paths)
    return Followed(fast_paths=done, layer_kinds=_layer_kinds(machine, paths), reason=reason)


def builds_without_kernels(index: Index, parts: list[Part]) -> str | None:
    """None when the model can be built by following known code alone, else what stands in the way."""
    universe = frozenset((file, name) for part in parts for file, names in part.reached.items() for name in names)
    machine = Machine(index, {}, universe, universe)
    try:
        model = _build(machine, index, parts[0])
    except (GiveUpError, RecursionError) as error:
        return str(error) or "it is nested too deeply"
    return machine.lost or (None if model is not None else "no class to start from")


def _describe(
    machine: Machine,
    kernels: KernelPackages,
    path: FastPath,
    reached: dict[str, frozenset[str]],
    *,
    built: bool,
    run: bool,
) -> FastPath:
    """One fast path with its layers, its boundaries, and what becomes of key heads on the way to it."""
    layers = _layers(machine, path, reached, built=built)
    path = replace(path, repeats_heads=_repeats_heads(machine, path, reached))
    if path.binding.kind is BindingKind.AT_CALL:
        return replace(path, layers=layers)
    called = any(_is(kernel, path) for kernel, _ in machine.calls)
    if run and not called and layers and path.requirement is not Requirement.HARD:
        if path.gate is not None and path.gate.decides and path.binding.name in path.gate.members:
            return replace(path, layers=layers, detail=f"Never called, but {path.gate.name} wants it to be there.")
        return replace(path, layers=0, detail="With this configuration no layer calls it.")
    known = kernels.symbol(path.package, path.symbol)
    if known is None or layers == 0:
        return replace(path, layers=layers)
    if not run or machine.lost:
        boundaries = tuple(Boundary(argument=argument, signals=(), known=False) for argument in known.boundaries)
    else:
        calls = [(kernel, arguments) for kernel, arguments in machine.calls if _is(kernel, path)]
        boundaries = tuple(_boundary(argument, calls) for argument in known.boundaries)
    return replace(path, layers=layers, boundaries=boundaries)


def _repeats_heads(machine: Machine, path: FastPath, reached: dict[str, frozenset[str]]) -> bool | None:
    """Whether a layer that uses it calls `repeat_interleave(..., dim=2)`: heads are there in `[B, T, heads, size]`."""
    module = machine.source.module(path.file)
    if module is None:
        return None
    name = path.binding.loader or path.binding.name
    owners = [module.definitions[o] for o in users_of(module, name, reached.get(path.file, frozenset()))]
    calls = [node for owner in owners for node in ast.walk(owner) if isinstance(node, ast.Call)]
    # A model that holds the layer uses the kernel too, and repeats other things along other dimensions.
    return any(map(_is_repeat_of_heads, calls)) if owners else None


def _is_repeat_of_heads(call: ast.Call) -> bool:
    named = isinstance(call.func, ast.Attribute) and call.func.attr == "repeat_interleave"
    return named and any(
        keyword.arg == "dim" and isinstance(keyword.value, ast.Constant) and keyword.value.value == 2
        for keyword in call.keywords
    )


def _is(kernel: Kernel, path: FastPath) -> bool:
    return (kernel.module, kernel.name) == (path.file, path.binding.name)


def _complete(machine: Machine, model: Instance) -> bool:
    """Every module that calls a kernel was found in the finished model, and followed (or one of the same shape was)."""
    ran = {machine.shape(module) for module in machine.ran}
    held = [module for module in machine.modules(model) if module.cls.key in machine.leaves]
    made = sum(certain + perhaps for cls, (certain, perhaps) in machine.built.items() if cls.key in machine.leaves)
    return len(held) == made and all(machine.shape(module) in ran for module in held)


def _kernel_table(index: Index, paths: Iterable[FastPath]) -> dict[Key, Value]:
    """What stands at each module-level name that a fast path is bound to: everything is taken for loaded."""
    table: dict[Key, Value] = {}
    loaders: dict[Key, dict[int, Kernel]] = {}
    for path in paths:
        site = path.binding
        if site.kind is BindingKind.AT_CALL:
            continue
        module = index.source.module(path.file)
        node = module.definitions.get(site.name) if module is not None else None
        parameters = tuple(a.arg for a in node.args.args) if isinstance(node, ast.FunctionDef) else ()
        kernel = Kernel(site.name, path.file, is_class=path.symbol[:1].isupper(), parameters=parameters)
        if site.kind is BindingKind.FUNCTION_RESULT and site.loader is not None and site.index is not None:
            loaders.setdefault((path.file, site.loader), {})[site.index] = kernel
        else:
            table[path.file, site.name] = kernel
    for key, results in loaders.items():
        table[key] = KernelLoader(tuple(results.get(i, UNKNOWN) for i in range(max(results) + 1)))
    return table


def _relevant(index: Index, parts: list[Part], table: dict[Key, Value]) -> frozenset[Key]:
    """Every class and function from which a kernel can be reached."""
    users: dict[Key, set[Key]] = {}
    automatic: set[Key] = set()
    names_of: dict[str, set[str]] = {}
    for part in parts:
        for file, names in part.reached.items():
            names_of.setdefault(file, set()).update(names)
    for file, of_file in names_of.items():
        module = index.source.module(file)
        if module is None:
            continue
        for name in of_file:
            for used in module.names_used_by(name):
                if (file, used) in table:
                    users.setdefault((file, used), set()).add((file, name))
                    continue
                if used.startswith("AutoModel"):
                    automatic.add((file, name))
                found = index.source.resolve(module, used)
                if found is not None:
                    users.setdefault((found[0].file, found[1]), set()).add((file, name))
    # A model that builds its parts through AutoModel names no class of theirs.
    todo = [*table, *automatic]
    seen: set[Key] = set(automatic)
    while todo:
        for user in users.get(todo.pop(), ()):
            if user not in seen:
                seen.add(user)
                todo.append(user)
    return frozenset(seen)


def _build(machine: Machine, index: Index, top: Part) -> Instance | None:
    """The model object of the top part, or None when there is no class to start from."""
    module = index.config_module(top.entry)
    if module is None or not top.roots:
        return None
    config_class = machine.global_value(module, top.entry.config_class)
    root = machine.global_value(*top.roots[0])
    if not isinstance(config_class, ClassValue) or not isinstance(root, ClassValue):
        return None
    config = config_of(machine, config_class, top.sub.raw)
    wanted = _config_annotation(machine, root)
    if wanted is not None and wanted != config_class.node.name:
        # AutoModelForCausalLM takes the text part of a composite configuration when the class wants that.
        inner = [v for v in config.attributes.values() if isinstance(v, Instance) and v.cls.node.name == wanted]
        config = inner[0] if inner else config
    model = machine.instantiate(root, Arguments([config]))
    return model if isinstance(model, Instance) else None


def _config_annotation(machine: Machine, cls: ClassValue) -> str | None:
    """The configuration class that a model class names in its body: `config: XTextConfig` or `config_class = ...`."""
    for owner in machine.mro(cls):
        for statement in owner.node.body:
            if isinstance(statement, ast.AnnAssign) and dotted(statement.target) == "config":
                return dotted(statement.annotation)
            if isinstance(statement, ast.Assign) and dotted(statement.targets[0]) == "config_class":
                return dotted(statement.value)
    return None


def _layers(machine: Machine, path: FastPath, reached: dict[str, frozenset[str]], *, built: bool) -> int | None:
    """How many modules use a kernel; None when that depends on something unknown."""
    module = machine.source.module(path.file)
    if not built or module is None or machine.lost:
        return None
    name = path.binding.loader or path.binding.name
    owners = {(path.file, owner) for owner in users_of(module, name, reached.get(path.file, frozenset()))}
    if path.binding.kind is BindingKind.AT_CALL and path.binding.owner is not None:
        owners = {(path.file, path.binding.owner)}
    total = 0
    for cls, (certain, perhaps) in machine.built.items():
        if owners & {base.key for base in machine.mro(cls)}:
            if perhaps:
                return None
            total += certain
    return total


def _layer_kinds(machine: Machine, paths: tuple[FastPath, ...]) -> tuple[LayerKind, ...]:
    """The layer types of the configuration that brings the fast paths in, or else of the first one that lists any."""
    wanted = {path.model_type for path in paths}
    found: list[tuple[bool, Seq]] = []
    for config in machine.configs:
        for name in _LAYER_LISTS:
            try:
                value = machine.attribute(config, name)
            except (GiveUpError, RecursionError):
                continue
            if isinstance(value, Seq) and value and is_known(value) and all(isinstance(kind, str) for kind in value):
                kind = machine.index.type_of_class(config.cls.module, config.cls.node.name)
                found.append((kind in wanted, value))
                break
    if not found:
        return ()
    best = next((value for matches, value in found if matches), found[0][1])
    return tuple(LayerKind(name=name, count=count) for name, count in Counter(best).items())


def _boundary(argument: str, calls: list[tuple[Kernel, Arguments]]) -> Boundary:
    """How one boundary argument is fed, over every call that was seen."""
    fed = [_argument(argument, kernel, arguments) for kernel, arguments in calls]
    if any(value is not None and not isinstance(value, Signal) for value in fed):
        return Boundary(argument=argument, signals=(), known=False)
    # One call without it is enough to mix samples.
    names = [{value.name} if isinstance(value, Signal) else set() for value in fed]
    return Boundary(argument=argument, signals=tuple(sorted(set.intersection(*names))))


def _argument(argument: str, kernel: Kernel, arguments: Arguments) -> Value:
    """What one call gives for a parameter; None: nothing."""
    if argument in arguments.keywords:
        return arguments.keywords[argument]
    if arguments.vague_positional:
        return UNKNOWN
    if argument in kernel.parameters and kernel.parameters.index(argument) < len(arguments.positional):
        return arguments.positional[kernel.parameters.index(argument)]
    rest = arguments.rest
    if rest is None:
        return None
    if argument in rest:
        return rest[argument]
    if rest.vague:
        return UNKNOWN
    return Signal(argument) if rest.open and argument not in rest.removed else None
