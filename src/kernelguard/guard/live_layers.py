"""Are the layers of the running model the ones that were looked at, and did what replaces them really do so?

Rows 6 to 8, 13 and 20 of the catalogue in docs/guard.md.
"""

from __future__ import annotations

import os
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

from kernelguard.guard.expectation import Expectation, Finding
from kernelguard.workers import bound

_OFF = {"0", "OFF", "NO", "FALSE"}
# Whoever wraps a forward of the model and calls it: not a replacement of what it computes.
_WRAPPERS = frozenset({"accelerate", "peft", "deepspeed", "trl", "contextlib", "functools", "kernels", "torch"})
# Layers whose class or forward decides whether a kernel is called at all.
_MIXER = re.compile(r"DeltaNet|Mamba|Mixer|ShortConv|LinearAttention|KimiDelta|mLSTM|Rwkv", re.IGNORECASE)


def replaced_by(layer: Any) -> Any:
    """The function that kernelize() put in place of a layer's forward, or None."""
    own = vars(layer).get("forward")
    if not isinstance(own, types.MethodType) or own.__func__ is type(layer).forward:
        return None
    return own.__func__


def hub_layers(model: Any) -> tuple[tuple[str, Any], ...]:
    """(layer name of the hub, object) for every layer and function that kernelize() may replace, each name once."""
    found: dict[tuple[str, bool], tuple[str, Any]] = {}
    for layer in model.modules():
        candidates = [layer] if hasattr(type(layer), "kernel_layer_name") else []
        candidates += list(vars(layer).get("_kernel_funcs", {}).values())
        for candidate in candidates:
            name = str(getattr(type(candidate), "kernel_layer_name", "") or "")
            if name:
                found.setdefault((name, replaced_by(candidate) is not None), (name, candidate))
    return tuple(found.values())


def judge_hub(model: Any, expected: Expectation) -> Iterator[Finding]:
    """`use_kernels` that did nothing, or put in a kernel that cannot train (rows 6 to 8)."""
    asked = expected.use_kernels if expected.use_kernels is not None else bool(getattr(model, "use_kernels", False))
    layers = hub_layers(model)
    replaced = [(name, layer) for name, layer in layers if replaced_by(layer) is not None]
    if asked and not replaced:
        yield Finding("hub-nothing-replaced", "fail", f"use_kernels=True replaced nothing{_why_nothing()}",
                      "kernelguard check MODEL says for which layers a hub kernel fits here")  # fmt: skip
    for path in expected.paths:
        if path.mechanism == "hub" and layers and not any(name == path.symbol for name, _ in replaced):
            names = [name for name, _ in layers]
            if path.symbol in names:
                what = (
                    f"the hub kernel of {path.symbol} was verified, and the layer runs its own forward{_why_nothing()}"
                )
                yield Finding("hub-nothing-replaced", "fail", what, "use_kernels=True, before training")
    if not model.training:
        return
    for name, layer in replaced:
        function = replaced_by(layer)
        owner = _class_of(function)
        if owner is not None and getattr(owner, "has_backward", True) is False:
            what = f"{name} runs {bound.dotted(function)}, which has no backward: it was put in for inference"
            yield Finding("inference-kernel", "fail", what, "call model.train() before set_use_kernels, or after it")


def _why_nothing() -> str:
    """What switches hub kernels off without a word (row 7)."""
    reasons = []
    if os.environ.get("USE_HUB_KERNELS", "1").upper() in _OFF:
        reasons.append(f"USE_HUB_KERNELS={os.environ['USE_HUB_KERNELS']}")
    if os.environ.get("DISABLE_KERNEL_MAPPING", "0").upper() not in {"", *_OFF}:
        reasons.append(f"DISABLE_KERNEL_MAPPING={os.environ['DISABLE_KERNEL_MAPPING']}")
    usable = getattr(sys.modules.get("transformers.utils.import_utils"), "is_kernels_available", None)
    if usable is not None and not usable():
        reasons.append("the kernels package is absent or outside the versions that this transformers accepts")
    return f": {' and '.join(reasons)}" if reasons else ""


def _class_of(function: Any) -> Any:
    """The class that a function was defined in."""
    name = str(getattr(function, "__qualname__", "")).rpartition(".")[0]
    owner: Any = sys.modules.get(str(getattr(function, "__module__", "")))
    for part in name.split(".") if name else ():
        owner = getattr(owner, part, None)
    return owner if isinstance(owner, type) else None


def judge_liger(model: Any, expected: Expectation) -> Iterator[Finding]:
    """Liger asked for, and no layer of it in the model (row 13)."""
    if not expected.liger:
        return
    if not any(_is_of(layer, "liger_kernel") for layer in model.modules()):
        what = (
            "liger is asked for, and no layer of the model runs its code: it knows only some model types, and patches "
        )
        what += "before the model is made"
        fix = "see liger_kernel.transformers.monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN"
        yield Finding("liger-nothing-replaced", "fail", what, fix)


def _is_of(layer: Any, package: str) -> bool:
    functions = (type(layer).forward, replaced_by(layer), vars(layer).get("forward"))
    modules = [type(layer).__module__]
    for function in functions:
        if function is not None:
            modules += [str(getattr(inner, "__module__", "")) for inner in bound.layers_of(function)]
    return any(name.partition(".")[0] == package for name in modules)


def judge_classes(model: Any, expected: Expectation) -> Iterator[Finding]:
    """Layers that are not the ones of the file that was looked at (row 20)."""
    files = {sys.modules[p.module].__file__ for p in expected.paths if p.module in sys.modules}
    seen = set()
    for layer in model.modules():
        cls = type(layer)
        if cls in seen or not _MIXER.search(cls.__name__):
            continue
        seen.add(cls)
        top = cls.__module__.partition(".")[0]
        if top in _WRAPPERS:
            continue
        file = bound.file_of(cls.forward) if isinstance(cls.forward, types.FunctionType) else ""
        own = getattr(sys.modules.get(cls.__module__), "__file__", "") or ""
        if top != "transformers":
            text = f"{cls.__name__} is {cls.__module__}'s, not of transformers: what it calls was not looked at"
            yield Finding("class-replaced", "unknown", text, "verify with it in place, or leave it out")
        elif files and own not in files and _looked_at(cls, files):
            text = f"{cls.__name__} is of {own}, and {', '.join(sorted(str(f) for f in files))} was looked at"
            yield Finding("class-replaced", "unknown", text)
        foreign = _foreign_forward(layer)
        if file and foreign and top == "transformers":
            text = f"{cls.__name__}.forward was replaced by {foreign}, which need not call the kernels"
            yield Finding("class-replaced", "unknown", text, "verify with it in place, or leave it out")


def _looked_at(cls: type, files: set[Any]) -> bool:
    """Whether a class of this name is in one of the files, so that this one stands in its place."""
    modules = [m for m in list(sys.modules.values()) if getattr(m, "__file__", None) in files]
    return any(hasattr(module, cls.__name__) for module in modules)


def _foreign_forward(layer: Any) -> str:
    """Who a layer's forward really belongs to, when that is nobody we know."""
    own = vars(layer).get("forward")
    for function in (type(layer).forward, own):
        if function is None:
            continue
        for inner in bound.layers_of(function):
            if isinstance(inner, types.MethodType):
                continue
            top = str(getattr(inner, "__module__", "") or "").partition(".")[0]
            file = bound.file_of(inner)
            known = top in _WRAPPERS or top == "transformers" or (replaced_by(layer) is not None and function is own)
            if file and not known and not bound.is_expected(file):
                return bound.dotted(inner)
    return ""
