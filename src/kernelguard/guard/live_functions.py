"""Which function is behind each kernel of the model that is training? Read from the live objects, in every shape.

Rows 1 to 5, 14 and 15 of the catalogue in docs/guard.md.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import re
import sys
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelguard.guard.expectation import Expectation, Finding
from kernelguard.workers import bound

# They are called one token at a time, never in training.
_DECODING = ("_update", "fused_recurrent_")
_BOUNDARY = {"causal_conv1d_fn": "seq_idx", "chunk_gated_delta_rule": "cu_seqlens", "chunk_kda": "cu_seqlens"}
_BOUNDARY_OF_MAMBA = "seq_idx"
_DECORATOR = (
    r"@use_kernel_func_from_hub_with_fallback\(\s*(?:func_name=)?[\"'](\w+)[\"']\s*,"
    r"\s*(?:package=)?[\"'](\w+)[\"'][^)]*\)"
)
# Kernels that releases up to 5.14 keep as attributes of each layer.
_LAYER_ATTRIBUTES = (
    "causal_conv1d_fn",
    "chunk_gated_delta_rule",
    "selective_scan_fn",
    "mamba_inner_fn",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
)
# Module globals that a constructor sets to a hub kernel, or leaves None without a word that anybody reads.
_LOADED_GLOBALS = ("rwkv_cuda_kernel", "lsh_cumulation", "mra_cuda_kernel", "cv_utils_kernel")


@dataclass(frozen=True)
class Bound:
    """What one symbol is bound to at this moment."""

    module: str
    symbol: str
    name: str
    """The global of the module."""
    mechanism: str
    """`package`, `hub`, `torch`, `other` or `unknown`."""
    target: str
    parameters: tuple[str, ...] = ()
    detail: str = ""
    package: str = ""

    @property
    def value(self) -> str:
        """As `bound_field` has it."""
        return f"{self.mechanism} {self.target or 'nothing'}"


_MECHANISM = {"kernel": "package", "hub": "hub", "torch": "torch", "other": "other"}


def read_bound(model: Any, expected: Expectation) -> tuple[Bound, ...]:
    """Every kernel of the model: those that the ticket names, else those that its modules declare."""
    if expected.paths:
        # A layer of the hub is no function of a module: whether it was put in is looked at in the model itself.
        paths = [p for p in expected.paths if p.mechanism != "hub" or (p.module, p.symbol) in expected.sites]
        return tuple(_of_path(path, expected) for path in paths)
    return tuple(_declared(modeling_modules(model)))


def modeling_modules(model: Any) -> tuple[types.ModuleType, ...]:
    """The Python modules whose classes the model is made of, without torch's own."""
    names = dict.fromkeys(base.__module__ for m in model.modules() for base in type(m).__mro__)
    found = [sys.modules[n] for n in names if n in sys.modules and n.partition(".")[0] not in {"torch", "builtins"}]
    return tuple(found)


def _of_path(path: Any, expected: Expectation) -> Bound:
    site = expected.sites.get((path.module, path.symbol))
    module = sys.modules.get(path.module)
    package = str(site["package"]) if site is not None else path.package
    if site is None or module is None:
        why = "the ticket does not say where it is read" if site is None else f"{path.module} was not imported"
        return Bound(path.module, path.symbol, "", "unknown", "", detail=why, package=package)
    try:
        fact = _read(module, site)
    except bound.UnknownShapeError as error:
        return Bound(path.module, path.symbol, site["name"], "unknown", "", detail=str(error), package=package)
    return _from_fact(path.module, path.symbol, str(site["name"]), package, fact)


def _read(module: types.ModuleType, site: Any) -> dict[str, Any]:
    import torch

    kind = site["kind"]
    if kind == "closure":
        return bound.read_closure(module, dict(site), torch)
    if kind in {"global", "global-after-init"}:
        return bound.read_value(module.__dict__.get(site["name"]), dict(site))
    if kind == "at-call":
        # It is imported by the call itself: after the first one it is there.
        imported = sys.modules.get(site["import_module"])
        return bound.read_value(getattr(imported, site["symbol"], None), dict(site))
    raise bound.UnknownShapeError(f"a binding of kind {kind!r} cannot be read from a running model")


def _from_fact(module: str, symbol: str, name: str, package: str, fact: dict[str, Any]) -> Bound:
    return Bound(
        module=module,
        symbol=symbol,
        name=name,
        mechanism=_MECHANISM.get(fact["bound_to"], "unknown"),
        target=str(fact.get("target", "")),
        parameters=tuple(fact.get("parameters", ())),
        detail=str(fact.get("detail", "")),
        package=package,
    )


def _declared(modules: Iterable[types.ModuleType]) -> Iterator[Bound]:
    """What the decorator of transformers 5.15 and newer has been put around, in these modules."""
    for module in modules:
        for name, value in list(module.__dict__.items()):
            cells = _decorated(value)
            if cells is None:
                continue
            symbol, package = _names_given(module, name, cells)
            if symbol.startswith(_DECODING) or symbol.endswith(_DECODING):
                continue
            try:
                import torch

                fact = bound.read_closure(module, {"name": name, "package": package}, torch)
            except bound.UnknownShapeError as error:
                yield Bound(module.__name__, symbol, name, "unknown", "", detail=str(error), package=package)
            else:
                yield _from_fact(module.__name__, symbol, name, package, fact)


