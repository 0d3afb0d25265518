"""Any layer or function that the `kernels` hub puts in the place of a model's own, against what it replaces.

transformers' own `set_use_kernels` does the swap, in a cut-down model of the real configuration: the module stays, its
`forward` becomes the kernel's. Inputs are what the model hands to the layer; what takes part in training there gets a
gradient here. The truth is a copy of the layer from before the swap. Of several layers of one name the first is
measured.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import types
from typing import Any

from . import Probe


class NotReplacedError(Exception):
    """The model runs its own code where a hub kernel was asked for, so there is nothing to measure."""


def prepare(request: Any, out: Any) -> Any:
    """(the swapped layer, its probe), or None after it was written down why there is none."""
    out.stage(f"import {request['module']}")
    try:
        importlib.import_module(request["module"])
        importlib.import_module("kernels")
    except BaseException as error:
        missing = getattr(error, "name", "") if isinstance(error, ModuleNotFoundError) else ""
        out.error("import", error, missing=missing or "")
        return None
    try:
        subject = _Subject(request, out)
        for case in request["cases"]:
            subject.capture(case)
    except BaseException as error:
        # The model's own code does not run here: no fault of the kernel.
        out.error("reference", error)
        return None
    out.stage(f"load {request['symbol']}")
    try:
        function = subject.swap()
    except NotReplacedError as error:
        out.error("reference", error)
        return None
    except BaseException as error:
        out.error("import", error, missing="")
        return None
    code = getattr(inspect.unwrap(function), "__code__", None)
    out.write(
        "target",
        target=f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', request['symbol'])}",
        file=code.co_filename if code is not None else "",
        triton="",
    )
    return subject.layer, Probe(subject.make, _call, _reference)


class _Subject:
    """One layer of the model, and what the model calls it with."""

    def __init__(self, request: Any, out: Any) -> None:
        # A worker of its own as well, so it is found beside this folder and not in it.
        isolation = importlib.import_module("...isolation", __name__)
        self.name = request["symbol"]
        self.built = isolation.Model(
            {**request["model"], "dtype": request["dtype"], "device": request["device"], "lengths": [1]}, out
        )
        self.model = self.built.model
        self.layer = self._find()
        self.original = copy.deepcopy(self.layer)
        self.calls: dict[str, tuple[Any, Any]] = {}

    def _find(self) -> Any:
        import torch

        names = set()
        for module in self.model.modules():
            candidates = [module, *vars(module).get("_kernel_funcs", {}).values()]
            for candidate in candidates:
                name = getattr(type(candidate), "kernel_layer_name", None)
                if name == self.name and isinstance(candidate, torch.nn.Module):
                    return candidate
                names.add(name)
        known = (
            ", ".join(sorted(str(name) for name in names if name)) or "none: it takes the kernels package for absent"
        )
        raise LookupError(f"no layer of this model is called {self.name} by this transformers; it knows {known}")

    def capture(self, case: Any) -> None:
        """Remember what one forward pass of the model calls the layer with."""
        torch = self.built.torch
        calls: list[tuple[Any, Any]] = []
        handle = self.layer.register_forward_pre_hook(
            lambda _layer, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
        )
        ids = torch.arange(sum(case["lengths"]), device=self.built.device) * 7919 % self.built.vocabulary
        try:
            self.model(inputs_embeds=self.built.embed(ids)[None], use_cache=False)
        finally:
            handle.remove()
        if not calls:
            raise LookupError(f"a forward pass of the model in training does not call {self.name}")
        self.calls[case["name"]] = calls[0]

    def swap(self) -> Any:
        """Let transformers replace what it would replace in training; the function that now runs in the layer."""
        if hasattr(self.model, "set_use_kernels"):
            self.model.set_use_kernels(True)
        else:
            self.model.use_kernels = True
        own = vars(self.layer).get("forward")
        if not isinstance(own, types.MethodType) or own.__func__ is type(self.layer).forward:
            raise NotReplacedError(f"use_kernels=True replaces no {self.name} on {self.built.device} here")
        return own.__func__

    def make(self, case: Any, draw: Any) -> Any:
        """The captured arguments, and the layer's parameters."""
        found: dict[str, Any] = {}

        def taken(path: str, value: Any) -> Any:
            torch = draw.torch
            if isinstance(value, torch.Tensor):
                if value.requires_grad and value.is_floating_point():
                    found[path] = value.detach()
                    return _Input(path)
                return value.detach()
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
                return type(value)(taken(f"{path}.{i}", item) for i, item in enumerate(value))
            return value

        args, kwargs = self.calls[case["name"]]
        arguments = [taken(f"input {i}", value) for i, value in enumerate(args)]
        keywords = {name: taken(f"input {name}", value) for name, value in kwargs.items()}
        for name, parameter in self.original.named_parameters():
            # Not the initial values: a norm's ones and a bias's zeros would hide a kernel that ignores them.
            found[name] = draw.rounded(parameter.detach() + 0.1 * draw.normal(*parameter.shape, dtype="float32"))
        return found, {"original": self.original, "arguments": arguments, "keywords": keywords}


class _Input:
    """Stands for an argument that gets a gradient."""

    def __init__(self, path: str) -> None:
        self.path = path


def _given(value: Any, inputs: Any, dtype: Any) -> Any:
    """The argument again; other floating-point tensors in `dtype`, where one is named."""
    import torch

    if isinstance(value, _Input):
        return inputs[value.path]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_given(item, inputs, dtype) for item in value)
    if dtype is not None and isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _run(module: Any, inputs: Any, fixed: Any, dtype: Any = None) -> dict[str, Any]:
    import torch

    parameters = {name: value for name, value in inputs.items() if not name.startswith("input ")}
    arguments = tuple(_given(value, inputs, dtype) for value in fixed["arguments"])
    keywords = {name: _given(value, inputs, dtype) for name, value in fixed["keywords"].items()}
    output = torch.func.functional_call(module, parameters, arguments, keywords)
    outputs = output if isinstance(output, (list, tuple)) else (output,)
    return {f"output {i}": x for i, x in enumerate(outputs) if isinstance(x, torch.Tensor) and x.is_floating_point()}


def _call(layer: Any, inputs: Any, fixed: Any) -> dict[str, Any]:
    return _run(layer, inputs, fixed)


def _reference(inputs: Any, fixed: Any, precision: Any) -> dict[str, Any]:
    dtype = precision.dtype if precision.dtype is not None else next(iter(inputs.values())).dtype
    module = copy.deepcopy(fixed["original"]).to(dtype)
    return _run(module, {name: value.to(dtype) for name, value in inputs.items()}, fixed, dtype)
