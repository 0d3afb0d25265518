"""What the imported modeling code of real transformers releases is bound to, for every way a package can be there.

Each test makes one interpreter with crafted packages, runs the real workers in it and looks at everything they say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

import configs
import crafted
from kernelguard.declare.values import (
    BindingKind,
    BindingSite,
    Declaration,
    FastPath,
    Gate,
    ModelConfig,
    Phase,
    Requirement,
    TransformersTree,
)
from kernelguard.observe.bindings import observe_bindings
from kernelguard.observe.values import Binding, Bindings, BoundTo, ImportOutcome
from observed import Interpreter, environment, make_venv

pytestmark = pytest.mark.observed

_QWEN = "transformers.models.qwen3_5.modeling_qwen3_5"
_NEXT = "transformers.models.qwen3_next.modeling_qwen3_next"
_MAMBA = "transformers.models.mamba.modeling_mamba"
_MAMBA2 = "transformers.models.mamba2.modeling_mamba2"
# Makes the availability helpers of transformers up to 5.14 believe in a GPU, as they would on the training machine.
_PRETEND_GPU = {
    "sitecustomize.py": (
        "import importlib.abc, importlib.machinery, sys\n"
        "class Finder(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name != 'torch': return None\n"
        "        sys.meta_path.remove(self)\n"
        "        spec = importlib.machinery.PathFinder.find_spec(name, path)\n"
        "        load = spec.loader.exec_module\n"
        "        def exec_module(module):\n"
        "            load(module)\n"
        "            module.cuda.is_available = lambda: True\n"
        "        spec.loader.exec_module = exec_module\n"
        "        return spec\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
}


def fast_path(module: str, symbol: str, import_module: str, **site: Any) -> FastPath:
    """A fast path as `declare` finds it; only what observing needs is filled in."""
    model_type = site.pop("model_type", "qwen3_5_text")
    gate = site.pop("gate", None)
    hub_first = site.pop("hub_first", False)
    site = {"kind": BindingKind.CLOSURE, "name": symbol, **site}
    package = import_module.partition(".")[0]
    return FastPath(
        symbol=symbol,
        package=package,
        distribution=package.replace("_", "-"),
        import_module=import_module,
        mechanism="test",
        requirement=Requirement.AUTOMATIC,
        phases=(Phase.TRAINING,),
        model_type=model_type,
        file="",
        line=1,
        binding=BindingSite(module=module, **site),
        layers=None,
        fallback="",
        gate=gate,
        hub_first=hub_first,
    )


CONV = fast_path(_QWEN, "causal_conv1d_fn", "causal_conv1d", owner="Qwen3_5GatedDeltaNet")
CHUNK = fast_path(
    _QWEN,
    "chunk_gated_delta_rule",
    "fla.ops.gated_delta_rule",
    name="torch_chunk_gated_delta_rule",
    owner="Qwen3_5GatedDeltaNet",
)
DECODE = fast_path(
    _QWEN,
    "fused_recurrent_gated_delta_rule",
    "fla.ops.gated_delta_rule",
    name="torch_recurrent_gated_delta_rule",
    owner="Qwen3_5GatedDeltaNet",
)


def observed(
    folder: Path,
    version: str,
    files: Mapping[str, str],
    *fast_paths: FastPath,
    raw: Mapping[str, Any] = configs.QWEN3_5,
    timeout: float = 240.0,
) -> Bindings:
    """Everything the workers see in a fresh interpreter."""
    return seen_by(environment(folder / "venv", version, files), *fast_paths, raw=raw, timeout=timeout)


def seen_by(
    env: Interpreter, *fast_paths: FastPath, raw: Mapping[str, Any] = configs.QWEN3_5, timeout: float = 240.0
) -> Bindings:
    declaration = Declaration(
        config=ModelConfig(
            source="test",
            model_type=str(raw["model_type"]),
            architectures=tuple(raw["architectures"]),
            parts=(),
            raw=raw,
        ),
        transformers=TransformersTree(root=env.site, version=Version("5.24.0"), origin="test"),
        fast_paths=fast_paths,
    )
    return observe_bindings(str(env.python), declaration, timeout=timeout)


def bound(seen: Bindings) -> dict[str, BoundTo]:
    assert len({binding.symbol for binding in seen.bindings}) == len(seen.bindings)
    return {binding.symbol: binding.bound_to for binding in seen.bindings}


def binding_of(seen: Bindings, symbol: str) -> Binding:
    (binding,) = (binding for binding in seen.bindings if binding.symbol == symbol)
    return binding


_REAL_27B = json.loads((Path(__file__).parents[2] / "examples/qwen3.8-27b/config.json").read_text())


@pytest.mark.parametrize(
    ("version", "raw", "layers"),
    # The 27B's weights would be 55 GB; its structure alone says how many layers there are.
    [
        pytest.param("5.17.0", configs.QWEN3_5, 3, id="5.17.0", marks=pytest.mark.thorough),
        pytest.param("5.24.0", _REAL_27B, 48, id="5.24.0"),
    ],
)
def test_all_good(tmp_path: Path, version: str, raw: Mapping[str, Any], layers: int) -> None:
    seen = observed(tmp_path, version, crafted.everything(), CONV, CHUNK, DECODE, raw=raw)
    assert bound(seen) == {
        "causal_conv1d_fn": BoundTo.KERNEL,
        "chunk_gated_delta_rule": BoundTo.KERNEL,
        "fused_recurrent_gated_delta_rule": BoundTo.KERNEL,
    }
    conv = binding_of(seen, "causal_conv1d_fn")
    assert conv.target == "causal_conv1d.causal_conv1d_fn"
    assert conv.file.endswith("site-packages/causal_conv1d/__init__.py")
    assert conv.distribution == "causal-conv1d"
    assert "seq_idx" in conv.parameters
    assert not conv.accepts_any_keyword
    chunk = binding_of(seen, "chunk_gated_delta_rule")
    assert chunk.target == "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    assert "cu_seqlens" in chunk.parameters
    assert "kwargs" not in chunk.parameters
    assert chunk.accepts_any_keyword
    assert [(fact.module, fact.outcome, fact.distributions) for fact in seen.imports] == [
        ("causal_conv1d", ImportOutcome.OK, ("causal-conv1d",)),
        ("fla.ops.gated_delta_rule", ImportOutcome.OK, ("fla-core", "flash-linear-attention")),
    ]
    assert seen.imports[1].symbols == {"chunk_gated_delta_rule": True, "fused_recurrent_gated_delta_rule": True}
    assert [fact.outcome for fact in seen.modules] == [ImportOutcome.OK]
    assert seen.layer_counts == {"Qwen3_5GatedDeltaNet": layers}
    assert seen.cuda_available is False
    assert seen.problems == ()


@pytest.mark.thorough
def test_a_nested_fla_is_ignored_by_5_16(tmp_path: Path) -> None:
    seen = observed(tmp_path, "5.16.1", {**crafted.everything()}, CONV, CHUNK)
    assert bound(seen) == {"causal_conv1d_fn": BoundTo.KERNEL, "chunk_gated_delta_rule": BoundTo.TORCH}
    # ... although the package is fine:
    assert [fact.outcome for fact in seen.imports] == [ImportOutcome.OK, ImportOutcome.OK]
    torch_function = binding_of(seen, "chunk_gated_delta_rule")
    assert torch_function.target == f"{_QWEN}.torch_chunk_gated_delta_rule"
    assert torch_function.distribution == "transformers"


@pytest.mark.thorough
def test_without_triton_and_with_a_lost_boundary_argument(tmp_path: Path) -> None:
    """Fla is installed without triton, and a conv swallows what it does not know."""
    text = "def causal_conv1d_fn(x, weight, bias=None, activation=None, sequence_index=None, **kwargs): ...\n"
    files = {**crafted.everything(), "causal_conv1d/__init__.py": text}
    files["fla/ops/gated_delta_rule/__init__.py"] = "import triton\n"
    seen = observed(tmp_path, "5.24.0", files, CONV, CHUNK)
    assert bound(seen) == {"causal_conv1d_fn": BoundTo.KERNEL, "chunk_gated_delta_rule": BoundTo.TORCH}
    conv = binding_of(seen, "causal_conv1d_fn")
    assert conv.parameters == ("x", "weight", "bias", "activation", "sequence_index")
    assert conv.accepts_any_keyword
    fla = seen.imports[1]
    assert (fla.outcome, fla.missing_module) == (ImportOutcome.RAISED, "triton")
    assert fla.file.endswith("fla/__init__.py")


@pytest.mark.thorough
def test_an_extension_for_another_torch_and_a_leftover_folder(tmp_path: Path) -> None:
    files = {**crafted.causal_conv1d(), "causal_conv1d/__init__.py": "import causal_conv1d_cuda\n"}
    files["fla/ops/__pycache__/old.pyc"] = ""
    env = environment(tmp_path / "other", None)
    crafted.shared_object(env.site / "causal_conv1d_cuda.so", undefined="_ZN3c105ErrorC2ENS_14SourceLocationESs")
    # A path file adds the folder with the compiled module, as an editable install would.
    files["extension.pth"] = f"{env.site}\n"
    seen = observed(tmp_path, "5.24.0", files, CONV, CHUNK)
    assert set(bound(seen).values()) == {BoundTo.TORCH}
    conv, fla = seen.imports
    assert conv.outcome is ImportOutcome.RAISED
    assert "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs" in conv.error
    assert (fla.outcome, fla.file, fla.missing_module) == (
        ImportOutcome.RAISED,
        "",
        "fla.ops.gated_delta_rule",
    )
    assert fla.search_path == (str(tmp_path / "venv/lib" / env.site.parent.name / "site-packages/fla"),)


@pytest.mark.thorough
def test_a_package_that_aborts_leaves_everything_unknown(tmp_path: Path) -> None:
    files = {**crafted.everything(), "causal_conv1d/__init__.py": "import os\nos.abort()\n"}
    seen = observed(tmp_path, "5.24.0", files, CONV, CHUNK)
    assert set(bound(seen).values()) == {BoundTo.UNKNOWN}
    assert "SIGABRT" in binding_of(seen, "chunk_gated_delta_rule").detail
    assert [(fact.outcome, fact.signal) for fact in seen.imports] == [
        (ImportOutcome.CRASHED, "SIGABRT"),
        (ImportOutcome.OK, ""),
    ]
    assert [(fact.module, fact.outcome, fact.signal) for fact in seen.modules] == [
        (_QWEN, ImportOutcome.CRASHED, "SIGABRT")
    ]
    assert any(f"killed by SIGABRT at stage 'import {_QWEN}'" in problem for problem in seen.problems)
    assert seen.cuda_available is False


# --- releases up to 5.14: guarded imports, lazy loads, and helpers that want a GPU --------------------------------

_QWEN_GATE = Gate(name="is_fast_path_available", members=("causal_conv1d_fn", "chunk_gated_delta_rule"), decides=False)
_OLD_CONV = fast_path(_QWEN, "causal_conv1d_fn", "causal_conv1d", kind=BindingKind.GLOBAL, gate=_QWEN_GATE)
_OLD_CHUNK = fast_path(_QWEN, "chunk_gated_delta_rule", "fla.ops.gated_delta_rule", kind=BindingKind.GLOBAL)
_MAMBA2_PATHS = tuple(
    fast_path(
        _MAMBA2,
        symbol,
        module,
        kind=BindingKind.GLOBAL_AFTER_INIT,
        owner="Mamba2Mixer",
        model_type="mamba2",
        gate=Gate(name="is_fast_path_available", members=(), decides=True),
    )
    for symbol, module in (
        ("causal_conv1d_fn", "causal_conv1d"),
        ("mamba_split_conv1d_scan_combined", "mamba_ssm.ops.triton.ssd_combined"),
    )
)


@pytest.mark.thorough
def test_5_5_without_a_gpu_says_torch_and_that_there_is_none(tmp_path: Path) -> None:
    seen = observed(tmp_path, "5.5.4", {**crafted.everything()}, _OLD_CONV, _OLD_CHUNK)
    assert set(bound(seen).values()) == {BoundTo.TORCH}
    assert seen.cuda_available is False
    assert binding_of(seen, "causal_conv1d_fn").detail == "causal_conv1d_fn is None"
    assert [(gate.name, gate.value) for gate in seen.gates] == [("is_fast_path_available", False)]


@pytest.mark.thorough
def test_5_5_where_the_helpers_see_a_gpu(tmp_path: Path) -> None:
    files = {**crafted.everything(), **_PRETEND_GPU}
    files = crafted.without(files, "mamba_ssm/ops/triton/ssd")
    files["mamba_ssm/__init__.py"] = "__version__ = '2.3.2'\nimport mamba_ssm.ops.triton.selective_state_update\n"
    seen = observed(tmp_path, "5.5.4", files, *_MAMBA2_PATHS, _OLD_CHUNK, raw=configs.MAMBA2)
    assert bound(seen) == {
        "causal_conv1d_fn": BoundTo.KERNEL,
        "mamba_split_conv1d_scan_combined": BoundTo.TORCH,
        "chunk_gated_delta_rule": BoundTo.KERNEL,
    }
    assert binding_of(seen, "causal_conv1d_fn").module == _MAMBA2
    assert seen.cuda_available is True
    assert [(gate.module, gate.value) for gate in seen.gates] == [(_MAMBA2, False)]
    assert seen.layer_counts == {"Mamba2Mixer": 2}


@pytest.mark.thorough
def test_4_57_where_the_helpers_see_a_gpu(tmp_path: Path) -> None:
    next_chunk = fast_path(_NEXT, "chunk_gated_delta_rule", "fla.ops.gated_delta_rule", kind=BindingKind.GLOBAL,
                           owner="Qwen3NextGatedDeltaNet", model_type="qwen3_next")  # fmt: skip
    loader = {"kind": BindingKind.FUNCTION_RESULT, "loader": "_lazy_load_causal_conv1d", "model_type": "mamba"}
    update = fast_path(_MAMBA, "causal_conv1d_update", "causal_conv1d", index=0, **loader)
    conv = fast_path(_MAMBA, "causal_conv1d_fn", "causal_conv1d", index=1, **loader)
    scan = fast_path(_MAMBA, "selective_scan_fn", "mamba_ssm.ops.selective_scan_interface", kind=BindingKind.GLOBAL)
    files = {**crafted.everything(), **_PRETEND_GPU}
    seen = observed(tmp_path, "4.57.6", files, next_chunk, update, conv, scan, raw=configs.QWEN3_NEXT)
    assert set(bound(seen).values()) == {BoundTo.KERNEL}
    # The loader returns (update, fn): an index that is off by one would show here.
    assert binding_of(seen, "causal_conv1d_update").target == "causal_conv1d.causal_conv1d_update"
    assert binding_of(seen, "causal_conv1d_fn").target == "causal_conv1d.causal_conv1d_fn"
    assert binding_of(seen, "selective_scan_fn").distribution == "mamba-ssm"


@pytest.mark.thorough
def test_5_5_with_a_broken_extension_is_loud(tmp_path: Path) -> None:
    files = {**crafted.everything(), **_PRETEND_GPU, "causal_conv1d/__init__.py": "raise ImportError('bad symbol')\n"}
    seen = observed(tmp_path, "5.5.4", files, _OLD_CONV)
    assert bound(seen) == {"causal_conv1d_fn": BoundTo.UNKNOWN}
    assert [(fact.outcome, fact.error_type, fact.error) for fact in seen.modules] == [
        (ImportOutcome.RAISED, "ImportError", "bad symbol")
    ]
    assert "bad symbol" in binding_of(seen, "causal_conv1d_fn").detail


# --- when workers die; these need no real torch ------------------------------------------------------------------

_CUDA_LESS = {"torch/__init__.py": "class cuda:\n    is_available = staticmethod(lambda: False)\n"}
_CONV2 = fast_path(_QWEN, "conv", "second_package")


def _light(folder: Path, files: Mapping[str, str]) -> Interpreter:
    env = make_venv(folder / "venv")
    for name, text in {**_CUDA_LESS, "second_package.py": "conv = 1\n", **files}.items():
        (env.site / name).parent.mkdir(parents=True, exist_ok=True)
        (env.site / name).write_text(text)
    return env


def test_a_package_that_kills_its_parent_does_not_hide_the_others(tmp_path: Path) -> None:
    env = _light(tmp_path, {"causal_conv1d.py": "import os\nos.kill(os.getppid(), 9)\n"})
    seen = seen_by(env, CONV, _CONV2)
    assert [(fact.module, fact.outcome, fact.signal) for fact in seen.imports] == [
        ("causal_conv1d", ImportOutcome.CRASHED, "SIGKILL"),
        ("second_package", ImportOutcome.OK, ""),
    ]


def test_a_torch_that_dies_leaves_everything_untried(tmp_path: Path) -> None:
    seen = seen_by(_light(tmp_path, {"torch/__init__.py": "import os\nos.abort()\n"}), CONV, _CONV2)
    assert {fact.outcome for fact in seen.imports} == {ImportOutcome.NOT_TRIED}
    assert set(bound(seen).values()) == {BoundTo.UNKNOWN}
    assert seen.cuda_available is None
    assert any("killed by SIGABRT at stage 'import torch'" in problem for problem in seen.problems)


def test_a_package_that_hangs_leaves_time_for_the_others(tmp_path: Path) -> None:
    env = _light(tmp_path, {"causal_conv1d.py": "import time\ntime.sleep(600)\n"})
    seen = seen_by(env, CONV, _CONV2, timeout=6.0)
    assert [fact.outcome for fact in seen.imports] == [ImportOutcome.HUNG, ImportOutcome.OK]


def test_a_modeling_file_that_hangs_is_named(tmp_path: Path) -> None:
    folder = _QWEN.replace(".", "/")
    files = {f"{folder}.py": "import time\ntime.sleep(600)\n"}
    files |= {f"{parent}/__init__.py": "" for parent in map(str, Path(folder).parents) if parent != "."}
    seen = seen_by(_light(tmp_path, files), _CONV2, timeout=2.0)
    assert [(fact.module, fact.outcome) for fact in seen.modules] == [(_QWEN, ImportOutcome.HUNG)]
    assert "could not be imported (hung)" in binding_of(seen, "conv").detail


def test_without_transformers_it_is_unknown_and_said(tmp_path: Path) -> None:
    seen = seen_by(_light(tmp_path, {}), _CONV2)
    assert bound(seen) == {"conv": BoundTo.UNKNOWN}
    assert "No module named 'transformers'" in binding_of(seen, "conv").detail
    assert seen.modules == ()


def test_remote_code_is_not_run(tmp_path: Path) -> None:
    """A config with `auto_map`: the model is not built, so no layer is counted."""
    env = _light(tmp_path, {"transformers/__init__.py": ""})
    declaration = Declaration(
        config=ModelConfig(
            source="t", model_type="x", architectures=(), parts=(), raw={"model_type": "x"}, remote_code=("x.py",)
        ),
        transformers=TransformersTree(root=env.site, version=Version("5.24.0"), origin="test"),
        fast_paths=(),
    )
    assert observe_bindings(str(env.python), declaration) == Bindings(cuda_available=False)
