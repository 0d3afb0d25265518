"""Any layer or function that the `kernels` hub puts in the place of a model's own, against what it replaces.

transformers' own `set_use_kernels` does the swap, in a cut-down model of the real configuration: the module stays, its
`forward` becomes the kernel's. Inputs are what the model hands to the layer; what takes part in training there gets a
gradient here. The truth is a copy of the layer from before the swap. A model can use one name in several ways (a norm
of the hidden size and one of a head): each that differs in class, settings, parameters or inputs is measured.
"""

from __future__ import annotations

import copy
import functools
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
    return function, Probe(subject.make, _call, _reference)


class _Use:
    """One way in which the model calls one of its layers."""

    def __init__(self, path: str, layer: Any, args: Any, kwargs: Any) -> None:
        self.path = path
        self.layer = layer
        self.args = args
        self.kwargs = kwargs
        self.original: Any = None
        """A copy from before the swap."""
        self.label = ""
        """Follows the names of its tensors where the model uses the name in more than one way."""
        self.parameters: dict[str, str] = {}
        """The name of each parameter, and the one under which it is an input of the probe."""
        self.arguments: Any = ()
        self.keywords: Any = {}

    def signature(self) -> str:
        """The same for two uses that differ in nothing that a kernel can see."""
        plain = {
            name: value
            for name, value in vars(self.layer).items()
            if isinstance(value, (bool, int, float, str)) and name != "layer_idx"
        }
        parameters = [(name, _shape(x)) for name, x in self.layer.named_parameters()]
        given = [_shape(x) for x in (*self.args, *(value for _, value in sorted(self.kwargs.items())))]
        return repr((type(self.layer), plain, parameters, given, sorted(self.kwargs)))


class _Subject:
    """The layers of one name, and what the model calls them with."""

    def __init__(self, request: Any, out: Any) -> None:
        # A worker of its own as well, so it is found beside this folder and not in it.
        isolation = importlib.import_module("...isolation", __name__)
        self.name = request["symbol"]
        self.built = isolation.Model(
            {**request["model"], "dtype": request["dtype"], "device": request["device"], "lengths": [1]}, out
        )
        self.model = self.built.model
        self.layers = self._find()
        self.uses: dict[str, list[_Use]] = {}
        """By case."""

    def _find(self) -> dict[str, Any]:
        import torch

        names = set()
        found: dict[str, Any] = {}
        for path, module in self.model.named_modules():
            functions = vars(module).get("_kernel_funcs", {})
            candidates = {path: module, **{f"{path}.{name}": function for name, function in functions.items()}}
            for place, candidate in candidates.items():
                name = getattr(type(candidate), "kernel_layer_name", None)
                if name == self.name and isinstance(candidate, torch.nn.Module):
                    found.setdefault(place, candidate)
                names.add(name)
        if found:
            return found
        known = (
            ", ".join(sorted(str(name) for name in names if name)) or "none: it takes the kernels package for absent"
        )
        raise LookupError(f"no layer of this model is called {self.name} by this transformers; it knows {known}")

    def capture(self, case: Any) -> None:
        """Remember each different way in which one forward pass of the model calls such a layer."""
        torch = self.built.torch
        uses: dict[str, _Use] = {}

        def remember(path: str, layer: Any, args: Any, kwargs: Any) -> None:
            use = _Use(path, layer, args, kwargs)
            uses.setdefault(use.signature(), use)

        handles = []
        # A function can be the same object in several modules.
        for layer, path in {layer: path for path, layer in reversed(self.layers.items())}.items():
            hook = functools.partial(remember, path)
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
        ids = torch.arange(sum(case["lengths"]), device=self.built.device) * 7919 % self.built.vocabulary
        try:
            self.model(inputs_embeds=self.built.embed(ids)[None], use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        if not uses:
            raise LookupError(f"a forward pass of the model in training does not call {self.name}")
        self.uses[case["name"]] = list(uses.values())
        for number, use in enumerate(uses.values()):
            use.original = copy.deepcopy(use.layer)
            same = sum(other.path == use.path for other in uses.values()) > 1
            use.label = f" of {use.path}{f' (use {number + 1})' if same else ''}" if len(uses) > 1 else ""

    def swap(self) -> Any:
        """Let transformers replace what it would replace in training; the function that now runs in the layers."""
        if hasattr(self.model, "set_use_kernels"):
            self.model.set_use_kernels(True)
        else:
            self.model.use_kernels = True
        measured = {use.layer for uses in self.uses.values() for use in uses}
        function = None
        for path, layer in self.layers.items():
            own = vars(layer).get("forward")
            if isinstance(own, types.MethodType) and own.__func__ is not type(layer).forward:
                function = function or own.__func__
            elif layer in measured:
                raise NotReplacedError(f"use_kernels=True replaces no {self.name} on {self.built.device} here ({path})")
        if function is None:
            raise NotReplacedError(f"use_kernels=True replaces no {self.name} on {self.built.device} here")
        return function

    def make(self, case: Any, draw: Any) -> Any:
        """The captured arguments, and the layers' parameters."""
        found: dict[str, Any] = {}

        def taken(path: str, label: str, value: Any) -> Any:
            torch = draw.torch
            if isinstance(value, torch.Tensor):
                if value.requires_grad and value.is_floating_point():
                    found[path + label] = value.detach()
                    return _Input(path + label)
                return value.detach()
            if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
                return type(value)(taken(f"{path}.{i}", label, item) for i, item in enumerate(value))
            return value

        uses = self.uses[case["name"]]
        for use in uses:
            use.arguments = [taken(f"input {i}", use.label, value) for i, value in enumerate(use.args)]
            use.keywords = {name: taken(f"input {name}", use.label, value) for name, value in use.kwargs.items()}
            for name, parameter in use.original.named_parameters():
                # Not the initial values: a norm's ones and a bias's zeros would hide a kernel that ignores them.
                use.parameters[name] = name + use.label
                moved = parameter.detach() + 0.1 * draw.normal(*parameter.shape, dtype="float32")
                found[name + use.label] = draw.rounded(moved)
        return found, uses


def _shape(value: Any) -> Any:
    """What a kernel sees of a value beside its numbers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return (tuple(value.shape), str(value.dtype), bool(value.requires_grad))
    if isinstance(value, (list, tuple)):
        return [_shape(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) or value is None else type(value).__name__


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


def _run(use: Any, module: Any, inputs: Any, dtype: Any = None) -> dict[str, Any]:
    import torch

    parameters = {name: inputs[own] for name, own in use.parameters.items()}
    arguments = tuple(_given(value, inputs, dtype) for value in use.arguments)
    keywords = {name: _given(value, inputs, dtype) for name, value in use.keywords.items()}
    output = torch.func.functional_call(module, parameters, arguments, keywords)
    outputs = output if isinstance(output, (list, tuple)) else (output,)
    return {
        f"output {i}{use.label}": x
        for i, x in enumerate(outputs)
        if isinstance(x, torch.Tensor) and x.is_floating_point()
    }


def _call(_swapped: Any, inputs: Any, uses: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for use in uses:
        found.update(_run(use, use.layer, inputs))
    return found


def _reference(inputs: Any, uses: Any, precision: Any) -> dict[str, Any]:
    dtype = precision.dtype if precision.dtype is not None else next(iter(inputs.values())).dtype
    rounded = {name: value.to(dtype) for name, value in inputs.items()}
    found: dict[str, Any] = {}
    for use in uses:
        found.update(_run(use, copy.deepcopy(use.original).to(dtype), rounded, dtype))
    return found