def _names_given(module: types.ModuleType, name: str, cells: dict[str, Any]) -> tuple[str, str]:
    """The kernel's name and package that the decorator was given: in its closure, else in the source above `def`."""
    if "func_name" in cells and "package" in cells:
        return str(cells["func_name"]), str(cells["package"])
    found = re.search(_DECORATOR + rf"\ndef {re.escape(name)}\(", _source(module))
    if found:
        return found.group(1), found.group(2)
    inner = bound.innermost(cells["implementation"])
    return name, str(getattr(inner, "__module__", "")).partition(".")[0]


def _source(module: types.ModuleType) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


def _decorated(value: Any) -> dict[str, Any] | None:
    """The closure of a decorated function, also of one that became a module object."""
    import torch

    if isinstance(value, torch.nn.Module):
        try:
            value = bound.closure_of(type(value).forward).get("func")
        except bound.UnknownShapeError:
            return None
    if not isinstance(value, types.FunctionType):
        return None
    cells = bound.closure_of(value)
    return cells if {"is_new_implementation", "implementation", "torch_function"} <= set(cells) else None


def cell_of(entry: Bound) -> Any:
    """The closure cell that holds the implementation, to count its calls; None where there is no such cell."""
    import torch

    module = sys.modules.get(entry.module)
    value = module.__dict__.get(entry.name) if module is not None else None
    if value is None or isinstance(value, torch.nn.Module) or _decorated(value) is None:
        return None
    return dict(zip(value.__code__.co_freevars, value.__closure__))["implementation"]


def judge_bound(entries: Iterable[Bound], expected: Expectation) -> Iterator[Finding]:
    """What is not bound as it should be (rows 1 to 3)."""
    wanted = {(p.module, p.symbol): p for p in expected.paths}
    for entry in entries:
        path = wanted.get((entry.module, entry.symbol))
        if entry.mechanism == "unknown":
            yield Finding("cannot-read", "unknown", f"what {entry.symbol} is bound to cannot be read: {entry.detail}")
            continue
        if entry.mechanism == "other":
            text = f"{entry.symbol} was replaced by {entry.target}" + (f" ({entry.detail})" if entry.detail else "")
            yield Finding("replaced", "unknown", text, "verify with what replaces it, or leave it out")
            continue
        if path is not None and path.bound_to and entry.value != f"{path.mechanism} {path.bound_to}":
            yield Finding(
                _fallback_row(entry),
                "fail",
                f"{entry.symbol} runs {entry.value}; {path.mechanism} {path.bound_to} was verified" + _why(entry),
                _fallback_fix(entry),
            )
        elif entry.mechanism == "torch" and (path is None or path.mechanism != "torch"):
            what = f"{entry.symbol} runs its PyTorch fallback {entry.target}" + _why(entry)
            yield Finding(_fallback_row(entry), "fail", what, _fallback_fix(entry))
        if entry.mechanism in {"package", "hub"} and expected.packed:
            needed = _BOUNDARY.get(entry.symbol) or (_BOUNDARY_OF_MAMBA if entry.package == "mamba_ssm" else "")
            # The wrapper passes on only what stands in the signature by name.
            if needed and needed not in entry.parameters and entry.symbol != "mamba_inner_fn":
                text = f"{entry.symbol} of {entry.target} takes no {needed}: it is dropped, and packed samples leak"
                yield Finding("argument-dropped", "fail", text, f"install a {entry.package} that takes {needed}")


def _fallback_row(entry: Bound) -> str:
    """Whether the package is missing, or is there and was not looked at (transformers 5.15 and 5.16)."""
    return "package-ignored" if _present(entry.package) else "fallback"


def _present(package: str) -> bool:
    if not package:
        return False
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _why(entry: Bound) -> str:
    if entry.mechanism != "torch":
        return ""
    if not _present(entry.package):
        return f": {entry.package} is not installed"
    version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    if version.startswith(("5.15", "5.16")) and entry.package == "fla":
        return f": transformers {version} ignores a {entry.package} whose root does not import its parts"
    return f": {entry.package} is installed, and was not bound when {entry.module} was imported"


def _fallback_fix(entry: Bound) -> str:
    if not _present(entry.package):
        return f"install {entry.package}, and start again: the choice is made once, at import"
    return f"python -c 'import {entry.package}' says why; transformers 5.17 or newer looks inside the package"


