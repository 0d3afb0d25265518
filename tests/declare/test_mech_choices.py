"""What is read about choices made after the import equals what real transformers releases choose."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from kernelguard.declare import Reader, declare, find_tree, parse_config
from kernelguard.declare.choices.hub_layers import hub_mapping
from kernelguard.declare.modes import (
    AlwaysSlow,
    Attention,
    CacheSplit,
    Experts,
    HubLayers,
    HubLoad,
    LigerSupport,
    Mxfp4,
)
from kernelguard.declare.reading import kernels_window
from kernelguard.declare.source import Source
from kernelguard.declare.values import Declaration, Intent, Phase, TransformersTree
from kernelguard.judge.modes import judge_modes
from kernelguard.judge.values import Status
from kernelguard.observe.values import Environment
from observed import VERSIONS, environment, transformers_base

pytestmark = pytest.mark.observed
ORACLE = Path(__file__).with_name("choices_oracle.py")
BUILT = ("5.5.4", "5.24.0")
FAKE_KERNELS = """
import enum
class Mode(enum.Flag):
    FALLBACK = 1; TRAINING = 2; INFERENCE = 4; TORCH_COMPILE = 8
    def name_has(self, word): return bool(self & (getattr(Mode, word) | Mode.FALLBACK))
class _Given:
    def __init__(self, *args, **given): self.__dict__.update(given)
class LayerRepository(_Given): pass
class FuncRepository(_Given): pass
class LocalLayerRepository(_Given): pass
class CUDAProperties(_Given): pass
class ROCMProperties(_Given): pass
class Device:
    def __init__(self, type, properties=None): self.type, self.properties = type, properties
    def described(self):
        return self.type, self.properties.min_capability, self.properties.max_capability
