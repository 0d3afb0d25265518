"""What stands where a kernel should be? Objects of imported modeling modules, unwrapped down to what really runs.

Used by the worker `bindings.py`, which loads this file by path, and by the guard inside a training process. Standard
library only; what cannot be read for certain raises `UnknownShapeError`.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH118, PTH119, PTH120

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import os
import re
import sys
import types
from typing import Any, Iterator

# Where the hub's cache keeps a downloaded kernel.
_HUB_FILE = re.compile(r"(?:models|kernels)--[^/]+--[^/]+/snapshots/")


class UnknownShapeError(Exception):
    """What stands in the module is nothing that this file knows how to read."""


def chain(error: BaseException | None) -> list[BaseException]:
    """An exception and what it was raised from: transformers wraps import errors in one that says nothing."""
    found: list[BaseException] = []
    while error is not None and len(found) < 10:
        found.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return found


def words(error: BaseException) -> str:
    """An exception, word for word, and the ones it was raised from."""
    if isinstance(error, UnknownShapeError):
        return str(error)
    return "; from ".join(f"{type(link).__name__}: {link}" for link in chain(error))


def layers_of(target: Any) -> Iterator[Any]:
    """`target` and, one by one, what its decorators, partials and just-in-time compilers are put around."""
    for _ in range(20):
        yield target
        if isinstance(target, functools.partial):
            target = target.func
        elif isinstance(target, types.MethodType):
            target = target.__func__
        elif callable(getattr(target, "__kernel__", None)):
            # A trainer that puts a kernel there by itself, in a function that fits its arguments, says which one.
            target = target.__kernel__
        elif hasattr(target, "__wrapped__"):
            target = target.__wrapped__
        elif isinstance(target, (type, types.FunctionType, types.ModuleType)):
            return
        elif callable(getattr(target, "fn", None)):
            # triton.jit and triton.autotune keep the function there,
            target = target.fn
        elif callable(getattr(target, "_init_fn", None)):
            # and torch.library.custom_op there.
            target = target._init_fn  # noqa: SLF001
        else:
            return


def innermost(target: Any) -> Any:
    """The function under everything else, which tells its file and module."""
    return list(layers_of(target))[-1]


def file_of(target: Any) -> str:
    """The source file that defines `target`, or its module's file for a compiled one."""
    code = getattr(target, "__code__", None)
    if code is not None:
        return str(code.co_filename)
    if isinstance(target, types.ModuleType):
        return str(target.__file__ or "")
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    return str(getattr(module, "__file__", None) or "")


def dotted(target: Any) -> str:
    """`package.module.function`."""
    if isinstance(target, types.ModuleType):
        return target.__name__
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', None) or type(target).__module__}.{name}"


def real(file: str) -> str:
    """A file's path with its folders' links resolved, but not its own: uv may link each file into its cache."""
    return os.path.join(os.path.realpath(os.path.dirname(file)), os.path.basename(file))


def inside(file: str, package: str) -> bool:
    """Whether a file lies in one of the folders of an imported package."""
    module = sys.modules.get(package)
    folders = list(getattr(module, "__path__", ()))
    if not folders:
        own = getattr(module, "__file__", None)
        return own is not None and real(own) == real(file)
    return any(real(file).startswith(os.path.realpath(folder) + os.sep) for folder in folders)


@functools.lru_cache(maxsize=None)
def distribution_of(file: str) -> str:
    """The distribution whose records list a file, else the only one that lists its top-level package, else nothing."""
    owners = set()
    for dist in importlib.metadata.distributions():
        base = os.path.realpath(str(dist.locate_file("")))
        if not file.startswith(base + os.sep):
            continue
        listed = file[len(base) + 1 :].replace(os.sep, "/")
        try:
            record = f"\n{dist.read_text('RECORD') or ''}"
        except UnicodeDecodeError:
            # Damaged metadata lists nothing; the environment worker names it.
            continue
        name = re.sub(r"[-_.]+", "-", dist.metadata["Name"] or "").lower()
        if f"\n{listed}," in record:
            return name
        if f"\n{listed.partition('/')[0]}/" in record:
            owners.add(name)
    return owners.pop() if len(owners) == 1 else ""


def is_expected(file: str) -> bool:
    """Whether a decorator or method of a transformers class may come from here."""
    standard_library = os.path.dirname(os.path.realpath(os.__file__))
    here = os.path.dirname(os.path.realpath(file))
    return here == standard_library or any(inside(file, name) for name in ("transformers", "torch", "kernels"))


