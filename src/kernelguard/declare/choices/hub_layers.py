"""Layers and functions that `use_kernels=True` replaces by hub kernels, and for which devices and modes it does."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.mechanisms import real_name
from kernelguard.declare.modes import HubLayer, HubLayers, HubOption
from kernelguard.declare.notes import model_notes
from kernelguard.declare.reading import Reading
from kernelguard.declare.source import ParsedModule, Source, called, dotted, literal, walk

NAME = "hub_layers"
Mapping = dict[str, tuple[HubOption, ...]]
_HUB_KERNELS = "integrations/hub_kernels.py"
_TABLE = "_KERNEL_MAPPING"
_READS = frozenset({"get", "items", "keys", "values", "copy"})
_WITH_PACKAGE = "use_kernel_func_from_hub_with_fallback"
_DECORATORS = frozenset({"use_kernel_forward_from_hub", "use_kernel_func_from_hub", _WITH_PACKAGE})


def modes(reading: Reading) -> Iterable[HubLayers]:
    """One value for the whole model, when it has any such layer."""
    found: dict[tuple[str, int], HubLayer] = {}
    mapping: Mapping | None = None
    unread: list[str] = []
    for part in reading.parts:
        for module, reached in reading.modules(part):
            if not any(word in module.text for word in _DECORATORS):
                continue
            if mapping is None:
                mapping = hub_mapping(reading.source, unread)
            for layer in _layers(module, reached, part.sub.model_type, mapping):
                found[layer.file, layer.line] = layer
    if found:
        text = reading.source.text(_HUB_KERNELS) or ""
        layers = tuple(found[key] for key in sorted(found))
        yield HubLayers(
            layers=layers, window=reading.window(), obeys_switch="USE_HUB_KERNELS" in text, unread=tuple(unread)
        )


def _layers(module: ParsedModule, reached: frozenset[str], model_type: str, mapping: Mapping) -> Iterator[HubLayer]:
    for name, node in module.definitions.items():
        for decorator in node.decorator_list if name in reached else ():
            kind = real_name(module, called(decorator))
            if kind not in _DECORATORS or not isinstance(decorator, ast.Call):
                continue
            words = [literal(a) for a in (*decorator.args, *(k.value for k in decorator.keywords))]
            texts = [word for word in words if isinstance(word, str)]
            if not texts:
                continue
            yield HubLayer(
                layer=texts[0],
                name=name,
                model_type=model_type,
                file=module.file,
                line=decorator.lineno,
                mapped=texts[0] in mapping,
                options=mapping.get(texts[0], ()),
                package=texts[1] if kind == _WITH_PACKAGE and len(texts) > 1 else "",
            )


def hub_mapping(source: Source, unknowns: list[str]) -> Mapping:
    """What transformers' own mapping has, by layer name; what could not be read is added to `unknowns`."""
    module = source.module(_HUB_KERNELS)
    if module is None:
        unknowns.append(f"{_HUB_KERNELS} is not there, so what use_kernels=True replaces is not known.")
        return {}
    if NAME not in module.memo:
        module.memo[NAME] = _read(module)
    found, problems = module.memo[NAME]
    unknowns += problems
    return dict(found)


def _read(module: ParsedModule) -> tuple[Mapping, list[str]]:
    found: Mapping = {}
    problems: list[str] = []
    tables: dict[str, ast.Dict] = {}
    statements = [n for s in module.body for n in walk(s) if isinstance(n, (ast.Assign, ast.AnnAssign, ast.AugAssign))]
    for node in sorted(statements, key=lambda n: n.lineno):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        name, value = dotted(target), node.value
        if name is not None and isinstance(value, ast.Dict):
            tables[name] = value
        if name == _TABLE:
            # `table | another` adds another one.
            sides = [value.left, value.right] if isinstance(value, ast.BinOp) else [value]
            for side in sides:
                rows = side if isinstance(side, ast.Dict) else tables.get(dotted(side) or "") if side else None
                if rows is None:
                    problems.append(
                        f"{_HUB_KERNELS}:{node.lineno}: {_TABLE} is made in a way that is not understood here."
                    )
                    continue
                for key, entry in zip(rows.keys, rows.values, strict=True):
                    _add(found, problems, key, entry)
        elif isinstance(target, ast.Subscript) and dotted(target.value) == _TABLE and value is not None:
            _add(found, problems, target.slice, value)
    problems += [
        f"{_HUB_KERNELS}:{call.lineno}: {_TABLE} is changed in a way that is not understood here."
        for statement in module.body
        for call in walk(statement)
        if isinstance(call, ast.Call)
        and (dotted(call.func) or "").startswith(f"{_TABLE}.")
        and called(call) not in _READS
    ]
    if not found:
        problems.append(f"{_HUB_KERNELS}: the table {_TABLE} has a shape that is not understood here.")
    return found, problems