KernelizeFallback = enum.Enum("KernelizeFallback", "ALL")
def _decorator(*args, **given): return lambda target: target
use_kernel_forward_from_hub = use_kernelized_func = use_kernel_func_from_hub = _decorator
def register_kernel_mapping(*args, **given): pass
def _never(*args, **given): raise FileNotFoundError("no hub here")
get_kernel = kernelize = replace_kernel_forward_from_hub = use_kernel_mapping = _never
"""
KERNELS = {"5.5.4": "0.12.0", "5.24.0": "0.18.2"}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
CASES: list[dict[str, Any]] = [
    {"name": "llama", "config": {"model_type": "llama", **SMALL}, "class": "LlamaForCausalLM"},
    {"name": "gpt_oss", "config": {"model_type": "gpt_oss", **SMALL, "head_dim": 16}, "class": "GptOssForCausalLM"},
    {
        "name": "gpt_oss-sdpa",
        "config": {"model_type": "gpt_oss", **SMALL, "head_dim": 16},
        "class": "GptOssForCausalLM",
        "request": {"attn_implementation": "sdpa"},
    },
    {"name": "mixtral", "config": {"model_type": "mixtral", **SMALL}, "class": "MixtralForCausalLM"},
    {
        "name": "mixtral-flash",
        "config": {"model_type": "mixtral", **SMALL},
        "class": "MixtralForCausalLM",
        "request": {"attn_implementation": "flash_attention_2"},
    },
    {"name": "mamba2", "config": {"model_type": "mamba2", "num_hidden_layers": 2}, "class": "Mamba2ForCausalLM"},
    {
        "name": "mamba2-sdpa",
        "config": {"model_type": "mamba2", "num_hidden_layers": 2},
        "class": "Mamba2ForCausalLM",
        "request": {"attn_implementation": "sdpa"},
    },
    {
        "name": "switch",
        "config": {"model_type": "switch_transformers", "num_layers": 2, "d_model": 64},
        "class": "SwitchTransformersForConditionalGeneration",
    },
    {"name": "jetmoe", "config": {"model_type": "jetmoe", **SMALL, "kv_channels": 16}, "class": "JetMoeForCausalLM"},
    {
        "name": "bloom",
        "config": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "class": "BloomForCausalLM",
    },
    {
        "name": "llava-flash",
        "config": {
            "model_type": "llava",
            "text_config": {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4},
            "vision_config": {"model_type": "clip_vision_model", "num_hidden_layers": 1},
        },
        "class": "LlavaForConditionalGeneration",
        "request": {"attn_implementation": "sdpa"},
    },
]


@cache
def tree(version: str) -> TransformersTree:
    return find_tree(transformers_base(version).site / "transformers")


@cache
def read(version: str, name: str) -> Declaration:
    case = next(case for case in CASES if case["name"] == name)
    config = {**case["config"], "architectures": [case["class"]]}
    return declare(parse_config(config, source=name), tree(version))


@cache
def sampled_flags(version: str) -> dict[str, list[bool | None]]:
    """By model class: what is read for every twelfth model type (to import all of them takes minutes)."""
    reader = Reader(tree(version))
    found: dict[str, list[bool | None]] = {}
    for model_type in reader.model_types()[::12]:
        facts = reader.declare(parse_config({"model_type": model_type}, source=model_type)).modes
        for fact in facts:
            if isinstance(fact, Attention) and not fact.path:
                found[fact.model_class] = [fact.sdpa, fact.flash, fact.flex]
    return found


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Builds every case once in each of a few releases."""

    @cache
    def run(version: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp(version)
        metadata = f"kernels-{KERNELS[version]}.dist-info/METADATA"
        files = {
            "kernels/__init__.py": FAKE_KERNELS,
            metadata: f"Metadata-Version: 2.1\nName: kernels\nVersion: {KERNELS[version]}\n",
        }
        env = environment(folder / "env", version, files)
        (folder / "spec.json").write_text(
            json.dumps({"cases": CASES, "classes": list(sampled_flags(version)) if version == BUILT[-1] else []})
        )
        done = subprocess.run(
            [str(env.python), str(ORACLE), str(folder / "spec.json"), str(folder / "out.json")],
            capture_output=True,
            text=True,
            check=False,
            env={
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "PATH": "/usr/bin:/bin",
            },
        )
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads((folder / "out.json").read_text())
        return result

    return run


NOWHERE = Environment(origin="test", live=False, distributions={})


def codes(version: str, name: str) -> set[str]:
    case = next(case for case in CASES if case["name"] == name)
    intent = Intent(**case.get("request", {}))
    return {finding.code for finding in judge_modes(read(version, name), intent, NOWHERE)}


@pytest.mark.thorough
@pytest.mark.parametrize("version", BUILT)
def test_the_hub_mapping_is_the_real_one(version: str, oracle: Any) -> None:
    unknowns: list[str] = []
    found = hub_mapping(Source(tree(version)), unknowns)
    real = oracle(version)["mapping"]
    assert not unknowns

    def capability(value: int | None) -> tuple[int, int] | None:
        return None if value is None or value > 10_000 else divmod(value, 10)

    # rotary_pos_emb of 5.5 stands under a test on what `kernels` offers, which the fake one does.
    assert {
        layer: sorted(
            (o.device, o.training, o.repository, str(o.minimum_capability), str(o.maximum_capability)) for o in options
        )
        for layer, options in found.items()
    } == {
        layer: sorted((d, t, r, str(capability(low)), str(capability(high))) for d, low, high, t, r in rows)
        for layer, rows in real.items()
    }


@pytest.mark.parametrize("version", BUILT)
@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_what_is_judged_is_what_is_built(version: str, name: str, oracle: Any) -> None:
    really = oracle(version)["models"][name]
    assert "error" not in really, really
    found = codes(version, name)
    if "raised" in really:
        assert found & {"attention-unsupported", "attention-from-hub", "attention-not-installed"}, really
        return
    assert not found & {"attention-unsupported", "attention-not-installed"}
    asked = next(case for case in CASES if case["name"] == name).get("request")
    has_attention = any(fact.own for fact in read(version, name).modes if isinstance(fact, Attention))
    eager = any(part["attention"] == "eager" for part in really["parts"].values())
    if not asked:
        assert ("attention-eager" in found) == (eager and has_attention)
    experts = [fact for fact in read(version, name).modes if isinstance(fact, Experts)]
    if experts:
        assert {part["experts"] for part in really["parts"].values()} == (
            {"grouped_mm"} if experts[0].selectable else {"eager"}
        )
    assert ("experts-eager" in found) == bool(experts and not experts[0].selectable)


def test_the_flags_are_those_of_the_imported_classes(oracle: Any) -> None:
    version = BUILT[-1]
    really = oracle(version)["flags"]
    assert len(really) >= 30
    assert {name: flags for name, flags in sampled_flags(version).items() if name in really} == really
    assert {tuple(flags) for flags in really.values()} >= {(True, True, True), (False, False, False)}


def test_the_cases_hold_both_answers(oracle: Any) -> None:
    """Something raises, something is eager and something is neither in the newest release."""
    models = oracle("5.24.0")["models"]
    assert {name for name, result in models.items() if "raised" in result} >= {
        "gpt_oss-sdpa",
        "mixtral-flash",
        "mamba2-sdpa",
    }
    assert codes("5.24.0", "gpt_oss") == {"attention-eager"}
    assert codes("5.24.0", "llama") == codes("5.24.0", "mixtral") == codes("5.24.0", "mamba2") == set()


def modes(version: str, **config: Any) -> Declaration:
    return declare(parse_config(config, source="test"), tree(version))


@pytest.mark.parametrize("version", VERSIONS)
def test_the_window_of_kernels(version: str) -> None:
    window = kernels_window(Source(tree(version)))
    expected = {
        "4.57.6": (None, None),
        "5.5.4": ("0.10.2", None),
        "5.16.1": ("0.16.0", "0.17.0"),
        "5.17.0": ("0.16.0", "0.17.0"),
        "5.24.0": ("0.18.2", "0.19.0"),
    }[version]
    assert (window.minimum, window.maximum) == tuple(Version(v) if v else None for v in expected)


@pytest.mark.parametrize(
    ("text", "layers", "problem"),
    [
        ("_KERNEL_MAPPING = {'A': {'cuda': Repo(repo_id='o/a')}}", ["A"], ""),
        (
            "X = {'B': {'cuda': Repo('o/b')}}\n_KERNEL_MAPPING = {'A': {}}\n_KERNEL_MAPPING = _KERNEL_MAPPING | X",
            ["A", "B"],
            "",
        ),
        ("_KERNEL_MAPPING = {'A': {}}\n_KERNEL_MAPPING['B'] = {'cuda': Repo('o/b')}", ["A", "B"], ""),
        ("_KERNEL_MAPPING = {'A': {}}\n_KERNEL_MAPPING.update(more())", ["A"], "changed in a way"),
        ("_KERNEL_MAPPING = {'A': {}} | more()", ["A"], "made in a way"),
        ("_KERNEL_MAPPING = build()", [], "made in a way"),
        ("_KERNEL_MAPPING = {'A': {Device(type='cuda', memory=80): Repo('o/a')}}", ["A"], "entry of A"),
        ("_KERNEL_MAPPING = {'A': {'cuda': {mode(): Repo('o/a')}}}", ["A"], "entry of A"),
        ("_KERNEL_MAPPING = {'A': {'cuda': {Mode.TRAINING: Repo(name)}}}", ["A"], "entry of A"),
        ("_OTHER = {}", [], "shape that is not understood"),
    ],
)
def test_a_mapping_of_another_shape_is_unknown_not_empty(
    tmp_path: Path, text: str, layers: list[str], problem: str
) -> None:
    (tmp_path / "integrations").mkdir()
    (tmp_path / "integrations/hub_kernels.py").write_text(
        f"def build_mapping():\n    {text.replace(chr(10), chr(10) + '    ')}\n"
    )
    unknowns: list[str] = []
    found = hub_mapping(Source(TransformersTree(root=tmp_path, version=Version("5.99"), origin="path")), unknowns)
    assert sorted(found) == layers
    assert bool(unknowns) == bool(problem)
    assert all(problem in unknown or "shape" in unknown for unknown in unknowns)


def test_layers_of_a_gated_delta_net() -> None:
    hub = next(f for f in modes("5.24.0", model_type="qwen3_5_text").modes if isinstance(f, HubLayers))
    by_name = {layer.layer: layer for layer in hub.layers}
    assert hub.obeys_switch
    assert not by_name["RMSNormZeroCentered"].mapped
    assert {o.minimum_capability for o in by_name["Qwen3_5GatedDeltaNet"].options if o.device == "cuda"} == {(12, 1)}
    assert any(o.training for o in by_name["RMSNormGated"].options)
    assert by_name["chunk_gated_delta_rule"].package == "fla"


def test_a_layer_in_a_comment_is_none() -> None:
    """llama4 has a commented-out decorator with the name Llama4TextMoe."""
    assert "Llama4TextMoe" in (tree("5.24.0").root / "models/llama4/modeling_llama4.py").read_text()
    assert not [f for f in modes("5.24.0", model_type="llama4_text").modes if isinstance(f, HubLayers)]


@pytest.mark.parametrize("version", VERSIONS[1:])
@pytest.mark.parametrize(
    ("model_type", "repository", "level", "ninja", "in_training"),
    [
        ("rwkv", "kernels-community/rwkv", "info", True, True),
        ("yoso", "kernels-community/yoso", "warning", True, True),
        ("mra", "kernels-community/mra", "warning", True, True),
        ("sam3_video", "kernels-community/cv-utils", "warning_once", False, False),
    ],
)
def test_hub_loads(
    version: str, model_type: str, repository: str, level: str, *, ninja: bool, in_training: bool
) -> None:
    loads = [f for f in modes(version, model_type=model_type).modes if isinstance(f, HubLoad)]
    assert [(f.repository, f.level, f.needs_ninja, f.in_training) for f in loads] == [
        (repository, level, ninja, in_training)
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_fused_kernel_behind_no_cache(version: str) -> None:
    splits = {
        (f.symbol, f.owner)
        for t in ("mamba2", "bamba", "zamba2")
        for f in modes(version, model_type=t).modes
        if isinstance(f, CacheSplit)
    }
    assert splits == {
        ("mamba_split_conv1d_scan_combined", owner) for owner in ("Mamba2Mixer", "BambaMixer", "Zamba2MambaMixer")
    }
    assert not [f for f in modes(version, model_type="qwen3_next").modes if isinstance(f, CacheSplit)]


def test_mxfp4_and_liger_and_always_slow() -> None:
    quantized = modes("5.24.0", model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    facts = [f for f in quantized.modes if isinstance(f, Mxfp4)]
    assert [(f.minimum_capability, f.minimum_triton, f.dequantize) for f in facts] == [
        ((7, 5), Version("3.4.0"), False)
    ]
    assert not [f for f in modes("5.24.0", model_type="gpt_oss").modes if isinstance(f, Mxfp4)]
    # A composite that is loaded for its text model alone holds the text type.
    for architecture, expected in (
        ("Qwen3_5ForCausalLM", "qwen3_5_text"),
        ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
    ):
        found = modes("5.24.0", model_type="qwen3_5", architectures=[architecture])
        assert [f.model_type for f in found.modes if isinstance(f, LigerSupport)] == [expected]
    slow = [f for f in modes("5.24.0", model_type="minimax").modes if isinstance(f, AlwaysSlow)]
    assert len(slow) == 1
    assert not [f for f in modes("5.24.0", model_type="minimax_m2").modes if isinstance(f, AlwaysSlow)]


@pytest.mark.parametrize("version", VERSIONS)
def test_mxfp4_needs_are_read_in_every_release(version: str) -> None:
    quantized = modes(version, model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert [f.minimum_triton for f in quantized.modes if isinstance(f, Mxfp4)] == [Version("3.4.0")]


@pytest.mark.parametrize("version", ["4.57.6", "5.24.0"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "qwen2_5_vl", "mixtral", "bert", "vit", "whisper", "gemma3"])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_plain_run_of_a_plain_model_raises_no_alarm(version: str, model_type: str, phase: Phase) -> None:
    declaration = modes(version, model_type=model_type)
    unknown_machine = Environment(origin="target", live=False)
    for machine in (NOWHERE, unknown_machine):
        found = judge_modes(declaration, Intent(phase=phase), machine)
        assert [f for f in found if f.status is not Status.PASS] == []
