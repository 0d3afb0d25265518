"""What does every model type of a transformers declare? And what did a newer one change, in one line per change?"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import lru_cache
from multiprocessing import get_context
from typing import Any

from kernelguard.declare.config import parse_config
from kernelguard.declare.declaration import Reader
from kernelguard.declare.index import Index, TypeEntry
from kernelguard.declare.modes import AlwaysSlow, Attention, Experts, HubLayers, HubLoad
from kernelguard.declare.source import Source
from kernelguard.declare.values import Declaration, Phase, Requirement, TransformersTree

NOTHING = "none"
_WORKERS = 2
_PIECES = 8
"""More pieces than workers, so that neither waits long for the other at the end."""
_DEPTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyRow:
    """What the code of one model type declares, with the default values of its configuration."""

    model_type: str
    requirement: str
    """The strongest of its fast paths: `hard`, `automatic`, `opt-in` (also: hub layers only), or `none`."""
    mechanisms: tuple[str, ...]
    packages: tuple[str, ...]
    """Distributions."""
    symbols: tuple[str, ...]
    training_symbols: tuple[str, ...]
    """Those that are called in training."""
    without_layers: tuple[str, ...]
    """Symbols that no layer of the default configuration uses."""
    opt_in_layers: tuple[str, ...]
    """Hub names of classes that `use_kernels=True` can replace; `rotary_pos_emb` and the like included."""
    experts: str
    """`grouped_mm` or `eager`, as it is without a request; empty: no experts that are known as such."""
    attention: str
    """`sdpa`, `eager` or `sdpa+eager` (parts differ); empty: no attention with a softmax."""
    always_slow: tuple[str, ...]
    dynamic_sub_configs: tuple[str, ...]
    """`text_config=qwen2`: a nested configuration whose type the file decides, and the default."""
    unknowns: tuple[str, ...]


def survey(tree: TransformersTree, *, workers: int = _WORKERS) -> tuple[SurveyRow, ...]:
    """One row for each model type, sorted. Reads about 25 MB of source; `workers` processes share the work."""
    index = Index(Source(tree))
    types = index.types()
    # Types of one folder share their files, so they go to one worker.
    folders = {name: entry.folder if (entry := index.entry(name)) is not None else "" for name in types}
    ordered = sorted(types, key=lambda name: (folders[name], name))
    if workers <= 1:
        return tuple(sorted(_rows(tree, ordered), key=lambda row: row.model_type))
    pieces = list(_cut(ordered, folders, _PIECES * workers))
    # Not forked: a parent with threads must not do that.
    with ProcessPoolExecutor(
        max_workers=min(workers, os.cpu_count() or 1), mp_context=get_context("spawn"), initializer=gc.disable
    ) as pool:
        found = [row for rows in pool.map(_rows, [tree] * len(pieces), pieces) for row in rows]
    return tuple(sorted(found, key=lambda row: row.model_type))


def _cut(ordered: Sequence[str], folders: dict[str, str], count: int) -> Iterator[list[str]]:
    """About `count` pieces, cut between folders only."""
    size = max(1, len(ordered) // count)
    piece: list[str] = []
    for name in ordered:
        if len(piece) >= size and folders[name] != folders[piece[-1]]:
            yield piece
            piece = []
        piece.append(name)
    if piece:
        yield piece


def _rows(tree: TransformersTree, names: Iterable[str]) -> list[SurveyRow]:
    # Syntax trees are millions of small objects without cycles; collecting between them doubles the time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        reader, index = _reader(tree)
        return [
            _row(name, reader.declare(parse_config({"model_type": name}, source=name)), tuple(_dynamic(index, name)))
            for name in names
        ]
    finally:
        if was_enabled:
            gc.enable()


@lru_cache(maxsize=1)
def _reader(tree: TransformersTree) -> tuple[Reader, Index]:
    """One for all pieces of a worker: files that many models share are parsed once in each process."""
    reader = Reader(tree)
    return reader, reader.index


def _row(name: str, declaration: Declaration, dynamic: tuple[str, ...]) -> SurveyRow:
    paths = declaration.fast_paths
    layers = [layer for fact in declaration.modes if isinstance(fact, HubLayers) for layer in fact.layers]
    loads = [fact for fact in declaration.modes if isinstance(fact, HubLoad)]
    experts = {_experts(fact) for fact in declaration.modes if isinstance(fact, Experts)}
    if "grouped_mm" in experts:
        experts.discard("eager")  # shared experts beside the routed ones are no mixture
    attention = {_attention(fact) for fact in declaration.modes if isinstance(fact, Attention) and fact.own}
    opt_in = tuple(sorted({layer.layer for layer in layers if not layer.package}))
    return SurveyRow(
        model_type=name,
        requirement=_requirement({path.requirement for path in paths}, loads=bool(loads), opt_in=bool(opt_in)),
        mechanisms=tuple(sorted({path.mechanism for path in paths} | ({"hub_loads"} if loads else set()))),
        packages=tuple(sorted({path.distribution for path in paths} | ({"kernels"} if loads else set()))),
        symbols=tuple(sorted({path.symbol for path in paths} | {load.repository for load in loads})),
        training_symbols=tuple(
            sorted(
                {path.symbol for path in paths if Phase.TRAINING in path.phases}
                | {load.repository for load in loads if load.in_training}
            )
        ),
        without_layers=tuple(sorted({path.symbol for path in paths if path.layers == 0})),
        opt_in_layers=opt_in,
        experts="+".join(sorted(experts)),
        attention="+".join(sorted(attention)),
        always_slow=tuple(fact.what for fact in declaration.modes if isinstance(fact, AlwaysSlow)),
        dynamic_sub_configs=dynamic,
        unknowns=declaration.unknowns,
    )


def _requirement(found: set[Requirement], *, loads: bool, opt_in: bool) -> str:
    if Requirement.HARD in found:
        return Requirement.HARD.value
    if Requirement.AUTOMATIC in found or loads:
        return Requirement.AUTOMATIC.value
    return Requirement.OPT_IN.value if found or opt_in else NOTHING


def _experts(fact: Experts) -> str:
    return "grouped_mm" if fact.selectable and fact.decorated else "eager"


def _attention(fact: Attention) -> str:
    return {True: "sdpa", False: "eager", None: "unknown"}[fact.sdpa]


def _dynamic(index: Index, name: str) -> Iterator[str]:
    """Nested configurations whose model_type is the file's to decide, also inside fixed ones."""
    entry = index.entry(name)
    todo: list[tuple[str, TypeEntry, int]] = [("", entry, 0)] if entry is not None else []
    while todo:
        prefix, current, depth = todo.pop(0)
        for sub in index.sub_configs(current):
            path = f"{prefix}{sub.key}"
            if not sub.fixed:
                yield f"{path}={sub.model_type or '?'}"
            elif sub.entry is not None and depth < _DEPTH:
                todo.append((f"{path}.", sub.entry, depth + 1))


