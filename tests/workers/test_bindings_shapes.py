"""Wrappers, loaders and classes of every shape, also of shapes that no release has yet: none may pass by accident.

These use a transformers of a few lines, because the real ones have only the shapes they have; the real ones are
observed in tests/observe/test_bindings.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kernelguard.observe.process import Record, WorkerResult, run_worker
from observed import Interpreter, make_venv

_TORCH = """
import contextlib
class cuda:
    @staticmethod
    def is_available(): return False
class nn:
    class Module:
        def modules(self): yield self
def device(name): return contextlib.nullcontext()
"""
_HUB_KERNELS = """
import functools, inspect
import torch

def make(torch_function, implementation, is_new=None, drop=()):
    applicable_params = tuple(name for name in inspect.signature(implementation).parameters if name not in drop)
    is_new_implementation = implementation is not torch_function if is_new is None else is_new
    @functools.wraps(torch_function)
    def wrapped(*args, **kwargs):
        if is_new_implementation and kwargs.get("export"):
            return torch_function(*args, **kwargs)
        return implementation(*args, **{k: v for k, v in kwargs.items() if k in applicable_params})
    return wrapped

def make_other_shape(torch_function, kernel):
    @functools.wraps(torch_function)
    def wrapped(*args, **kwargs):
        return kernel(*args, **kwargs) if kernel else torch_function(*args, **kwargs)
    return wrapped

def singleton(func):
    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs): return func(*args, **kwargs)
    return Func()

def singleton_of_other_shape(inner):
    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs): return inner(*args, **kwargs)
    return Func()
"""
_FLA = """
import functools
def chunk(q, k, v, cu_seqlens=None, **kwargs): ...
def decorated(function):
    @functools.wraps(function)
    def inner(*args, **kwargs): return function(*args, **kwargs)
    return inner
@decorated
def wrapped_chunk(q, k, cu_seqlens=None): ...
class Jit:
    def __init__(self, fn): self.fn = fn
    def __call__(self, *args): ...
jitted = Jit(chunk)
partial = functools.partial(chunk, k=1)
class Norm:
    def __init__(self, size, eps=1e-5): ...
def positional(q, /, k): ...
"""
_CLOSURES = """
import types
import fla, vendor
from transformers.integrations.hub_kernels import make, make_other_shape, singleton, singleton_of_other_shape

def slow(query, key, value=None): ...

