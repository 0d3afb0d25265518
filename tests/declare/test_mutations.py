"""A changed source gives an unknown or another answer, never silently fewer fast paths; no config gives a traceback."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from declare.families import CASES
from kernelguard.declare import declare, find_tree, parse_config
from kernelguard.declare.values import Declaration, TransformersTree
from kernelguard.errors import KernelguardError
from observed import VERSIONS, transformers_base

pytestmark = pytest.mark.observed
_NEEDED = ("__init__.py", "configuration_utils.py", "integrations/hub_kernels.py", "utils/import_utils.py")


@cache
def tree(version: str) -> TransformersTree:
    return find_tree(transformers_base(version).site / "transformers")


def mutated(tmp_path: Path, version: str, folder: str, file: str, change: Callable[[str], str]) -> TransformersTree:
    """A copy of what one model needs, with one file changed."""
    source, target = tree(version).root, tmp_path / "transformers"
    for name in _NEEDED:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / name, target / name)
    for name in ("auto", folder):
        shutil.copytree(source / "models" / name, target / "models" / name)
    before = (target / file).read_text()
    after = change(before)
    assert after != before
    (target / file).write_text(after)
    return find_tree(target)


def read(where: TransformersTree, name: str = "qwen3_5") -> Declaration:
    case = next(case for case in CASES if case["name"] == name)
    return declare(parse_config(case["config"], source="config.json"), where)


QWEN = "models/qwen3_5/modeling_qwen3_5.py"
HUB = "integrations/hub_kernels.py"
DECORATOR = "use_kernel_func_from_hub_with_fallback"


@pytest.mark.parametrize(
    ("file", "old", "new", "says"),
    [
        # another symbol, package or place is another fast path, and one that nothing is known about
        (QWEN, '"chunk_gated_delta_rule", "fla"', '"chunk_gdn", "fla"', "fla.chunk_gdn"),
        (QWEN, '"chunk_gated_delta_rule", "fla"', '"chunk_gated_delta_rule", "flb"', "flb.chunk_gated_delta_rule"),
        # arguments in shapes that are not understood
        (QWEN, '"chunk_gated_delta_rule", "fla"', 'NAME, "fla"', DECORATOR),
        (QWEN, '"chunk_gated_delta_rule", "fla"', '*("chunk_gated_delta_rule", "fla")', DECORATOR),
        (QWEN, '"chunk_gated_delta_rule", "fla")', '"chunk_gated_delta_rule", "fla", version=2)', "version"),
        (QWEN, '"chunk_gated_delta_rule", "fla")', '"chunk_gated_delta_rule", "fla", None, 3)', "argument 4"),
        # the decorator without its arguments, or applied by hand
        (QWEN, f'@{DECORATOR}("chunk_gated_delta_rule", "fla")', f"@{DECORATOR}", DECORATOR),
        (QWEN, "\n__all__", f'\nother = {DECORATOR}("x", "fla")(None)\n__all__', DECORATOR),
        # the table of module paths is computed
        (HUB, "_KERNELS_INTERNAL_PATH_MAPPINGS = {", "_KERNELS_INTERNAL_PATH_MAPPINGS = dict() or {", "table"),
        # a kernel package is imported in a way of its own
        (QWEN, "\n__all__", "\nfrom fla.ops import something\n__all__", "imports fla"),
    ],
)
def test_a_changed_declaration_is_unknown(tmp_path: Path, file: str, old: str, new: str, says: str) -> None:
    where = mutated(tmp_path, "5.24.0", "qwen3_5", file, lambda text: text.replace(old, new))
    found = read(where)
    assert any(says in unknown for unknown in found.unknowns), found.unknowns


def test_a_decorator_under_another_name_is_seen_through(tmp_path: Path) -> None:
    def rename(text: str) -> str:
        head, imports, rest = text.partition("from ...integrations import")
        line, _, rest = rest.partition("\n")
        changed = line.replace(DECORATOR, f"{DECORATOR} as kernel") if DECORATOR in line else line
        body = rest.replace(f"    {DECORATOR},\n", f"    {DECORATOR} as kernel,\n", 1)
        return head + imports + changed + "\n" + body.replace(f"@{DECORATOR}(", "@kernel(")

    found = read(mutated(tmp_path, "5.24.0", "qwen3_5", QWEN, rename))
    assert {path.symbol for path in found.fast_paths} == {path.symbol for path in read(tree("5.24.0")).fast_paths}
    assert not found.unknowns


def test_a_decorator_that_is_not_known_is_unknown(tmp_path: Path) -> None:
    where = mutated(tmp_path, "5.24.0", "qwen3_5", QWEN, lambda text: text.replace(DECORATOR, "use_kernel_or_torch"))
    found = read(where)
    assert any("use_kernel_or_torch" in unknown for unknown in found.unknowns), found.unknowns


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('cu_seqlens=kwargs.pop("cu_seq_lens_q", None)', 'cu_seqlens=convert(kwargs.pop("cu_seq_lens_q", None))'),
        ('cu_seqlens=kwargs.pop("cu_seq_lens_q", None)', "cu_seqlens=find_boundaries(kwargs)"),
    ],
)
def test_boundaries_that_cannot_be_followed_are_unknown(tmp_path: Path, old: str, new: str) -> None:
    found = read(mutated(tmp_path, "5.24.0", "qwen3_5", QWEN, lambda text: text.replace(old, new)))
    chunk = next(path for path in found.fast_paths if path.symbol == "chunk_gated_delta_rule")
    assert [boundary.known for boundary in chunk.boundaries] == [False]


@pytest.mark.parametrize(
    ("old", "new", "signals"),
    [
        ('cu_seqlens=kwargs.pop("cu_seq_lens_q", None)', 'cu_seqlens=kwargs.get("bounds")', ("bounds",)),
        ('cu_seqlens=kwargs.pop("cu_seq_lens_q", None)', "cu_seqlens=None", ()),
        ('cu_seqlens=kwargs.pop("cu_seq_lens_q", None)', 'cu_seqlens=kwargs.get("cu_seq_lens_k")', ("cu_seq_lens_k",)),
        # dropped one hop above the layer
        ("                attention_mask=attention_mask,\n                **kwargs,\n            )\n        else:",
         "                attention_mask=attention_mask,\n            )\n        else:", ()),
    ],
)  # fmt: skip
def test_boundaries_that_are_dropped_or_renamed(tmp_path: Path, old: str, new: str, signals: tuple[str, ...]) -> None:
    found = read(mutated(tmp_path, "5.24.0", "qwen3_5", QWEN, lambda text: text.replace(old, new)))
    chunk = next(path for path in found.fast_paths if path.symbol == "chunk_gated_delta_rule")
    assert [(boundary.signals, boundary.known) for boundary in chunk.boundaries] == [(signals, True)]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('if self.block_type == "linear_attention":', "if use_linear(layer_idx):"),
        ("self.linear_attn = Qwen3_5GatedDeltaNet(config, layer_idx)", "self.linear_attn = LAYERS[pick()](config)"),
        ("for layer_idx in range(config.num_hidden_layers)", "for layer_idx in layers_of(config)"),
        ("self.linear_attn = Qwen3_5GatedDeltaNet(config, layer_idx)",
         "self.linear_attn = make(Qwen3_5GatedDeltaNet, config, layer_idx)"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_counted_are_unknown(tmp_path: Path, old: str, new: str) -> None:
    found = read(mutated(tmp_path, "5.24.0", "qwen3_5", QWEN, lambda text: text.replace(old, new)))
    assert found.unknowns or {path.layers for path in found.fast_paths} == {None}
    assert not any(path.layers for path in found.fast_paths)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('causal_conv1d = lazy_load_kernel("causal-conv1d")', "causal_conv1d = lazy_load_kernel(NAME)", "NAME"),
        ('getattr(causal_conv1d, "causal_conv1d_fn", None)', "pick(causal_conv1d)", "is_fast_path_available"),
        ("global causal_conv1d_update, causal_conv1d_fn", "pass", "not followed"),
        ("resolve_internal_import(", "find_symbol(", "resolve_internal_import|is_fast_path"),
    ],
)  # fmt: skip
def test_a_changed_lazy_load_is_unknown_or_still_complete(tmp_path: Path, old: str, new: str, says: str) -> None:
    file = "models/bamba/modeling_bamba.py"
    found = read(mutated(tmp_path, "5.5.4", "bamba", file, lambda text: text.replace(old, new)), "bamba")
    complete = {path.symbol for path in read(tree("5.5.4"), "bamba").fast_paths}
    assert {path.symbol for path in found.fast_paths} == complete or found.unknowns, says


def test_a_broken_file_is_unknown(tmp_path: Path) -> None:
    where = mutated(tmp_path, "5.24.0", "qwen3_5", QWEN, lambda text: text + "\ndef (\n")
    found = read(where)
    assert any("is not Python" in unknown for unknown in found.unknowns)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
_KEYS = sorted(
    {key for case in CASES for key in case["config"]} | {"full_attention_interval", "layer_types", "auto_map"}
)


def check_error(error: KernelguardError) -> None:
    assert "\n" not in error.message
    assert error.exit_code in {2, 3}


@st.composite
def configs(draw: Any) -> dict[str, Any]:
    """A configuration of a hybrid family in which a few settings were replaced by any JSON value."""
    case = draw(st.sampled_from(CASES))
    changed = draw(st.dictionaries(st.sampled_from(_KEYS) | st.text(max_size=6), _JSON, max_size=4))
    return {**case["config"], **changed}


@pytest.mark.parametrize("version", VERSIONS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=configs())
def test_any_config_gives_a_declaration_or_an_error_of_ours(version: str, raw: dict[str, Any]) -> None:
    try:
        found = declare(parse_config(raw, source="config.json"), tree(version))
    except KernelguardError as error:
        check_error(error)
        return
    for path in found.fast_paths:
        assert path.layers is None or path.layers >= 0


@given(raw=_JSON)
def test_any_json_is_a_config_or_an_error_of_ours(raw: Any) -> None:
    try:
        parse_config(raw, source="config.json")
    except KernelguardError as error:
        check_error(error)
