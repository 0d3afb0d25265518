"""All model types of a release: the ones that are easy to get wrong, drift between two releases, and known changes."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from packaging.version import Version

from kernelguard import data
from kernelguard.declare import find_tree
from kernelguard.declare.index import Index
from kernelguard.declare.source import Source
from kernelguard.declare.survey import SurveyRow, drift, survey, survey_document, survey_table
from kernelguard.declare.values import TransformersTree
from observed import VERSIONS, transformers_base

pytestmark = pytest.mark.observed
NEWEST = VERSIONS[-1]
CHANGES: dict[str, Any] = tomllib.loads((data.matrices() / "transformers.toml").read_text("utf-8"))
GDN = ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule")


@cache
def tree(version: str) -> TransformersTree:
    return find_tree(transformers_base(version).site / "transformers")


@cache
def rows(version: str) -> dict[str, SurveyRow]:
    return {row.model_type: row for row in survey(tree(version))}


def test_every_type_has_a_row() -> None:
    found = rows(NEWEST)
    assert set(found) == set(Index(Source(tree(NEWEST))).types())
    assert list(found) == sorted(found)
    # 822 configuration classes name a type; gpt-sw3 is a second name for gpt2's.
    assert len(found) == 823
    assert not {name: row.unknowns for name, row in found.items() if row.unknowns}


def test_the_table_of_facts() -> None:
    """The automatic group of 5.24.0 as it was found by hand, inkling's two towers taken out."""
    found = rows(NEWEST)
    automatic = {name for name, row in found.items() if row.requirement == "automatic"}
    assert automatic == {
        "bailing_hybrid",
        "glm5_next",
        "glm5_next_text",
        "kimi_linear",
        "bamba",
        "falcon_h1",
        "mamba2",
        "zamba2",
        "falcon_mamba",
        "mamba",
        "granitemoehybrid",
        "nemo_speechlm",
        "nemotron_h",
        "nemotron_h_omni",
        "inkling2",
        "inkling2_loop",
        "inkling2_loop_text",
        "inkling2_text",
        "inkling_mm_model",
        "inkling_text",
        "lfm2_moe",
        "jamba",
        "jev",
        "minicpm_ocr",
        "minicpmv4_6",
        "minicpmv4_7",
        "qwen3_5",
        "qwen3_5_text",
        "lara_mini",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
        "lfm2",
        "lfm2_vl",
        "lfm3",
        "lfm3_vl",
        "mra",
        "olmo_hybrid",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "rwkv",
        "sam3_video",
        "xlstm",
        "yoso",
        "zamba",
    }
    assert {name for name, row in found.items() if row.requirement == "hard"} == {"dinat", "layoutlmv2"}
    for name in ("qwen3_5", "qwen3_next", "olmo_hybrid", "qwen3_5_moe_text"):
        assert found[name].symbols == GDN
        assert found[name].training_symbols == ("causal_conv1d_fn", "chunk_gated_delta_rule")
    assert sum(bool(row.dynamic_sub_configs) for row in found.values()) == 158


@pytest.mark.parametrize("name", ["inkling_vision", "inkling_audio"])
def test_a_tower_does_not_get_the_text_models_kernels(name: str) -> None:
    row = rows(NEWEST)[name]
    assert (row.symbols, row.packages, row.experts) == ((), (), "")


def test_easy_to_miss() -> None:
    found = rows(NEWEST)
    # The base of a class that is defined inside an `if`.
    assert found["xlstm"].symbols == ("RMSNorm", "mLSTMBlock", "soft_cap")
    # Layers that a dictionary picks by name.
    for name in ("zamba2", "nemotron_h"):
        assert "mamba_chunk_scan_combined" in found[name].training_symbols
        assert not found[name].without_layers
    # Text models that AutoConfig picks: the default is read, and said to be one.
    assert found["minicpmv4_6"].symbols == GDN
    assert found["minicpmv4_6"].dynamic_sub_configs == ("text_config=qwen3_5_text",)
    assert "text_config=nemotron_h" in found["nemo_speechlm"].dynamic_sub_configs
    assert "mamba_chunk_scan_combined" in found["nemo_speechlm"].symbols
    # A decorator in a comment is none; its experts class has none at all.
    assert found["llama4_text"].opt_in_layers == ()
    assert found["llama4_text"].experts == "eager"
    assert found["mixtral"].experts == "grouped_mm"
    assert found["llama"].experts == ""
    assert (found["llama"].attention, found["gpt_oss"].attention, found["mamba2"].attention) == ("sdpa", "eager", "")
    assert found["llama"].opt_in_layers == ("RMSNorm", "rotary_pos_emb")
    assert len(found["minimax"].always_slow) == 1
    assert found["rwkv"].symbols == found["rwkv"].training_symbols


def test_the_document_and_the_table_hold_every_row() -> None:
    found = tuple(rows(NEWEST).values())
    document = json.loads(json.dumps(survey_document(tree(NEWEST), found)))
    assert document["transformers"] == NEWEST
    back = [
        SurveyRow(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()})
        for row in document["model_types"]
    ]
    assert tuple(back) == found
    table = survey_table(found)
    assert sorted(name for line in table for name in line[0].split(", ")) == sorted(row.model_type for row in found)
    assert [line[1] for line in table] == sorted(
        (line[1] for line in table), key=["hard", "automatic", "opt-in", "none"].index
    )


def test_one_process_says_the_same() -> None:
    few = tuple(rows(NEWEST)[name] for name in ("mamba2", "qwen3_5"))
    from kernelguard.declare.survey import _rows

    assert tuple(_rows(tree(NEWEST), ["mamba2", "qwen3_5"])) == few


@pytest.mark.thorough
def test_drift_between_two_releases() -> None:
    """What 5.24.0 changed since 5.17.0, one line each; the lines for a few types are pinned."""
    lines = drift(rows("5.17.0").values(), rows(NEWEST).values())
    assert len(lines) == len({line.partition(":")[0] for line in lines})
    by_name = {line.partition(":")[0]: line for line in lines}
    assert by_name["lfm3"].startswith("lfm3: new; automatic, causal-conv1d (causal_conv1d_fn")
    assert drift(rows(NEWEST).values(), rows(NEWEST).values()) == ()
    back = drift(rows(NEWEST).values(), rows("5.17.0").values())
    assert {line.partition(":")[0] for line in back} == set(by_name)
    assert "lfm3: gone; it was automatic, causal-conv1d" in "\n".join(back)


def test_drift_names_each_difference() -> None:
    row = rows(NEWEST)["qwen3_5"]
    old = replace(row, symbols=("gone_kernel", *row.symbols[1:]), experts="eager")
    assert drift([old], [row]) == ("qwen3_5: symbols +causal_conv1d_fn -gone_kernel; experts eager -> none",)


# ---------------------------------------------------------------- what changed when


def test_changes_stand_at_releases_that_were_read() -> None:
    read = CHANGES["read"].split()
    assert read == sorted(read, key=Version)
    for change in CHANGES["change"]:
        assert change["since"] in read
        assert change.get("until", read[-1]) in read
        assert Version(change["since"]) < Version(change.get("until", "99"))