kernel = make(slow, fla.chunk)
fallback = make(slow, slow)
wrapped_kernel = make(slow, fla.wrapped_chunk)
partial_kernel = make(slow, fla.partial)
positional = make(slow, fla.positional)
other_shape = make_other_shape(slow, fla.chunk)
lies_new = make(slow, slow, is_new=True)
lies_old = make(slow, fla.chunk, is_new=False)
drops = make(slow, fla.chunk, drop=("cu_seqlens",))
from_elsewhere = make(slow, vendor.fast)
claims = make(slow, vendor.claims_to_be_fla)
plain = slow
replaced = vendor.fast
not_callable = 3
one = singleton(make(slow, fla.chunk))
one_slow = singleton(make(slow, slow))
one_of_other_shape = singleton_of_other_shape(make(slow, fla.chunk))
from_hub = singleton(make(slow, fla.chunk))
from_hub.forward = types.MethodType(vendor.hub_forward(), from_hub)
"""
_VENDOR = """
import importlib.util, os
def fast(q): ...
def claims_to_be_fla(q): ...
claims_to_be_fla.__module__ = "fla.ops"
def hub_forward():
    path = os.path.join(os.path.dirname(__file__), "models--kernels-community--fla/snapshots/0f/build/fla/__init__.py")
    spec = importlib.util.spec_from_file_location("fla_0f", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.forward
def wrap(method):
    import functools
    @functools.wraps(method)
    def around(*args, **kwargs): return method(*args, **kwargs)
    return around
"""
_GLOBALS = """
import fla, vendor
import transformers.kernels.scan
kernel, none, false = fla.chunk, None, False
jitted, norm, module = fla.jitted, fla.Norm, fla
elsewhere = vendor.fast
own = transformers.kernels.scan.inner
is_fast = all((kernel, none))
def load(): return (fla.chunk, None)
def load_and_raise(): raise OSError("libcudart.so.12: cannot open shared object file")
class Good:
    def forward(self): ...
class Patched: ...
Patched.forward = vendor.fast
class Wrapped:
    def forward(self): ...
Wrapped.forward = vendor.wrap(Wrapped.forward)
"""
_LAZY = """
import torch, fla
before = None
class Mixer:
    def __init__(self, config, layer_idx, initialize=True):
        assert layer_idx == 1 and config.model_type == "inner"
        global after, before, is_fast
        after, before, is_fast = fla.chunk, fla.chunk, True
class Broken:
    def __init__(self, config):
        global after_broken
        after_broken = fla.chunk
        raise RuntimeError("no CUDA GPUs are available")
class Greedy:
    def __init__(self, config, something): ...
class Unbuilt:
    def __init__(self, config):
        raise ValueError("never")
class Model(torch.nn.Module):
    def __init__(self, config):
        self.parts = [Mixer.__new__(Mixer), Broken.__new__(Broken), Broken.__new__(Broken)]
    def modules(self): yield from [self, *self.parts]
"""
_CONFIGURATION = """
class Config:
    def __init__(self, raw):
        for name, value in raw.items():
            setattr(self, name, Config(value) if isinstance(value, dict) else value)
    from_dict = classmethod(lambda cls, raw: cls(raw))
    def to_dict(self): return {}
CONFIG_MAPPING = {"outer": Config}
"""
_FILES = {
    "torch/__init__.py": _TORCH,
    "fla/__init__.py": _FLA,
    "vendor/__init__.py": _VENDOR,
    "vendor/models--kernels-community--fla/snapshots/0f/build/fla/__init__.py": "def forward(self, q, k): ...\n",
    "transformers/__init__.py": "from transformers.models.lazy import Model\n",
    "transformers/utils/__init__.py": "",
    "transformers/utils/import_utils.py": "def is_kernels_available(): return True\n",
    "transformers/integrations/__init__.py": "",
    "transformers/integrations/hub_kernels.py": _HUB_KERNELS,
    "transformers/kernels/__init__.py": "",
    "transformers/kernels/scan.py": "def inner(x): ...\n",
    "transformers/models/__init__.py": "",
    "transformers/models/auto/__init__.py": "",
    "transformers/models/auto/configuration_auto.py": _CONFIGURATION,
    "transformers/models/closures.py": _CLOSURES,
    "transformers/models/globals.py": _GLOBALS,
    "transformers/models/lazy.py": _LAZY,
    "transformers/models/hangs.py": "import time\ntime.sleep(600)\n",
    "transformers/models/raises.py": "try: import triton\nexcept ImportError as e: raise ValueError('no') from e",
    "transformers/models/asks.py": "raise OSError('unset HF_HUB_OFFLINE')",
    "transformers/models/exits.py": "raise SystemExit(2)",
    "transformers/models/forks.py": "import os, fla\nos.fork()\nkernel = fla.chunk\nprint('x' * 1_000_000)\n",
}
_CONFIG = {
    "model_type": "outer",
    "architectures": ["Gone", "Model"],
    "text_config": {"model_type": "inner", "layer_types": ["full_attention", "linear_attention"]},
}


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    env = make_venv(tmp_path_factory.mktemp("shapes") / "venv")
    for name, text in _FILES.items():
        (env.site / name).parent.mkdir(parents=True, exist_ok=True)
        (env.site / name).write_text(text)
    return env


def _site(module: str, kind: str, name: str, **more: Any) -> dict[str, Any]:
    common = {"owner": None, "loader": None, "index": None, "package": "fla", "model_type": "inner", "hub_first": False}
    common |= {"import_module": "fla", "symbol": name}
    return {**common, "module": f"transformers.models.{module}", "kind": kind, "name": name, **more}


def _read(
    interpreter: Interpreter,
    *sites: Mapping[str, Any],
    config: Mapping[str, Any] | None = None,
    gates: tuple[tuple[str, str], ...] = (),
    timeout: float = 60.0,
) -> WorkerResult:
    request = {
        "modules": list(dict.fromkeys(site["module"] for site in sites)),
        "sites": [{**site, "id": number} for number, site in enumerate(sites)],
        "gates": [{"module": f"transformers.models.{module}", "name": name} for module, name in gates],
        "config": config,
        "build_s": 10,
    }
    return run_worker(str(interpreter.python), "bindings", request, timeout=timeout)


def _only(result: WorkerResult) -> Record:
    (record,) = result.of_kind("binding")
    return record


_CASES: list[tuple[str, str, dict[str, Any], str, str]] = [
    # module, name, how, bound to, words of the target or the detail
    ("closures", "kernel", {}, "kernel", "fla.chunk"),
    ("closures", "fallback", {}, "torch", "transformers.models.closures.slow"),
    ("closures", "wrapped_kernel", {}, "kernel", "fla.wrapped_chunk"),
    ("closures", "partial_kernel", {}, "kernel", "fla.chunk"),
    ("closures", "other_shape", {}, "unknown", "does not close over applicable_params, implementation"),
    ("closures", "lies_new", {}, "unknown", "is_new_implementation=True"),
    ("closures", "lies_old", {}, "unknown", "is_new_implementation=False"),
    ("closures", "drops", {}, "unknown", "does not pass cu_seqlens on"),
    ("closures", "from_elsewhere", {}, "other", "vendor.fast"),
    ("closures", "claims", {}, "other", "its code is in"),
    ("closures", "plain", {}, "torch", "transformers.models.closures.slow"),
    ("closures", "replaced", {}, "other", "vendor.fast"),
    ("closures", "not_callable", {}, "other", "builtins.int"),
    ("closures", "gone", {}, "unknown", "has no gone"),
    ("closures", "one", {}, "kernel", "fla.chunk"),
    ("closures", "one_slow", {}, "torch", "transformers.models.closures.slow"),
    ("closures", "one_of_other_shape", {}, "unknown", "does not close over `func`"),
    ("closures", "from_hub", {}, "hub", "fla_0f.forward"),
    ("globals", "kernel", {}, "kernel", "fla.chunk"),
    ("globals", "none", {}, "torch", "none is None"),
    ("globals", "false", {}, "torch", "false is False"),
    ("globals", "gone", {}, "torch", "gone is None"),
    ("globals", "jitted", {}, "kernel", "fla.chunk"),
    ("globals", "norm", {}, "kernel", "fla.Norm"),
    ("globals", "module", {}, "kernel", "fla"),
    ("globals", "elsewhere", {}, "other", "vendor.fast"),
    ("globals", "own", {}, "kernel", "transformers.kernels.scan.inner"),
    ("globals", "kernel", {"owner": "Good"}, "kernel", "fla.chunk"),
    ("globals", "kernel", {"owner": "Patched"}, "other", "Patched.forward was replaced"),
    ("globals", "kernel", {"owner": "Wrapped"}, "other", "Wrapped.forward was replaced"),
    ("globals", "none", {"owner": "Patched"}, "other", "Patched.forward was replaced"),
    ("globals", "load", {"loader": "load", "index": 0}, "kernel", "fla.chunk"),
    ("globals", "load", {"loader": "load", "index": 1}, "torch", "load is None"),
    ("globals", "load", {"loader": "load", "index": 2}, "unknown", "IndexError"),
    ("globals", "load", {"loader": "gone", "index": 0}, "unknown", "KeyError: 'gone'"),
    ("globals", "load", {"loader": "load_and_raise", "index": 0}, "unknown", "OSError: libcudart.so.12"),
    ("globals", "chunk", {"kind": "at-call"}, "kernel", "fla.chunk"),
    ("globals", "gone", {"kind": "at-call"}, "torch", "gone is None"),
    ("globals", "x", {"kind": "at-call", "import_module": "nothing.here"}, "torch", "there is no nothing to import"),
    ("globals", "x", {"kind": "at-call", "import_module": "fla.gone"}, "unknown", "No module named 'fla.gone'"),
    ("globals", "x", {"kind": "of-tomorrow"}, "unknown", "'of-tomorrow' is not known"),
]


@pytest.fixture(scope="module")
def shapes(interpreter: Interpreter) -> list[Record]:
    def kind(module: str, more: Mapping[str, Any]) -> str:
        return "closure" if module == "closures" else "function-result" if "loader" in more else "global"

    sites = (_site(module, **{"kind": kind(module, more), "name": name, **more}) for module, name, more, *_ in _CASES)
    result = _read(interpreter, *sites)
    assert result.finished, result.ending()
    return list(result.of_kind("binding"))


@pytest.mark.parametrize("number", range(len(_CASES)), ids=[f"{case[0]}-{case[1]}" for case in _CASES])
def test_shape(shapes: list[Record], number: int) -> None:
    _, _, _, bound_to, words = _CASES[number]
    record = next(record for record in shapes if record["id"] == number)
    assert record["bound_to"] == bound_to, record
    assert words in f"{record.get('target', '')} {record.get('detail', '')}"


def test_arguments(interpreter: Interpreter) -> None:
    names = ("kernel", "wrapped_kernel", "partial_kernel", "positional", "fallback")
    result = _read(interpreter, *(_site("closures", "closure", name) for name in names))
    assert [(record["parameters"], record["accepts_any_keyword"]) for record in result.of_kind("binding")] == [
        (["q", "k", "v", "cu_seqlens"], True),
        (["q", "k", "cu_seqlens"], False),
        (["q", "k", "v", "cu_seqlens"], True),
        (["k"], False),
        (["query", "key", "value"], False),
    ]


def test_globals_that_a_constructor_sets(interpreter: Interpreter) -> None:
    lazy = "global-after-init"
    result = _read(
        interpreter,
        _site("lazy", lazy, "after", owner="Mixer"),
        _site("lazy", lazy, "before", owner="Mixer"),
        _site("lazy", lazy, "after_broken", owner="Broken"),
        _site("lazy", lazy, "x", owner="Greedy"),
        _site("lazy", lazy, "after", owner="Mixer", model_type="other"),
        _site("lazy", lazy, "before", owner="Unbuilt"),
        config=_CONFIG,
        gates=(("lazy", "is_fast"), ("lazy", "is_gone")),
    )
    assert result.finished, result.output
    found = {record["id"]: record for record in result.of_kind("binding")}
    assert [found[number]["bound_to"] for number in range(6)] == [
        "kernel",
        "kernel",
        "kernel",  # its own construction failed, but the whole model could be built
        "unknown",
        "kernel",  # constructed once already
        "unknown",  # a name that something else has set says nothing
    ]
    assert "Greedy wants something" in found[3]["detail"]
    assert "ValueError: never" in found[5]["detail"]
    (layers,) = result.of_kind("layers")
    assert layers["counts"] == {"Mixer": 1, "Broken": 2, "Greedy": 0, "Unbuilt": 0}
    assert [gate["value"] for gate in result.of_kind("gate")] == [True, None]


def test_a_failed_construction_is_unknown_where_the_model_cannot_be_built(interpreter: Interpreter) -> None:
    config = {**_CONFIG, "architectures": ["Gone"]}
    result = _read(interpreter, _site("lazy", "global-after-init", "after_broken", owner="Broken"), config=config)
    record = _only(result)
    assert record["bound_to"] == "unknown"
    assert "Broken could not be constructed: RuntimeError: no CUDA GPUs are available" in record["detail"]
    assert ["could not be built" in problem["text"] for problem in result.of_kind("problem")] == [True]


def test_a_hub_that_only_this_check_keeps_away_is_unknown(
    interpreter: Interpreter, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = _site("globals", "global", "none", hub_first=True)
    record = _only(_read(interpreter, site))
    assert record["bound_to"] == "unknown"
    assert "this check downloads nothing" in record["detail"]
    # A user who is offline himself trains offline as well.
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert _only(_read(interpreter, site))["bound_to"] == "torch"


def test_a_hang_keeps_what_was_known_before(interpreter: Interpreter) -> None:
    sites = (_site("globals", "global", "kernel"), _site("hangs", "global", "kernel"))
    result = _read(interpreter, *sites, timeout=2.0)
    assert result.timed_out
    assert result.died_at == "import transformers.models.hangs"
    assert [record["module"] for record in result.of_kind("module")] == ["transformers.models.globals"]


def test_why_a_module_could_not_be_imported(interpreter: Interpreter) -> None:
    result = _read(interpreter, *(_site(module, "global", "kernel") for module in ("raises", "asks", "exits")))
    assert result.finished
    assert not list(result.of_kind("binding"))
    raises, asks, exits = result.of_kind("module")
    assert (raises["outcome"], raises["error_type"], raises["missing_module"]) == ("raised", "ValueError", "triton")
    assert raises["error"] == "no; from ModuleNotFoundError: No module named 'triton'"
    assert (asks["outcome"], exits["outcome"]) == ("not-tried", "exited")


def test_a_module_that_forks_is_reported_once(interpreter: Interpreter) -> None:
    result = _read(interpreter, _site("forks", "global", "kernel"))
    assert result.finished
    assert _only(result)["bound_to"] == "kernel"
    assert len(list(result.of_kind("module"))) == 1


def test_without_transformers_it_says_so(tmp_path: Path) -> None:
    env = make_venv(tmp_path / "venv")
    result = _read(env, _site("globals", "global", "kernel"))
    assert result.finished
    assert [record["text"] for record in result.of_kind("problem")] == [
        "import torch: ModuleNotFoundError: No module named 'torch'"
    ]
