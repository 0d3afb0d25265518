"""Which layers did a training run have, and what did each really run on? From what lies in the run's folder."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kernelguard.judge.values import Status, worst
from kernelguard.report.html.answers import path_status
from kernelguard.report.html.gather import Gathered
from kernelguard.report.html.words import on_cpu, ran_on

_LARGEST_BYTES = 16 * 2**20
_ATTENTION = ("attention", "full_attention", "sliding_attention", "chunked_attention")
"""Kinds of layers that need no kernel which transformers would fall back from."""
_OF_ATTENTION = frozenset({"scaled_dot_product_attention", "varlen_attn", "flex_attention"})
_BOUND = frozenset({"linear_attention", "mamba", "mamba2"})
"""Kinds whose functions the bundled trainer binds by name."""
_NOT_KNOWN = ("unknown", "the folder does not say")
Ran = Mapping[str, tuple[str, str]]
"""By fast path: the answer, and what it ran on."""


def what_ran(source: Gathered) -> Ran:
    """By fast path, the worst of what was seen while it ran: kernels of a recorded step, bindings of the launch."""
    seen: dict[str, list[tuple[Status, str]]] = {}
    trace = source.profile["trace"] if source.profile is not None else None
    for row in trace["implementations"] if trace else ():
        for symbol in row["symbols"]:
            seen.setdefault(symbol, []).append((path_status(row), f"{ran_on(row)}, in the recorded step"))
    bound = (source.attestation or {}).get("bound")
    for name, value in bound.items() if isinstance(bound, dict) else ():
        mechanism = str(value).partition(" ")[0]
        status = {"torch": Status.FAIL, "package": Status.PASS, "hub": Status.PASS}.get(mechanism, Status.UNKNOWN)
        seen.setdefault(str(name).partition(" in ")[0], []).append((status, f"{value}, as the launch attested"))
    return {
        symbol: (str(worst(status for status, _ in rows)), "; ".join(dict.fromkeys(text for _, text in rows)))
        for symbol, rows in seen.items()
    }


def run_layers(source: Gathered) -> tuple[list[str], dict[str, list[dict[str, str]]], str]:
    """The kind of each layer, by kind what it ran on, and where that is known from.

    Without layers the last is why there are none.
    """
    if source.run is None:
        return [], {}, ""
    folder = Path(source.run.folder)
    built = _document(folder / "built.json")
    if built is not None and isinstance(built.get("layer_types"), list) and isinstance(built.get("bound"), dict):
        return _built(built, what_ran(source))
    config = _table(folder / "config.toml")
    model = config.get("model")
    if not isinstance(model, dict) or not model.get("path"):
        return [], {}, "The folder does not say which model was trained: it holds no config.toml of the trainer"
    kinds, where = _kinds(folder, str(model["path"]), model.get("layers"))
    if not kinds:
        return [], {}, f"The layers of {model['path']} are not known here: {where}"
    needing = [kind for kind in dict.fromkeys(kinds) if kind not in _ATTENTION]
    ran = {symbol: row for symbol, row in what_ran(source).items() if symbol not in _OF_ATTENTION}
    if ran and len(needing) == 1:
        seen = [_row(symbol, status, text) for symbol, (status, text) in ran.items()]
        return kinds, {needing[0]: seen}, f"by what they ran on; {_of(where)}"
    told = _configured(model, source.run.summary)
    rows = {kind: [_row("fused kernels", *(told if kind in _BOUND else _NOT_KNOWN))] for kind in needing}
    return kinds, rows, f"by what the trainer was told to bind, as nothing in the folder shows what ran; {_of(where)}"


def _built(built: Mapping[str, Any], ran: Ran) -> tuple[list[str], dict[str, list[dict[str, str]]], str]:
    """From what the trainer wrote when it had built the model; what was seen to run goes before it."""
    kinds = [str(kind) for kind in built["layer_types"][:1000]]
    needing = [kind for kind in dict.fromkeys(kinds) if kind not in _ATTENTION]
    bound = {str(name).rpartition(".")[2].removeprefix("torch_"): str(to) for name, to in built["bound"].items()}
    rows = [
        _row(symbol, *ran.get(symbol, ("warn" if "reference" in to or "nothing" in to else "pass", to)))
        for symbol, to in bound.items()
    ]
    told = rows or [_row("fused kernels", *_NOT_KNOWN)]
    by = "by what they were bound to, as the trainer wrote down, and what was seen to run"
    return kinds, {kind: told if kind in _BOUND else [_row("fused kernels", *_NOT_KNOWN)] for kind in needing}, by


def _of(where: str) -> str:
    return f"the layers are those of {where}"


def _row(symbol: str, status: str, text: str) -> dict[str, str]:
    return {"symbol": symbol, "status": status, "packing": "pass", "bound_to": text}


def _configured(model: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[str, str]:
    """What `model.kernels` comes to: with fused ones the trainer does not start when one is missing."""
    kernels = model.get("kernels")
    if kernels == "fused" or (kernels == "auto" and summary.get("gpu")):
        return "pass", f"model.kernels={kernels}: fused; the trainer does not start without them"
    if kernels == "reference" or (kernels == "auto" and on_cpu(summary)):
        return "warn", f"model.kernels={kernels}: torch, segment by segment" + (
            ", on the CPU" if on_cpu(summary) else ""
        )
    return _NOT_KNOWN


def _kinds(folder: Path, path: str, most: Any) -> tuple[list[str], str]:
    """The kinds of the layers that were trained, and the file that says so, or why there is none."""
    places = [folder / "model", Path(path).expanduser(), folder / path]
    for place in places:
        file = place if place.suffix == ".json" else place / "config.json"
        document = _document(file)
        found = next(iter(_lists(document)), []) if document is not None else []
        if found:
            return found[: most if isinstance(most, int) and most > 0 else len(found)], str(file)
    return [], "neither that path nor the run's model/ holds a config.json with its layers"


def _lists(document: Mapping[str, Any], depth: int = 0) -> Iterator[list[str]]:
    """The kinds of layers; of a text model inside another too. Where they are not listed all are of one kind."""
    for key in ("layer_types", "layers_block_type"):
        listed = document.get(key)
        if isinstance(listed, list) and listed and len(listed) <= 1000:
            yield [str(kind) for kind in listed]
    for name in ("text_config", "llm_config", "language_config"):
        inner = document.get(name)
        if isinstance(inner, dict) and depth < 3:
            yield from _lists(inner, depth + 1)


def _document(file: Path) -> Mapping[str, Any] | None:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_BYTES:
            return None
        document = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _table(file: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf-8")) if file.is_file() else {}
    except (OSError, ValueError):
        return {}
