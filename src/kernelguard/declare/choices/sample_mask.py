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
    """One value for each text part that asks for a causal mask, and never with the position ids."""
    for part in reading.parts:
        if part.sub.path.rsplit(".", 1)[-1] not in _TEXT:
            continue
        calls = list(_calls(reading, part))
        if calls and not any(told for _, _, told in calls):
            file, line, _ = calls[0]
            yield SampleMask(path=part.sub.path, model_type=part.sub.model_type, file=file, line=line)


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
    # `make = create_causal_mask if ... else ...`: called by another name, with who knows what.
    named = {id(call.func) for call in direct}
    for node in walk(function):
        if isinstance(node, ast.Name) and _maker(node) and id(node) not in named:
            yield node.lineno, True


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
