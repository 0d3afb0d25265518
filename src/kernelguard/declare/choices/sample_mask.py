"""Does the model's attention learn from `position_ids` where a packed sample starts? Read from its calls for a mask."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.modes import SampleMask
from kernelguard.declare.reach import Part
from kernelguard.declare.reading import Reading
from kernelguard.declare.source import literal, walk

NAME = "sample_mask"
_MAKERS = frozenset({"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"})
_SIGNAL = "position_ids"
_BY_POSITION = 4
"""More unnamed arguments than this may hold the position ids, in one release or another."""
_NOT_TRAINING = frozenset({"create_masks_for_generate", "prepare_inputs_for_generation"})
_TEXT = frozenset({"", "text_config", "llm_config", "language_config", "decoder"})
"""Parts that get the tokens of a packed batch; images and sounds are not packed in this way."""


def modes(reading: Reading) -> Iterable[SampleMask]:
    """One value for each text part that asks for a causal mask and never with the position ids, or asks for none."""
    texts = [part for part in reading.parts if part.sub.path.rsplit(".", 1)[-1] in _TEXT]
    for part in texts:
        calls = list(_calls(reading, part))
        made = bool(calls)
        # What the top of a composite attends with by itself looks at images.
        if not made and (part.sub.path or len(reading.parts) == 1):
            calls = [(file, line, False) for file, line in _attention(reading, part)]
        if calls and not any(told for _, _, told in calls):
            file, line, _ = calls[0]
            sub = part.sub
            yield SampleMask(path=sub.path, model_type=sub.model_type, file=file, line=line, is_library_mask=made)


def _attention(reading: Reading, part: Part) -> Iterator[tuple[str, int]]:
    """The classes that attend in a part that never asks for a mask: it makes one of its own, if any."""
    for module, reached in reading.modules(part):
        for name in sorted(reached):
            node = module.definitions.get(name)
            if isinstance(node, ast.ClassDef) and name.endswith("Attention"):
                yield module.file, node.lineno


def _calls(reading: Reading, part: Part) -> Iterator[tuple[str, int, bool]]:
    """Where a forward pass asks for a mask, and whether it may hand the position ids over."""
    for module, reached in reading.modules(part):
        if not any(maker in module.text for maker in _MAKERS):
            continue
        for name in sorted(reached):
            node = module.definitions.get(name)
            for function in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(function, ast.FunctionDef) and function.name not in _NOT_TRAINING:
                    for line, told in _calls_in(function):
                        yield module.file, line, told


def _calls_in(function: ast.FunctionDef) -> Iterator[tuple[int, bool]]:
    direct = [node for node in walk(function) if isinstance(node, ast.Call) and _maker(node.func)]
    for call in direct:
        yield call.lineno, _told(call, function)
    named = {id(call.func) for call in direct}
    others = [n for n in walk(function) if isinstance(n, ast.Name) and _maker(n) and id(n) not in named]
    if not others:
        return
    # `make = create_causal_mask if ... else ...`: called by another name.
    chosen = {
        target.id
        for node in walk(function)
        if isinstance(node, ast.Assign) and any(_maker(n) for n in walk(node.value) if isinstance(n, ast.Name))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        node
        for node in walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in chosen
    ]
    for call in calls:
        yield call.lineno, _told(call, function)
    if not calls:
        # Handed on, to who knows what.
        yield others[0].lineno, True


def _maker(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in _MAKERS


def _told(call: ast.Call, function: ast.FunctionDef) -> bool:
    """False only where it is certain: anything that cannot be read may hold them."""
    if len(call.args) > _BY_POSITION or any(isinstance(a, ast.Starred) for a in call.args):
        return True
    for keyword in call.keywords:
        if keyword.arg == _SIGNAL:
            return not (isinstance(keyword.value, ast.Constant) and keyword.value.value is None)
        if keyword.arg is None and _may_hold(keyword.value, function):
            return True
    return False


def _may_hold(value: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether a dictionary that is handed over as `**value` may have the position ids in it."""
    if not isinstance(value, ast.Name):
        return True
    made = [
        node.value
        for node in walk(function)
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == value.id for t in node.targets)
    ]
    if not made or not all(isinstance(m, ast.Dict) for m in made):
        return True
    keys = [literal(k) if k is not None else None for m in made if isinstance(m, ast.Dict) for k in m.keys]
    later = any(
        isinstance(node, (ast.Subscript, ast.Attribute))
        and isinstance(node.value, ast.Name)
        and node.value.id == value.id
        for node in walk(function)
    )
    return later or _SIGNAL in keys or None in keys
