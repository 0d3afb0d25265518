"""Which function is each fast path really bound to, in a process that imports the model's code as training will?

Run by the observed interpreter as `python bindings.py request.json result.jsonl`. Standard library, torch and
transformers only. What cannot be read for certain is reported as unknown, with the reason:

    request  {"modules": [...], "sites": [{"id": 0, "kind": "closure", "module": ..., "name": ..., "owner": ...,
              "loader": ..., "index": ..., "package": "fla", "import_module": "fla.ops.kda", "symbol": ...,
              "model_type": ..., "hub_first": false}],
              "gates": [{"module": ..., "name": ...}], "config": {...}, "build_s": 30}
    result   {"stage": ...} before each step; torch, module, binding, gate, layers, problem; {"done": true}

The one change to the environment is HF_HUB_OFFLINE=1: looking at a model downloads nothing.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH100, PTH118, PTH120, PTH123

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import contextlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import re
import signal
import types
from typing import Any, Callable, Iterator

_RESULT = os.path.abspath(sys.argv[2])
# Bound before anything foreign is imported, which could replace them.
_dumps = json.dumps
_open, _write, _close = os.open, os.write, os.close
_getpid, _exit = os.getpid, os._exit
_PID = os.getpid()
_TRUE = {"1", "ON", "YES", "TRUE"}
# The kinds of layer, as configurations name them, whose mixer has a fused kernel.
_LAYER_KIND = re.compile(r"linear|mamba|conv|recurrent|delta|kda|lightning|^M$", re.IGNORECASE)


def _sibling(name: str) -> Any:
    """Another worker's file, by path."""
    spec = importlib.util.spec_from_file_location(
        f"kernelguard_{name}", os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"there is no {name}.py beside this file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_bound = _sibling("bound")
UnknownShapeError = _bound.UnknownShapeError
words: Callable[[BaseException], str] = _bound.words
chain, dotted, file_of = _bound.chain, _bound.dotted, _bound.file_of
is_expected, layers_of = _bound.is_expected, _bound.layers_of
read_closure: Callable[..., dict[str, Any]] = _bound.read_closure
read_value: Callable[..., dict[str, Any]] = _bound.read_value


def write(record: dict[str, Any]) -> None:
    """Append one record, from the process that was started only."""
    if _getpid() != _PID:
        # Something that was imported forked, and this is the copy.
        _exit(0)
    descriptor = _open(_RESULT, os.O_WRONLY | os.O_APPEND)
    _write(descriptor, (_dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
    _close(descriptor)


def failed_import(error: BaseException) -> dict[str, Any]:
    """Why a modeling module could not be imported; transformers' own wrapper says less than what it wraps."""
    causes = chain(error)
    missing = [link.name for link in causes if isinstance(link, ModuleNotFoundError) and link.name]
    text = "; from ".join([str(error), *(words(link) for link in causes[1:2])])
    outcome = "exited" if isinstance(error, SystemExit) else "raised"
    if "HF_HUB_OFFLINE" in text and not _USER_OFFLINE:
        outcome, text = "not-tried", f"it asks the hub, and this check downloads nothing: {text}"
    return {
        "outcome": outcome,
        "error_type": type(error).__name__,
        "error": text,
        "missing_module": missing[-1] if missing else "",
    }


# --- reading one site --------------------------------------------------------------------------------------------


def read_at_call(site: dict[str, Any]) -> dict[str, Any]:
    """A kernel that the model's code imports each time it runs: the import is done here as it will be done there."""
    top = site["import_module"].partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        return {"bound_to": "torch", "detail": f"there is no {top} to import"}
    return read_value(getattr(importlib.import_module(site["import_module"]), site["symbol"], None), site)


def offline_reason(site: dict[str, Any], fact: dict[str, Any]) -> str:
    """Why what was seen here may be otherwise in the run: only this check keeps the hub away."""
    if fact["bound_to"] not in ("torch", "unknown") or not site["hub_first"] or _USER_OFFLINE:
        return ""
    try:
        usable = importlib.import_module("transformers.utils.import_utils").is_kernels_available()
    except Exception as error:
        return f"the kernels hub may be asked first here, and whether it is cannot be told: {words(error)}"
    if not usable:
        return ""
    return "the kernels hub is asked first here, and this check downloads nothing"


# --- configurations and models -----------------------------------------------------------------------------------


def configuration(raw: dict[str, Any]) -> Any:
    """The configuration object of a config.json."""
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    config = auto.CONFIG_MAPPING[raw["model_type"]].from_dict(dict(raw))
    # Which attention the run uses is not the question here, and another one could raise or look for a hub kernel.
    config._attn_implementation = "eager"  # noqa: SLF001
    return config


def nested(config: Any, model_type: str) -> Iterator[Any]:
    """The configuration and those inside it that are of `model_type`."""
    if getattr(config, "model_type", None) == model_type:
        yield config
    for value in list(vars(config).values()):
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from nested(value, model_type)


def layer_index(config: Any) -> int:
    """A layer that has the mixer in question, or 0."""
    for name in ("layer_types", "layers_block_type", "hybrid_override_pattern", "block_types"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, (list, tuple, str)):
            for index, kind in enumerate(kinds):
                if isinstance(kind, str) and _LAYER_KIND.search(kind):
                    return index
    return 0


def construct(module: types.ModuleType, site: dict[str, Any], raw: dict[str, Any], torch: types.ModuleType) -> None:
    """Make one object of the class whose constructor loads the kernel, without memory for its weights."""
    owner = module.__dict__[site["owner"]]
    configs = list(nested(configuration(raw), site["model_type"]))
    if not configs:
        raise UnknownShapeError(f"the configuration has no part of model_type {site['model_type']}")
    values = {"config": configs[0], "layer_idx": layer_index(configs[0]), "layer_id": layer_index(configs[0])}
    arguments = {}
    for name, parameter in list(inspect.signature(owner.__init__).parameters.items())[1:]:
        if name in values:
            arguments[name] = values[name]
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise UnknownShapeError(f"{site['owner']} wants {name}, which is nothing that a configuration holds")
    with torch.device("meta"):
        owner(**arguments)


def no_weights() -> Any:
    """The context in which transformers does not initialize weights, where this release has one."""
    for name in ("transformers.initialization", "transformers.modeling_utils"):
        try:
            return importlib.import_module(name).no_init_weights()
        except (ImportError, AttributeError):
            continue
    return contextlib.nullcontext()


def build(raw: dict[str, Any], torch: types.ModuleType) -> Any:
    """The whole model on the meta device: its structure, without memory for its weights."""
    transformers = importlib.import_module("transformers")
    config = configuration(raw)
    classes = [getattr(transformers, name, None) for name in raw.get("architectures") or ()]
    with torch.device("meta"), no_weights():
        for model_class in classes:
            if model_class is not None and isinstance(model_class, type):
                return model_class(config)
        return transformers.AutoModel.from_config(config)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in this thread after `seconds`; a C function that never returns is the parent's business."""

    def expire(_signal: int, _frame: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


# --- the steps ---------------------------------------------------------------------------------------------------


class Reader:
    """Goes through the request, one announced step at a time."""

    def __init__(self, request: dict[str, Any], torch: types.ModuleType) -> None:
        self.request = request
        self.torch = torch
        self.modules: dict[str, types.ModuleType] = {}
        self.unread: list[dict[str, Any]] = []
        self.loaded: dict[tuple[str, str], Any] = {}
        self.constructed: dict[tuple[str, str], str] = {}

    def import_modules(self) -> None:
        """Import every modeling module, in the order of the configuration."""
        for name in self.request["modules"]:
            write({"stage": f"import {name}"})
            try:
                self.modules[name] = importlib.import_module(name)
            except BaseException as error:
                write({"kind": "module", "module": name, **failed_import(error)})
                continue
            file = str(self.modules[name].__file__ or "")
            write({"kind": "module", "module": name, "outcome": "ok", "file": file})

    def read_all(self) -> None:
        """Read each site, and keep those that need an object first."""
        for site in self.request["sites"]:
            module = self.modules.get(site["module"])
            if module is None:
                # Its `module` record says why.
                continue
            write({"stage": f"read {site['name']}"})
            try:
                self.report(site, self.read(module, site))
            except BaseException as error:
                if site["kind"] == "global-after-init":
                    self.unread.append({**site, "why": words(error)})
                else:
                    self.report(site, {"bound_to": "unknown", "detail": words(error)})

    def read(self, module: types.ModuleType, site: dict[str, Any]) -> dict[str, Any]:
        """What one site holds."""
        kind = site["kind"]
        if kind == "closure":
            return read_closure(module, site, self.torch)
        if kind == "global":
            return read_value(module.__dict__.get(site["name"]), site)
        if kind == "function-result":
            key = (site["module"], site["loader"])
            if key not in self.loaded:
                self.loaded[key] = module.__dict__[site["loader"]]()
            return read_value(self.loaded[key][site["index"]], site)
        if kind == "global-after-init":
            self.construct_once(module, site)
            return read_value(module.__dict__[site["name"]], site)
        if kind == "at-call":
            return read_at_call(site)
        raise UnknownShapeError(f"a binding of kind {kind!r} is not known to this worker")

    def construct_once(self, module: types.ModuleType, site: dict[str, Any]) -> None:
        """Construct the site's owner; the names it sets are trustworthy only when that went well."""
        key = (site["module"], site["owner"] or "")
        if key not in self.constructed:
            self.constructed[key] = ""
            write({"stage": f"construct {site['owner']}"})
            try:
                with time_limit(float(self.request["build_s"])):
                    construct(module, site, self.request["config"], self.torch)
            except BaseException as error:
                self.constructed[key] = words(error)
        if self.constructed[key]:
            raise UnknownShapeError(f"{site['owner']} could not be constructed: {self.constructed[key]}")

    def report(self, site: dict[str, Any], fact: dict[str, Any]) -> None:
        """Write one binding, after the checks that hold for every kind."""
        if fact["bound_to"] != "unknown" and site["owner"]:
            fact = {**fact, **self.replaced_forward(site)}
        reason = offline_reason(site, fact)
        if reason:
            fact = {**fact, "bound_to": "unknown", "detail": "; ".join(filter(None, [reason, fact.get("detail")]))}
        write({"kind": "binding", "id": site["id"], **fact})

    def replaced_forward(self, site: dict[str, Any]) -> dict[str, Any]:
        """A forward from elsewhere (unsloth, liger) may never look at the binding that was read."""
        module = self.modules[site["module"]]
        owner = module.__dict__.get(site["owner"])
        for layer in layers_of(getattr(owner, "forward", None)):
            file = file_of(layer)
            if file and not is_expected(file):
                detail = f"{site['owner']}.forward was replaced, and need not call {site['name']}"
                return {"bound_to": "other", "target": dotted(layer), "file": file, "parameters": [], "detail": detail}
        return {}

    def build_model(self) -> None:
        """Count layers in the whole model, and read what constructing it has set."""
        owners = sorted({site["owner"] for site in self.request["sites"] if site["owner"]})
        built = False
        write({"stage": "build the model on the meta device"})
        try:
            with time_limit(float(self.request["build_s"])):
                model = build(self.request["config"], self.torch)
                counts = dict.fromkeys(owners, 0)
                for layer in model.modules():
                    name = type(layer).__name__
                    if name in counts:
                        counts[name] += 1
            built = True
            write({"kind": "layers", "counts": counts})
        except BaseException as error:
            write({"kind": "problem", "text": f"the model could not be built on the meta device: {words(error)}"})
        for site in self.unread:
            module = self.modules[site["module"]]
            if built and site["name"] in module.__dict__ and counts.get(site["owner"]):
                self.report(site, read_value(module.__dict__[site["name"]], site))
            else:
                self.report(site, {"bound_to": "unknown", "detail": site["why"]})

    def read_gates(self) -> None:
        """The flags that decide over several symbols, after everything that could set them."""
        for gate in self.request["gates"]:
            module = self.modules.get(gate["module"])
            if module is None:
                continue
            record = {"kind": "gate", **gate, "value": None}
            if gate["name"] in module.__dict__:
                record["value"] = bool(module.__dict__[gate["name"]])
            else:
                record["detail"] = "it is no global of the module"
            write(record)


def main() -> None:
    """Import torch and transformers, then go through the request."""
    with open(sys.argv[1], encoding="utf-8") as handle:
        request = json.load(handle)
    sys.argv[1:] = []
    step = "import torch"
    try:
        write({"stage": step})
        torch = importlib.import_module("torch")
        step = "torch.cuda.is_available()"
        write({"stage": step})
        write({"kind": "torch", "cuda_available": bool(torch.cuda.is_available())})
        step = "import transformers"
        write({"stage": step})
        importlib.import_module("transformers")
    except BaseException as error:
        write({"kind": "problem", "text": f"{step}: {words(error)}"})
        write({"done": True})
        return
    reader = Reader(request, torch)
    reader.import_modules()
    reader.read_all()
    if request["config"] is not None:
        reader.build_model()
    reader.read_gates()
    write({"done": True})


_USER_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "").upper() in _TRUE
os.environ["HF_HUB_OFFLINE"] = "1"
main()