def judge_layers(model: Any, expected: Expectation) -> Iterator[Finding]:
    """Releases up to 5.14: kernels as attributes of layers, behind a flag, a device and a compiler (rows 4 and 5)."""
    seen: set[tuple[str, str]] = set()
    for layer in model.modules():
        module = sys.modules.get(type(layer).__module__)
        if module is None or not module.__name__.startswith("transformers."):
            continue
        for name in _LAYER_ATTRIBUTES:
            if name not in vars(layer) or (module.__name__, name) in seen:
                continue
            seen.add((module.__name__, name))
            value = vars(layer)[name]
            if value is None or _is_own(value, module):
                what = f"{type(layer).__name__}.{name} is {'None' if value is None else bound.dotted(value)}"
                yield Finding("layer-fallback", "fail", f"{what}: the layer runs PyTorch code", "install its package")
        flag = module.__dict__.get("is_fast_path_available")
        if flag is None or (module.__name__, "flag") in seen or not _reads_flag(layer):
            continue
        seen.add((module.__name__, "flag"))
        name = module.__name__.rpartition(".")[2]
        if not flag:
            yield Finding("gated-off", "fail", f"{name}.is_fast_path_available is False: {type(layer).__name__} runs "
                          "PyTorch code throughout", "install all packages that the flag asks for")  # fmt: skip
        elif is_compiled(model):
            yield Finding("blocked-by-compile", "fail", f"the model is compiled, and {name} refuses its kernels while "
                          "torch.compile traces", "leave torch.compile off, or use transformers 5.17")  # fmt: skip
        elif not any(p.is_cuda for p in layer.parameters()) and expected.device == "cuda":
            yield Finding("blocked-by-device", "fail", f"{type(layer).__name__} lies on the CPU, where {name} does not "
                          "use its kernels", "move the model to the GPU")  # fmt: skip


def _is_own(value: Any, module: types.ModuleType) -> bool:
    """Whether a function is the modeling file's own, and no kernel."""
    return bound.real(bound.file_of(bound.innermost(value))) == bound.real(module.__file__ or "")


def _reads_flag(layer: Any) -> bool:
    forward = bound.innermost(type(layer).forward)
    code = getattr(forward, "__code__", None)
    return code is not None and "is_fast_path_available" in code.co_names


def is_compiled(model: Any) -> bool:
    """Whether torch.compile has been put around the model or a part of it."""
    parts = model.modules()
    return any(type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) for m in parts)


def judge_globals(model: Any) -> Iterator[Finding]:
    """Kernels that a constructor loads into a global, and choices that a configuration makes (rows 14 and 15)."""
    for module in modeling_modules(model):
        for name in _LOADED_GLOBALS:
            if name in module.__dict__ and module.__dict__[name] in (None, False):
                text = (
                    f"{module.__name__.rpartition('.')[2]}.{name} is {module.__dict__[name]}: its kernel was not loaded"
                )
                yield Finding("kernel-not-loaded", "fail", text, "see what loading it logs at level INFO")
    for config in configurations(model):
        chosen = [
            n for n in ("chunkwise_kernel", "sequence_kernel", "step_kernel") if "native" in str(getattr(config, n, ""))
        ]
        if chosen and getattr(config, "model_type", "") == "xlstm":
            said = ", ".join(f"{n}={getattr(config, n)}" for n in chosen)
            yield Finding("slow-by-config", "fail", f"the configuration asks for xlstm's slow form: {said}",
                          "set chunkwise_kernel to a triton one")  # fmt: skip
        if getattr(config, "use_mambapy", False) and not _present("mambapy"):
            what = "use_mambapy is set and mambapy is not installed: the scan is a Python loop"
            yield Finding("slow-by-config", "fail", what, "pip install mambapy")
    for module in modeling_modules(model):
        if module.__dict__.get("external_xlstm") is False:
            yield Finding(
                "fallback", "fail", "xlstm is not installed: its cells run as PyTorch code", "pip install xlstm"
            )


def configurations(model: Any) -> tuple[Any, ...]:
    """Every configuration of the model and its parts, each once."""
    found: dict[int, Any] = {}
    for part in model.modules():
        config = vars(part).get("config")
        if config is not None and hasattr(config, "model_type"):
            found.setdefault(id(config), config)
    return tuple(found.values())


def signature_names(function: Any) -> tuple[str, ...]:
    """The parameter names of a forward; empty where they are not known."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def owners_of(model: Any, entries: Iterable[Bound]) -> tuple[Any, ...]:
    """The layers whose forward calls one of these functions, by the names in its code or in that of its helpers."""
    names = {(entry.module, entry.name) for entry in entries}
    found = []
    for layer in model.modules():
        cls = type(layer)
        module = cls.__module__
        wanted = {name for place, name in names if place == module}
        if wanted and any(wanted & set(_names_used(function)) for function in vars(cls).values()):
            found.append(layer)
    return tuple(found)


def _names_used(function: Any) -> tuple[str, ...]:
    if not callable(function):
        return ()
    code = getattr(bound.innermost(function), "__code__", None)
    return code.co_names if code is not None else ()


def decoder_layers(model: Any) -> tuple[Any, ...]:
    """The first layer of every stack of layers."""
    import torch

    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 0]
    return tuple(m[0] for m in lists if type(m[0]).__name__.endswith(("Layer", "Block")))
