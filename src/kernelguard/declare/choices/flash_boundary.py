"""Does flash attention learn from `position_ids` where a packed sample starts? Read from the layers that call it.

transformers' flash attention takes restarting `position_ids` for boundaries, if it gets them: they come in the keyword
arguments that an attention layer hands on. A layer that names `position_ids` among its own parameters takes them out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from kernelguard.declare.modes import FlashBoundary
from kernelguard.declare.reach import Part
from kernelguard.declare.reading import Reading
from kernelguard.declare.source import walk

NAME = "flash_boundary"
_CALLED = frozenset({"attention_interface", "_flash_attention_forward"})
_SIGNAL = "position_ids"
_TEXT = frozenset({"text_config", "llm_config", "language_config", "decoder"})
"""Parts that get the tokens of a packed batch; images and sounds are not packed in this way."""


def modes(reading: Reading) -> Iterable[FlashBoundary]:
    """One value for each text part with an attention layer that surely keeps the position ids to itself."""
    for part in reading.parts:
        # What the top of a composite attends with by itself looks at images.
        if len(reading.parts) == 1 or part.sub.path.rsplit(".", 1)[-1] in _TEXT:
            yield from list(_kept(reading, part))[:1]


def _kept(reading: Reading, part: Part) -> Iterator[FlashBoundary]:
    for module, reached in reading.modules(part):
        if not any(name in module.text for name in _CALLED):
            continue
        for name in sorted(reached):
            node = module.definitions.get(name)
            for function in node.body if isinstance(node, ast.ClassDef) else ():
                if not isinstance(function, ast.FunctionDef) or function.name != "forward":
                    continue
                for call in _calls(function):
                    if _keeps(function, call):
                        yield FlashBoundary(
                            path=part.sub.path,
                            model_type=part.sub.model_type,
                            attention=name,
                            file=module.file,
                            line=call.lineno,
                            hands_on=any(keyword.arg is None for keyword in call.keywords),
                        )


def _calls(function: ast.FunctionDef) -> Iterator[ast.Call]:
    for node in walk(function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLED:
            yield node


def _keeps(function: ast.FunctionDef, call: ast.Call) -> bool:
    """True only where it is certain: anything that cannot be read may hand them on."""
    if any(keyword.arg == _SIGNAL for keyword in call.keywords) or any(isinstance(a, ast.Starred) for a in call.args):
        return False
    own = [argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)]
    given = [node for argument in call.args for node in walk(argument)]
    given += [node for keyword in call.keywords for node in walk(keyword.value)]
    put_in = any(isinstance(node, ast.Constant) and node.value == _SIGNAL for node in walk(function))
    used = any(isinstance(node, ast.Name) and node.id == _SIGNAL for node in given)
    return _SIGNAL in own and not put_in and not used