def called_with(target: Any) -> dict[str, Any]:
    """The keyword names that `target` takes; of a trainer's own function around a kernel, those of the kernel."""
    target = getattr(target, "__kernel__", target)
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError) as error:
        return {"parameters": [], "accepts_any_keyword": False, "detail": f"its signature is not known: {words(error)}"}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    swallows = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    return {"parameters": parameters, "accepts_any_keyword": swallows}


def describe(target: Any, package: str) -> dict[str, Any]:
    """What an object in a modeling module is: the package's own, the hub's, transformers', or somebody else's."""
    inner = innermost(target)
    file = file_of(inner)
    module = str(getattr(inner, "__module__", None) or getattr(inner, "__name__", ""))
    fact: dict[str, Any] = {"target": dotted(inner), "file": file, **called_with(target)}
    if file:
        fact["distribution"] = distribution_of(real(file))
    in_package = module == package or module.startswith(package + ".")
    if _HUB_FILE.search(file):
        fact["bound_to"] = "hub"
    elif in_package and inside(file, package):
        fact["bound_to"] = "kernel"
    elif module.startswith("transformers.kernels."):
        # 4.57 ships a fused mamba scan of its own, over mamba_ssm's extension.
        fact["bound_to"] = "kernel"
    elif inside(file, "transformers"):
        fact["bound_to"] = "torch"
    else:
        fact["bound_to"] = "other"
        if in_package:
            fact["detail"] = f"it calls itself {module}, but its code is in {file or 'no file'}"
    return fact


def closure_of(function: Any) -> dict[str, Any]:
    """The variables that a function has closed over."""
    code = getattr(function, "__code__", None)
    if code is None:
        raise UnknownShapeError(f"{function!r} is no Python function")
    cells = getattr(function, "__closure__", None) or ()
    values = {}
    for name, cell in zip(code.co_freevars, cells):  # strict= came with 3.10
        with contextlib.suppress(ValueError):  # an empty cell
            values[name] = cell.cell_contents
    return values


def read_closure(module: types.ModuleType, site: dict[str, Any], torch: types.ModuleType) -> dict[str, Any]:
    """A function decorated with `use_kernel_func_from_hub_with_fallback`, in any of its known shapes."""
    function = module.__dict__.get(site["name"])
    if function is None:
        raise UnknownShapeError(f"{module.__name__} has no {site['name']}")
    if isinstance(function, torch.nn.Module):
        # With a usable `kernels`, the function is one module object that all models share; kernelize() puts the hub's
        # forward into the instance.
        own = function.__dict__.get("forward")
        forward = type(function).forward
        if own is not None and getattr(own, "__func__", None) is not forward:
            return {**describe(own, site["package"]), "bound_to": "hub"}
        function = closure_of(forward).get("func")
        if function is None:
            raise UnknownShapeError(f"{dotted(forward)} does not close over `func`")
    decorator = sys.modules.get("transformers.integrations.hub_kernels")
    here = file_of(function)
    if real(here) == real(module.__file__ or ""):
        return describe(function, site["package"])
    if decorator is None or real(here) != real(decorator.__file__ or ""):
        # Somebody put another function in the module after it was imported, or while.
        return describe(function, site["package"])
    cells = closure_of(function)
    lacking = {"implementation", "is_new_implementation", "torch_function", "applicable_params"} - set(cells)
    if lacking:
        raise UnknownShapeError(f"the wrapper of {site['name']} does not close over {', '.join(sorted(lacking))}")
    implementation, is_new = cells["implementation"], cells["is_new_implementation"]
    if (implementation is not cells["torch_function"]) is not is_new or not callable(implementation):
        raise UnknownShapeError(f"the wrapper of {site['name']} says is_new_implementation={is_new!r}, which is not so")
    fact = describe(implementation, site["package"])
    if is_new and fact["bound_to"] == "torch":
        fact["bound_to"] = "other"
    if not is_new and fact["bound_to"] != "torch":
        raise UnknownShapeError(f"{fact['target']} was decorated as the PyTorch function of {site['name']}")
    passed = list(cells["applicable_params"])
    dropped = [name for name in fact["parameters"] if name not in passed]
    if dropped:
        raise UnknownShapeError(f"the wrapper does not pass {', '.join(dropped)} on, which {fact['target']} takes")
    return fact


def read_value(value: Any, site: dict[str, Any]) -> dict[str, Any]:
    """A global that is the kernel, or None."""
    if value is None or value is False:
        return {"bound_to": "torch", "target": "", "detail": f"{site['name']} is {value}"}
    return describe(value, site["package"])