class _UnreadError(Exception):
    """A piece of the mapping has a shape that is not known."""


def _add(found: Mapping, problems: list[str], key: ast.expr | None, value: ast.expr) -> None:
    name = literal(key)
    if not isinstance(name, str):
        problems.append(f"{_HUB_KERNELS}: a key of {_TABLE} is no text.")
        return
    try:
        found[name] = tuple(_devices(value))
    except _UnreadError as error:
        found[name] = ()
        problems.append(f"{_HUB_KERNELS}:{value.lineno}: the entry of {name} is not understood here ({error}).")


def _devices(value: ast.expr) -> Iterator[HubOption]:
    if not isinstance(value, ast.Dict):
        raise _UnreadError("no dictionary of devices")
    for key, entry in zip(value.keys, value.values, strict=True):
        device, lowest, highest = _device(key)
        for training, repository, versioned in _by_mode(entry):
            yield HubOption(
                device=device,
                training=training,
                repository=repository,
                wrong_gradient=model_notes().wrong_gradients.get(repository, ""),
                minimum_capability=lowest,
                maximum_capability=highest,
                versioned=versioned,
            )


def _device(key: ast.expr | None) -> tuple[str, tuple[int, int] | None, tuple[int, int] | None]:
    """`"cuda"`, or `Device(type="cuda", properties=CUDAProperties(min_capability=121, max_capability=121))`."""
    name = literal(key)
    if isinstance(name, str):
        return name, None, None
    if not isinstance(key, ast.Call) or called(key) != "Device":
        raise _UnreadError("an unknown kind of device")
    given = {k.arg: k.value for k in key.keywords}
    name = literal(given.get("type", key.args[0] if key.args else None))
    properties = given.get("properties")
    bounds = {str(k.arg): literal(k.value) for k in properties.keywords} if isinstance(properties, ast.Call) else {}
    if (
        not isinstance(name, str)
        or set(given) - {"type", "properties"}
        or set(bounds)
        - {
            "min_capability",
            "max_capability",
        }
    ):
        raise _UnreadError("an unknown property of a device")
    return name, _capability(bounds.get("min_capability")), _capability(bounds.get("max_capability"))


def _capability(value: object) -> tuple[int, int] | None:
    """`121` is 12.1; a very large number stands for no bound."""
    return divmod(value, 10) if isinstance(value, int) and value <= 10_000 else None


def _by_mode(entry: ast.expr) -> Iterator[tuple[bool, str, bool]]:
    """(taken in training, repository, versioned).

    `kernels` also takes an entry without a mode, and `TRAINING | TORCH_COMPILE`.
    """
    if isinstance(entry, ast.Call):
        yield True, *_repository(entry)
        return
    if not isinstance(entry, ast.Dict):
        raise _UnreadError("no repository")
    for key, value in zip(entry.keys, entry.values, strict=True):
        words = {dotted(n) for n in walk(key) if isinstance(n, ast.Attribute)} if key is not None else set()
        if not words or not isinstance(value, ast.Call):
            raise _UnreadError("an unknown mode")
        yield bool(words & {"Mode.TRAINING", "Mode.FALLBACK"}), *_repository(value)


def _repository(call: ast.Call) -> tuple[str, bool]:
    name = literal(next((k.value for k in call.keywords if k.arg == "repo_id"), call.args[0] if call.args else None))
    if not isinstance(name, str):
        raise _UnreadError("a repository without repo_id")
    return name, any(k.arg == "version" for k in call.keywords)