def survey_document(tree: TransformersTree, rows: Iterable[SurveyRow]) -> dict[str, Any]:
    """The rows as plain JSON values."""
    return {
        "schema": 1,
        "transformers": str(tree.version),
        "model_types": [
            {
                field.name: list(value) if isinstance(value := getattr(row, field.name), tuple) else value
                for field in fields(row)
            }
            for row in rows
        ],
    }


def survey_table(rows: Sequence[SurveyRow]) -> list[tuple[str, str, str, str, str]]:
    """For a person: types with equal answers share a line. Model types, requirement, packages, symbols, the rest."""
    groups: dict[tuple[str, ...], list[SurveyRow]] = {}
    for row in rows:
        key = (
            *(row.requirement, row.experts, "eager" if row.attention == "eager" else ""),
            *map(repr, (row.packages, row.symbols, row.opt_in_layers, row.always_slow, row.unknowns)),
        )
        groups.setdefault(key, []).append(row)
    table = []
    for group in sorted(groups.values(), key=lambda rows: (_ORDER[rows[0].requirement], rows[0].model_type)):
        row = group[0]
        rest = [
            f"experts: {row.experts}" if row.experts else "",
            "attention: eager" if row.attention == "eager" else "",
            f"use_kernels: {', '.join(row.opt_in_layers)}" if row.opt_in_layers else "",
            *(f"always slow: {what}" for what in row.always_slow),
            *(f"not understood: {text}" for text in row.unknowns),
        ]
        table.append(
            (
                ", ".join(r.model_type for r in group),
                row.requirement,
                ", ".join(row.packages),
                ", ".join(row.symbols),
                "; ".join(text for text in rest if text),
            )
        )
    return table


_ORDER = {"hard": 0, "automatic": 1, "opt-in": 2, NOTHING: 3}


def drift(old: Iterable[SurveyRow], new: Iterable[SurveyRow]) -> tuple[str, ...]:
    """What a newer release changed: one line for each new or gone type that declares something, and each difference."""
    before = {row.model_type: row for row in old}
    after = {row.model_type: row for row in new}
    lines = []
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was is None and now is not None:
            lines.append(f"{name}: new; {_summary(now)}")
        elif was is not None and now is None:
            lines.append(f"{name}: gone; it was {_summary(was)}")
        elif was is not None and now is not None and was != now:
            lines.append(f"{name}: {'; '.join(_differences(was, now))}")
    return tuple(lines)


def _summary(row: SurveyRow) -> str:
    words = [row.requirement, *row.packages]
    return ", ".join(words) + (f" ({', '.join(row.symbols)})" if row.symbols else "")


def _differences(was: SurveyRow, now: SurveyRow) -> Iterator[str]:
    for field in fields(was):
        old, new = getattr(was, field.name), getattr(now, field.name)
        if old == new:
            continue
        name = field.name.replace("_", " ")
        if isinstance(old, tuple):
            signs = [f"+{item}" for item in new if item not in old] + [f"-{item}" for item in old if item not in new]
            yield f"{name} {' '.join(signs) or 'in another order'}"
        else:
            yield f"{name} {old or 'none'} -> {new or 'none'}"


__all__ = ["SurveyRow", "drift", "survey", "survey_document", "survey_table"]
