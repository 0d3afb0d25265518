"""Experts of a mixture: `grouped_mm` by default, a Python loop for classes that do not let it be chosen."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from kernelguard.declare.mechanisms import real_name
from kernelguard.declare.modes import Experts
from kernelguard.declare.reach import Part
from kernelguard.declare.reading import Reading, literal_text
from kernelguard.declare.source import ParsedModule, called, dotted, walk

NAME = "experts"
_DECORATOR = "use_experts_implementation"
_MARKER = f"@{_DECORATOR}"
"""transformers itself looks for this text in the file of the model's class."""
_MOE = "integrations/moe.py"
_CLASS = re.compile(r"Experts?$|ParallelExperts|GroupedExperts|NaiveMoe$")
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def modes(reading: Reading) -> Iterable[Experts]:
    """One value for each reached class of experts."""
    if reading.source.text(_MOE) is None:
        return  # transformers 4: nothing can be chosen, and nothing is promised
    capability = "get_device_capability" in _check_text(reading)
    found: dict[tuple[str, int], Experts] = {}
    for part in reading.parts:
        if _has_none(part):
            continue
        for module, reached in reading.modules(part):
            for node, decorated in _experts(module, reached):
                found[module.file, node.lineno] = Experts(
                    model_type=part.sub.model_type,
                    experts_class=node.name,
                    file=module.file,
                    line=node.lineno,
                    selectable=any(_MARKER in root.text for root, _ in part.roots) or not part.roots,
                    decorated=decorated,
                    checks_capability=capability,
                    configured=literal_text(
                        part.sub.raw.get("experts_implementation") or part.sub.raw.get("_experts_implementation")
                    ),
                )
    yield from found.values()


def _experts(module: ParsedModule, reached: frozenset[str]) -> Iterator[tuple[ast.ClassDef, bool]]:
    for node in module.classes():
        if node.name not in reached:
            continue
        if any(real_name(module, called(d)) == _DECORATOR for d in node.decorator_list):
            yield node, True
        elif _CLASS.search(node.name) and _is_module(node):
            yield node, False


def _is_module(node: ast.ClassDef) -> bool:
    """A class with a forward of its own that builds parameters or a list of modules."""
    names = {dotted(c.func) for c in walk(node) if isinstance(c, ast.Call)}
    builds = bool(names & {"nn.Parameter", "nn.ModuleList", "nn.ModuleDict", "torch.nn.Parameter"})
    own = builds or any(base in {"nn.ModuleList", "nn.ModuleDict"} for base in map(dotted, node.bases))
    return own and any(isinstance(m, ast.FunctionDef) and m.name == "forward" for m in node.body)


def _has_none(part: Part) -> bool:
    """The configuration says how many experts there are, and that is none or one (jamba without a mixture)."""
    counts = [part.sub.raw[name] for name in _COUNTS if name in part.sub.raw]
    return bool(counts) and all(count is None or (isinstance(count, int) and count <= 1) for count in counts)


def _check_text(reading: Reading) -> str:
    node = reading.source.fragment(_MOE, "_can_use_grouped_mm")
    memo = reading.source.memo
    if _MOE not in memo:
        memo[_MOE] = ast.unparse(node) if node is not None else ""
    return str(memo[_MOE])
