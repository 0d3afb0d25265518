"""Runs inside an observed interpreter: what the really imported modules hold, build and call.

Written without a look at kernelguard: it imports transformers with fake kernel packages beside it, and reports as JSON
which module globals came from them, how many modules of each class the model has, and which keyword arguments of the
model's forward arrive at which argument of which fake kernel.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("causal_conv1d", "mamba_ssm", "fla", "mambapy", "apex")
CALLS: list[Any] = []  # (kernel name, {argument: value}) of every fake kernel call

# Up to 5.14 the fast path is taken for CUDA tensors only; these tests have a CPU, and want the same code to run.
_get_code = importlib.machinery.SourceFileLoader.get_code


def patched_get_code(self: Any, fullname: str) -> Any:
    if ".modeling_" not in fullname:
        return _get_code(self, fullname)
    source = self.get_data(self.path).decode()
    source = source.replace('"cuda" in ', '"cpu" in ').replace('"cuda" not in ', '"cpu" not in ')
    return compile(source, self.path, "exec")


importlib.machinery.SourceFileLoader.get_code = patched_get_code
torch.cuda.is_available = lambda: True
torch.cuda.stream = lambda _stream: torch.no_grad()
torch.cuda.default_stream = lambda *_args: None
torch.cuda.current_device = lambda: 0
torch.cuda.device = lambda _device: torch.no_grad()


def from_fakes(value: Any) -> bool:
    """A function or class that one of the fake packages defines."""
    module = str(getattr(value, "__module__", ""))
    # transformers 4.57 has kernels of its own that build on mamba_ssm.
    return module.partition(".")[0] in PACKAGES or module.startswith("transformers.kernels.")


def bound_globals(module: Any) -> dict[str, str | None]:
    """Module globals that stand for something of a fake package: directly, behind a decorator, or behind a loader."""
    found: dict[str, str | None] = {}
    for name, value in vars(module).items():
        if from_fakes(value):
            found[name] = value.__name__
        elif inspect.isfunction(value) and value.__closure__:
            inner = inspect.getclosurevars(value).nonlocals.get("implementation")
            if inner is not None:
                found[name] = inner.__name__ if from_fakes(inner) else None
        elif inspect.isfunction(value) and name.startswith("_lazy_load"):
            for element in value():
                if element is not None and from_fakes(element):
                    found[element.__name__] = element.__name__
    # `from apex import Norm; ModelNorm = Norm` binds two names to one class; the model uses the second.
    for name, value in list(vars(module).items()):
        if inspect.isclass(value) and name == value.__name__ and name in found:
            others = [n for n, v in vars(module).items() if v is value and n != name]
            if others:
                del found[name]
    return found


def make_config(raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    raw = json.loads(json.dumps(raw))
    return AutoConfig.for_model(raw.pop("model_type"), **raw)


def model_class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def count_modules(model: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for module in model.modules():
        for cls in type(module).__mro__:
            if cls.__module__.startswith("transformers.models."):
                counts[cls.__name__] = counts.get(cls.__name__, 0) + 1
    return counts


def arrivals(model: Any, signals: list[str], vocabulary: int) -> dict[str, Any]:
    """For each signal sent alone: the calls that were made, each with the arguments that are that very tensor."""
    result = {}
    for signal in signals:
        CALLS.clear()
        marker = torch.arange(6, dtype=torch.int32)[None] if signal != "position_ids" else torch.arange(6)[None]
        error = ""
        for training in (True, False):
            model.train(training)
            try:
                with torch.no_grad():
                    model(input_ids=torch.arange(6)[None] % vocabulary, use_cache=False, **{signal: marker})
            except Exception as problem:  # noqa: BLE001 - a fake kernel's result may not fit; the calls are what counts
                error = "".join(traceback.format_exception_only(type(problem), problem)).strip()
                error += " @ " + traceback.format_exc().strip().splitlines()[-3].strip()
        calls = [[name, [key for key, value in kwargs.items() if value is marker]] for name, kwargs in CALLS]
        heads = [
            [name, kwargs["k"].shape[2], kwargs["v"].shape[2]]
            for name, kwargs in CALLS
            if "gated_delta_rule" in name and {"k", "v"} <= kwargs.keys()
        ]
        result[signal] = {"calls": calls, "heads": heads, "error": error}
    return result


def main(spec_path: str, out_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    import fake_kernels

    fake_kernels.RECORD = CALLS
    out: dict[str, Any] = {"modules": {}, "models": {}}
    for name in spec["modules"]:
        try:
            out["modules"][name] = {"bound": bound_globals(importlib.import_module(name))}
        except Exception:  # noqa: BLE001 - reported, and the tests fail on it
            out["modules"][name] = {"error": traceback.format_exc()}
    for case in spec["models"]:
        try:
            config = make_config(case["config"])
            cls = model_class(case["class"])
            with torch.device("meta"):
                model = cls(config)
            entry = {"counts": count_modules(model)}
            if case.get("signals"):
                text = config.get_text_config() if hasattr(config, "get_text_config") else config
                model = cls(make_config(case["config"]))
                entry["arrivals"] = arrivals(model, case["signals"], text.vocab_size)
            out["models"][case["name"]] = entry
        except Exception:  # noqa: BLE001 - reported, and the tests fail on it
            out["models"][case["name"]] = {"error": traceback.format_exc()}
    # Lazily loaded globals are set when a layer is built, so they are read after the models.
    for name in spec["modules"]:
        if name in sys.modules:
            out["modules"][name]["bound"] = bound_globals(sys.modules[name])
    Path(out_path).write_text(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
