"""Which attention can each sub-model run? Its class's flags; what it really gets depends on the request."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from kernelguard.declare.index import class_and_bases
from kernelguard.declare.modes import Attention
from kernelguard.declare.reach import Part
from kernelguard.declare.reading import Reading, literal_text
from kernelguard.declare.source import ParsedModule, literal, simple_assignments, walk

NAME = "attention"
_FLASH_UTILS = "modeling_flash_attention_utils.py"
_MODELING = "modeling_utils.py"
_CLASS = re.compile(r"Attention|Attn")
_SOFTMAX = frozenset({"softmax", "Softmax", "scaled_dot_product_attention"})
_FLAGS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn", "_compatible_flash_implementations")
_IN_FUNCTION = re.compile(
    r'"(kernels-community/flash-attn)".{0,80}?else:.{0,80}?"(kernels-community/[\w-]+)"', re.DOTALL
)


def modes(reading: Reading) -> Iterable[Attention]:
    """One value for each part whose class could be told."""
    hub_flash = _hub_flash(reading)
    for number, part in enumerate(reading.parts):
        if not part.roots:
            continue
        module, name = part.roots[0]
        flags = _flags(reading, module, name)
        found = reading.source.resolve(module, name)
        node = found[0].definitions.get(found[1]) if found else None
        yield Attention(
            path=part.sub.path,
            model_type=part.sub.model_type,
            model_class=name,
            file=found[0].file if found else module.file,
            line=node.lineno if node is not None else 1,
            sdpa=_flag(flags, "_supports_sdpa"),
            flash=_flag(flags, "_supports_flash_attn"),
            flex=_flag(flags, "_supports_flex_attn"),
            compatible=_names(flags.get("_compatible_flash_implementations")),
            own=_own(reading, number),
            configured=literal_text(
                part.sub.raw.get("attn_implementation") or part.sub.raw.get("_attn_implementation")
            ),
            surely_built=number == 0 or _built(reading, number, name),
            window=reading.window(),
            hub_flash=hub_flash,
        )


def _flags(reading: Reading, module: ParsedModule, name: str) -> dict[str, object]:
    """The class attributes of the model class, nearest base first; absent ones are PreTrainedModel's own: False."""
    flags: dict[str, object] = {}
    for _, node in class_and_bases(reading.source, module, name):
        for statement in node.body:
            for target, value in simple_assignments(statement):
                if target in _FLAGS:
                    flags.setdefault(target, literal(value))
    return flags


def _flag(flags: dict[str, object], name: str) -> bool | None:
    value = flags.get(name, False)
    return value if isinstance(value, bool) else None


def _names(value: object) -> tuple[str, ...]:
    return tuple(v for v in value if isinstance(v, str)) if isinstance(value, (list, tuple)) else ()


def _own(reading: Reading, number: int) -> tuple[str, ...]:
    """Attention with a softmax that this part brings in and no part inside it does."""
    part = reading.parts[number]
    inside = [p for p in reading.parts if _is_below(p, part)]
    return tuple(
        node.name
        for module, reached in reading.modules(part)
        for node in module.classes()
        if node.name in reached
        and _CLASS.search(node.name)
        and not any(node.name in p.reached.get(module.file, ()) for p in inside)
        and _has_softmax(module, node)
    )


def _is_below(part: Part, outer: Part) -> bool:
    return part is not outer and part.sub.path.startswith(f"{outer.sub.path}." if outer.sub.path else "")


def _has_softmax(module: ParsedModule, node: ast.ClassDef) -> bool:
    key = (NAME, node.name)
    if key not in module.memo:
        used = {node.name} | {n for n in module.names_used_by(node.name) if "attention_forward" in n}
        module.memo[key] = any(
            isinstance(inner, ast.Attribute) and inner.attr in _SOFTMAX
            for name in used
            if name in module.definitions
            for inner in walk(module.definitions[name])
        )
    return bool(module.memo[key])


def _built(reading: Reading, number: int, name: str) -> bool:
    """An outer part names the class, or builds its parts through AutoModel."""
    part = reading.parts[number]
    return any(
        name in reached
        or any(used.startswith("AutoModel") for known in reached for used in module.names_used_by(known))
        for outer in reading.parts[:number]
        if _is_below(part, outer)
        for module, reached in reading.modules(outer)
    )


def _hub_flash(reading: Reading) -> tuple[tuple[str, str], ...]:
    node = reading.source.fragment(_FLASH_UTILS, "FLASH_ATTN_KERNEL_FALLBACK")
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Dict):
        pairs = []
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            # Some depend on the machine; aiter is AMD's.
            texts = [n.value for n in walk(value) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            repository = next((text for text in texts if "/" in text and "aiter" not in text), None)
            name = literal(key)
            if isinstance(name, str) and repository is not None:
                pairs.append((name, repository))
        return tuple(pairs)
    # 4.57 has the names inside the function.
    found = _IN_FUNCTION.search(reading.source.text(_MODELING) or "")
    return (("flash_attention_2", found[1]), ("flash_attention_3", found[2])) if found else ()
