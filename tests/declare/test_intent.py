"""Intent: who said what, who wins, and what the training configurations of four frameworks say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from kernelguard.declare import resolve_intent
from kernelguard.declare.intent import SETTINGS
from kernelguard.declare.values import Intent, Phase
from kernelguard.errors import InputError


def write(path: Path, text: str | dict[str, Any]) -> Path:
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    return path


def test_nothing_said_is_all_assumed() -> None:
    intent = resolve_intent({})
    assert intent.assumed == SETTINGS
    assert intent.phase is Phase.TRAINING


def test_flags_win_over_the_file_and_the_file_over_the_training_configuration(tmp_path: Path) -> None:
    train = write(
        tmp_path / "args.json", {"output_dir": "x", "fp16": True, "torch_compile": True, "use_liger_kernel": True}
    )
    file = write(tmp_path / "intent.toml", 'dtype = "float32"\npacked = true\nsignals = ["seq_idx"]\n')
    intent = resolve_intent({"packed": False}, file, train)
    assert (intent.packed, intent.dtype, intent.compile, intent.liger) == (False, "float32", True, True)
    assert intent.signals == ("seq_idx",)
    assert set(intent.assumed) == {"attn_implementation", "experts_implementation", "use_kernels"}
    assert "command line" in intent.source
    assert "transformers Trainer" in intent.source


def test_every_problem_of_an_intent_file_is_named(tmp_path: Path) -> None:
    file = write(tmp_path / "intent.json", {"pakced": True, "phase": "trainig", "compile": 3, "signals": ["seq_id"]})
    with pytest.raises(InputError) as caught:
        resolve_intent({}, file)
    for text in ("did you mean packed?", "did you mean training?", "compile", "did you mean seq_idx?"):
        assert text in caught.value.message


def test_an_unknown_signal_flag() -> None:
    with pytest.raises(InputError, match=r"did you mean cu_seq_lens_q\?"):
        resolve_intent({"signals": ("cu_seq_len_q",)})


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("i.toml", "a = ", "is not TOML"),
        ("i.json", "{", "is not JSON"),
        ("i.yaml", "a: [", "is not YAML"),
        ("i.yaml", "- 1", "holds no table"),
        ("i.yaml", "2026-02-31", "is not YAML"),
        ("i.yaml", "1: 2", "holds no table"),
        ("i.toml", "", "is empty"),
        ("i.json", "[" * 99_999, "nested too deeply"),
        ("i.yaml", "[" * 9_999, "nested too deeply"),
    ],
)
def test_unusable_files(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        resolve_intent({}, write(tmp_path / name, text))
    with pytest.raises(InputError, match=says):
        resolve_intent({}, None, write(tmp_path / name, text))


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        resolve_intent({}, tmp_path / "no.toml")
    with pytest.raises(InputError, match="is a folder"):
        resolve_intent({}, None, tmp_path)


def test_an_unrecognizable_training_configuration(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no training configuration that is known"):
        resolve_intent({}, None, write(tmp_path / "x.yaml", "colour: blue\nsize: 3\n"))


def read(tmp_path: Path, document: dict[str, Any], **versions: str) -> Intent:
    path = write(tmp_path / "train.yaml", yaml.safe_dump(document))
    return resolve_intent({}, None, path, versions={k: Version(v) for k, v in versions.items()})


def test_trainer_arguments(tmp_path: Path) -> None:
    intent = read(tmp_path, {"output_dir": "o", "bf16": True, "use_cache": True, "max_steps": 3, "unknown_key": 1})
    assert (intent.dtype, intent.use_cache, intent.liger, intent.compile) == ("bfloat16", True, False, False)
    # Packing happens in the collator, which is code: nothing was said about it.
    assert "packed" in intent.assumed


@pytest.mark.parametrize("key", ["torch_compile_mode", "torch_compile_backend"])
def test_a_compile_backend_turns_compiling_on(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, {"output_dir": "o", "max_steps": 1, key: "inductor"}).compile


ALL = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@pytest.mark.parametrize(
    ("document", "versions", "packed", "signals"),
    [
        ({"packing": True}, {"trl": "1.16.0"}, True, ALL),
        ({"packing": True}, {"trl": "1.15.0"}, True, ("position_ids",)),
        ({"packing": True}, {}, True, None),
        ({"packing": True, "packing_strategy": "wrapped"}, {"trl": "1.16.0"}, True, ()),
        ({"packing": False, "padding_free": True}, {"trl": "1.16.0"}, True, ALL),
        ({"packing": False}, {"trl": "1.16.0"}, False, None),
    ],
)
def test_trl(
    tmp_path: Path, document: dict[str, Any], versions: dict[str, str], packed: bool, signals: tuple[str, ...] | None
) -> None:
    intent = read(tmp_path, {"output_dir": "o", **document}, **versions)
    assert (intent.packed, intent.signals) == (packed, signals)
    assert intent.dtype == "bfloat16"  # SFTConfig's own default


def test_trl_model_arguments(tmp_path: Path) -> None:
    kwargs = {"attn_implementation": "flash_attention_2", "dtype": "float16", "use_kernels": True}
    intent = read(tmp_path, {"packing": False, "model_init_kwargs": kwargs})
    assert (intent.attn_implementation, intent.dtype, intent.use_kernels) == ("flash_attention_2", "float16", True)


def test_axolotl(tmp_path: Path) -> None:
    document = {
        "base_model": "org/model",
        "sample_packing": True,
        "flash_attention": True,
        "bf16": "auto",
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_rms_norm": True,
        "torch_compile": "auto",
    }
    intent = read(tmp_path, document)
    assert (intent.packed, intent.attn_implementation, intent.dtype) == (True, "flash_attention_2", "bfloat16")
    assert (intent.liger, intent.compile) == (True, True)
    # axolotl patches the model classes, so what reaches a kernel cannot be read out of its configuration.
    assert intent.signals is None
    assert "signals" in intent.assumed


def test_the_bundled_trainer(tmp_path: Path) -> None:
    document = '[model]\nattention = "sdpa"\nliger = "off"\n[data]\npath = "x"\n[batch]\nmode = "packed"\n'
    intent = resolve_intent({}, None, write(tmp_path / "t.toml", document))
    assert (intent.packed, intent.attn_implementation, intent.liger) == (True, "sdpa", False)
    assert intent.signals == ALL
