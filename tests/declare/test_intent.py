"""Intent: who said what, who wins, what training configurations really determine, and every unusable file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from packaging.version import Version

from kernelguard import data
from kernelguard.declare import resolve_intent
from kernelguard.declare.intent import SETTINGS, SIGNALS, read_intent_file
from kernelguard.declare.training_configs import read_training_config
from kernelguard.declare.training_configs.files import MAX_BYTES
from kernelguard.declare.values import Intent, Phase
from kernelguard.errors import InputError

SAMPLES = Path(__file__).parent.parent / "data" / "intent"
ROOT = Path(__file__).parents[2]


def write(path: Path, content: str | bytes | dict[str, Any]) -> Path:
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def read(folder: Path, document: dict[str, Any], **versions: str) -> Intent:
    path = write(folder / "train.yaml", yaml.safe_dump(document))
    return resolve_intent({}, None, path, versions={name: Version(text) for name, text in versions.items()})


def refused(flags: dict[str, Any], intent: Path | None = None, train: Path | None = None) -> str:
    with pytest.raises(InputError) as caught:
        resolve_intent(flags, intent, train)
    assert caught.value.hint
    return caught.value.message


def test_nothing_said_is_all_assumed() -> None:
    intent = resolve_intent({}, None, None)
    assert intent.assumed == tuple(name for name in SETTINGS if name != "signals")
    assert (intent.phase, intent.dtype, intent.packed) == (Phase.TRAINING, "bfloat16", False)
    assert intent.source == "nothing was said"


def test_the_lists_of_signals_agree() -> None:
    schema = json.loads(data.schema("intent").read_text("utf-8"))
    assert set(SIGNALS) == set(schema["properties"]["signals"]["items"]["enum"])
    assert set(schema["properties"]) == {*SETTINGS, "schema"}


def test_flags() -> None:
    intent = resolve_intent({"phase": "decoding", "packed": True, "signals": ("seq_idx", "seq_idx"), "dtype": None})
    assert (intent.phase, intent.packed, intent.signals) == (Phase.DECODING, True, ("seq_idx",))
    assert {"dtype", "compile"} <= set(intent.assumed)
    assert not {"phase", "packed", "signals"} & set(intent.assumed)
    assert intent.source == "command line"


def test_packed_without_signals_assumes_them() -> None:
    assert "signals" in resolve_intent({"packed": True}).assumed
    assert "signals" not in resolve_intent({"packed": False}).assumed


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"signals": ("cu_seqlens_q",)}, "did you mean 'cu_seq_lens_q'?"),
        ({"signals": ("seq_id", "positions_ids")}, "did you mean 'position_ids'?"),
        ({"signals": "seq_idx"}, "not a list"),
        ({"phase": "decode"}, "training, decoding"),
        ({"packed": "yes"}, "not true or false"),
        ({"pakced": True}, "did you mean 'packed'?"),
        ({"packed": False, "signals": ("seq_idx",)}, "packed = false"),
    ],
)
def test_unusable_flags(flags: dict[str, Any], says: str) -> None:
    assert says in refused(flags)


def test_signals_say_packed_and_it_is_shown_as_assumed() -> None:
    intent = resolve_intent({"signals": ("seq_idx",)})
    assert intent.packed
    assert "packed" in intent.assumed
    empty = resolve_intent({"signals": ()})
    assert (empty.packed, empty.signals) == (False, ())


@pytest.mark.parametrize("name", ["intent.toml", "intent.json"])
def test_an_intent_file_says_everything(tmp_path: Path, name: str) -> None:
    said: dict[str, Any] = {
        "schema": 1, "phase": "decoding", "dtype": "float16", "packed": True, "signals": ["seq_idx", "position_ids"],
        "attn_implementation": "flash_attention_2", "experts_implementation": "grouped_mm", "use_kernels": True,
        "liger": True, "compile": True, "use_cache": True, "grouped_heads": True, "own_convolution": True,
        "trust_remote_code": True,
    }  # fmt: skip
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in said.items())
    intent = resolve_intent({}, write(tmp_path / name, said if name.endswith("json") else toml))
    assert intent.assumed == ()
    assert intent.signals == ("seq_idx", "position_ids")
    for key in set(said) - {"schema", "signals"}:
        assert getattr(intent, key) == said[key]
    assert name in intent.source


def test_a_file_without_a_telling_name_is_read_by_its_look(tmp_path: Path) -> None:
    assert read_intent_file(write(tmp_path / "a", '{"liger": true}')) == {"liger": True}
    assert read_intent_file(write(tmp_path / "b.conf", "liger = true")) == {"liger": True}


def test_flags_win_over_a_file_and_a_file_over_what_is_assumed(tmp_path: Path) -> None:
    file = write(tmp_path / "intent.toml", 'phase = "decoding"\npacked = true\ncompile = true\n')
    intent = resolve_intent({"phase": "training", "signals": ("seq_idx",)}, file)
    assert (intent.phase, intent.packed, intent.signals, intent.compile) == (Phase.TRAINING, True, ("seq_idx",), True)
    assert intent.source.index("command line") < intent.source.index("intent.toml")


def test_flags_win_over_a_training_configuration() -> None:
    flags = {"packed": True, "signals": ("cu_seq_lens_q",), "phase": "decoding"}
    intent = resolve_intent(flags, None, SAMPLES / "trl-sft.yaml")
    assert (intent.signals, intent.phase) == (("cu_seq_lens_q",), Phase.DECODING)
    assert intent.attn_implementation == "kernels-community/flash-attn3"


def test_no_packed_over_a_file_that_describes_packing_drops_its_signals(tmp_path: Path) -> None:
    file = write(tmp_path / "intent.toml", 'packed = true\nsignals = ["seq_idx"]\n')
    intent = resolve_intent({"packed": False}, file)
    assert (intent.packed, intent.signals) == (False, None)


def test_signals_against_a_file_that_says_not_packed(tmp_path: Path) -> None:
    said = refused({"signals": ("seq_idx",)}, write(tmp_path / "i.toml", "packed = false\n"))
    assert "command line" in said
    assert "i.toml says packed = false" in said
    assert "itself" in refused({}, write(tmp_path / "j.toml", 'packed = false\nsignals = ["seq_idx"]\n'))


def test_an_intent_file_and_a_training_configuration_together(tmp_path: Path) -> None:
    said = refused({}, write(tmp_path / "i.toml", "packed = true\n"), SAMPLES / "trl-sft.yaml")
    assert "--intent" in said
    assert "--train-config" in said


def test_every_problem_of_an_intent_file_is_named(tmp_path: Path) -> None:
    content = {"pakced": True, "use_kernel": 1, "phase": "trainig", "compile": 3, "signals": ["cu_seqlens", "seq_idx"]}
    said = refused({}, write(tmp_path / "intent.json", {**content, "attn_implementation": "", "dtype": None}))
    for text in (
        "'pakced' (did you mean 'packed'?)", "'use_kernel' (did you mean 'use_kernels'?)", "compile", "signals.0",
        "did you mean 'training'?", "did you mean 'cu_seq_lens_q'?", "attn_implementation", "dtype", "intent.json",
    ):  # fmt: skip
        assert text in said


def test_a_newer_schema_names_the_supported_one(tmp_path: Path) -> None:
    assert "up to schema 1" in refused({}, write(tmp_path / "i.json", {"schema": 2, "new": 1}))
    assert "schema" in refused({}, write(tmp_path / "i.json", {"schema": True}))


def test_a_training_configuration_given_as_intent_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_intent_file(write(tmp_path / "i.json", (SAMPLES / "trl-sft.json").read_text()))
    assert "--train-config" in (caught.value.hint or "")


UNUSABLE = [
    ("x.json", "{", "is not JSON"),
    ("x.json", "[1, 2]", "a list"),
    ("x.json", '"text"', "'text'"),
    ("x.json", "null", "null"),
    ("x.json", '{"packed": true, "packed": false}', "twice"),
    ("x.json", '{"a": ' + "1" * 5000 + "}", "is not JSON"),
    ("x.json", "[" * 100_000, "nested too deeply"),
    ("x.toml", "a = ", "is not TOML"),
    ("x.toml", "a = " + "[" * 5000, "nested too deeply|is not TOML"),
    ("x.json", "", "is empty"),
    ("x.toml", " \n", "is empty"),
    ("x.json", b"\xff\xfe{\x00", "binary"),
    ("x.bin", b"PK\x03\x04\x00\x00training_args", "binary"),
    ("x.json", b'{"a": "\x00"}', "binary"),
    ("x.json", b" " * (11 * 1024 * 1024), "too large"),
]
UNUSABLE_YAML = [
    ("x.yaml", "a: [", "is not YAML"),
    ("x.yaml", "- 1", "a list"),
    ("x.yaml", "when: 2026-02-31", "is not YAML"),
    ("x.yml", "a: !!bool x", "is not YAML"),
    ("x.yml", "a: !!int ''", "is not YAML"),
    ("x.yml", "a: !!timestamp x", "is not YAML"),
    ("x.yml", "a: !!python/object:os.system x", "is not YAML"),
    ("x.yaml", "1: 2", "the key 1"),
    ("x.yaml", "[" * 5_000, "nested too deeply|is not YAML"),
    ("x", "just words", "'just words'"),
]


@pytest.mark.parametrize(("name", "content", "says"), UNUSABLE)
def test_unusable_intent_files(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    said = refused({}, write(tmp_path / name, content))
    assert any(option in said for option in says.split("|"))
    assert name in said
    assert "an intent file" in said


@pytest.mark.parametrize(("name", "content", "says"), UNUSABLE + UNUSABLE_YAML)
def test_unusable_training_configurations(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    said = refused({}, None, write(tmp_path / name, content))
    assert any(option in said for option in says.split("|"))
    assert name in said
    assert "a training configuration" in said


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "does not exist" in refused({}, tmp_path / "no.toml")
    assert "a folder" in refused({}, None, tmp_path)
    assert "does not exist" in refused({}, tmp_path / "a\0b")
    assert "cannot be read" in refused({}, tmp_path / ("n" * 300))
    assert "no regular file" in refused({}, Path(os.devnull))
    assert "JSON or TOML" in refused({}, write(tmp_path / "i.yaml", "packed: true"))
    loop = tmp_path / "loop.toml"
    loop.symlink_to(loop)
    assert "loop.toml" in refused({}, loop)
    assert "too large" in refused({}, write(tmp_path / "big.json", '{"a": "' + "x" * MAX_BYTES + '"}'))


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"colour": "blue", "size": 3}, "colour, size"),
        ({}, "empty"),
        ({"model_type": "qwen3_5", "architectures": ["X"], "use_cache": True}, "config.json"),
        ({"stage": "sft", "finetuning_type": "lora", "packing": True, "output_dir": "o"}, "LLaMA-Factory"),
        ({"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"}, "accelerate"),
        ({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}}, "DeepSpeed"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": False}}, "neither"),
        ({"packed": True, "signals": ["seq_idx"]}, "packed, signals"),
    ],
)
def test_what_is_no_training_configuration(tmp_path: Path, document: dict[str, Any], says: str) -> None:
    said = refused({}, None, write(tmp_path / "x.json", document))
    assert says in said


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        (
            "trainer.yaml",
            "Trainer arguments",
            {
                "phase": "training", "dtype": "bfloat16", "attn_implementation": "flash_attention_2", "compile": True,
                "liger": True, "use_cache": False,
            },
        ),
        (
            "trainer.json",
            "Trainer arguments",
            {"phase": "training", "dtype": "float16", "compile": False, "liger": False, "use_cache": True},
        ),
        (
            "trl-sft.yaml",
            "TRL configuration",
            {
                "phase": "training", "dtype": "bfloat16", "attn_implementation": "kernels-community/flash-attn3",
                "packed": True, "liger": False,
            },
        ),
        (
            "trl-sft.json",
            "TRL configuration",
            {
                "phase": "training", "dtype": "bfloat16", "attn_implementation": "sdpa", "use_kernels": True,
                "experts_implementation": "grouped_mm", "packed": True, "liger": False, "compile": False,
                "use_cache": False,
            },
        ),
        (
            "axolotl.yaml",
            "axolotl configuration",
            {
                "phase": "training", "attn_implementation": "flash_attention_2", "packed": True, "liger": True,
                "compile": True, "use_cache": False,
            },
        ),
        (
            "axolotl-moe.yaml",
            "axolotl configuration",
            {
                "phase": "training", "dtype": "bfloat16", "attn_implementation": "flash_attention_2", "packed": True,
                "signals": ("position_ids",), "experts_implementation": "scattermoe", "use_kernels": True,
                "compile": False, "use_cache": False,
            },
        ),
        (
            "bundled.toml",
            "kernelguard_train configuration",
            {
                "phase": "training", "dtype": "bfloat16", "attn_implementation": "varlen", "packed": True,
                "signals": SIGNALS, "liger": False, "compile": True, "use_cache": False,
                "grouped_heads": True, "own_convolution": True, "trust_remote_code": False,
            },
        ),
    ],
)  # fmt: skip
def test_real_configurations(name: str, kind: str, said: dict[str, Any]) -> None:
    reading = read_training_config(SAMPLES / name, {})
    assert reading.kind == kind
    assert dict(reading.said) == said
    intent = resolve_intent({}, None, SAMPLES / name)
    assert {key: getattr(intent, key) for key in said} == said
    left = set(SETTINGS) - set(said) - (set() if intent.packed else {"signals"})
    assert set(intent.assumed) == left
    assert kind in intent.source


@pytest.mark.parametrize("path", sorted((ROOT / "train" / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_the_bundled_examples_are_recognised(path: Path) -> None:
    assert read_training_config(path, {}).kind == "kernelguard_train configuration"


@pytest.mark.parametrize(
    ("batch", "train", "attention"),
    [({}, {}, "varlen"), ({"mode": "padded"}, {}, "sdpa"), ({}, {"device": "cpu"}, "sdpa")],
)
def test_the_bundled_trainers_own_choice_of_attention_is_known(
    batch: dict[str, Any], train: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    intent = read(tmp_path, {"model": {"path": "org/model"}, "batch": {"tokens": 8192, **batch}, "train": train})
    assert intent.attn_implementation == attention


@pytest.mark.parametrize(
    ("model", "batch"),
    [({"fused": "off"}, {}), ({"kernels": "reference"}, {}), ({"fused": "on"}, {"mode": "padded"})],
)
def test_only_the_bundled_trainers_fused_layers_keep_their_key_heads(
    model: dict[str, Any], batch: dict[str, Any], tmp_path: Path
) -> None:
    model, batch = {"path": "org/model", **model}, {"tokens": 8192, **batch}
    intent = read(tmp_path, {"model": model, "batch": batch, "data": {"path": "synthetic"}})
    assert not intent.grouped_heads
    assert not intent.own_convolution


@pytest.mark.parametrize(("named", "own"), [("auto", True), ("causal_conv1d", False), ("fla", False)])
def test_the_bundled_trainers_own_convolution_is_known(named: str, own: bool, tmp_path: Path) -> None:
    intent = read(tmp_path, {"model": {"path": "org/model", "convolution": named}, "batch": {"tokens": 8192}})
    assert intent.grouped_heads
    assert intent.own_convolution is own


@pytest.mark.parametrize(
    ("data", "batch", "length"),
    [
        ({}, {"tokens": 16384}, 16384),
        ({"max_length": 2048}, {"tokens": 16384}, 16384),
        ({"max_length": 2048}, {"mode": "padded"}, 2048),
        ({}, {"mode": "sorted", "tokens": 4096}, 4096),
        ({"max_length": "long"}, {"mode": "padded", "tokens": True}, None),
    ],
)
def test_the_bundled_trainers_rows_have_a_length(
    data: dict[str, Any], batch: dict[str, Any], length: int | None, tmp_path: Path
) -> None:
    """What `verify` measures at, unless it is told."""
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"model": {"path": "org/model"}, "data": {"path": "synthetic", **data}, "batch": batch}))
    reading = read_training_config(path, {})
    assert (reading.bundled, reading.length) == (True, length)


def test_the_bundled_trainers_default_length_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "train.json"
    path.write_text(json.dumps({"model": {"path": "org/model"}, "data": {"path": "synthetic"}}))
    trainer = (ROOT / "train/kernelguard_train/config.py").read_text()
    default = re.search(r"^    tokens: int = key\((\d+),", trainer, re.MULTILINE)
    assert default is not None
    assert read_training_config(path, {}).length == int(default[1])
    other = tmp_path / "args.json"
    other.write_text(json.dumps({"output_dir": "o", "max_steps": 3}))
    assert (read_training_config(other, {}).bundled, read_training_config(other, {}).length) == (False, None)


def test_trainer_arguments_say_nothing_about_packing(tmp_path: Path) -> None:
    intent = read(tmp_path, {"output_dir": "o", "max_steps": 3, "unknown_key": {"a": [1]}})
    assert {"packed", "dtype", "use_cache", "attn_implementation"} <= set(intent.assumed)
    assert "phase" not in intent.assumed


@pytest.mark.parametrize(("transformers", "assumed"), [("4.57.6", True), ("5.0.0", False), ("5.24.0", False)])
def test_the_trainer_switches_the_cache_off_from_5_on(tmp_path: Path, transformers: str, assumed: bool) -> None:
    intent = read(tmp_path, {"output_dir": "o"}, transformers=transformers)
    assert not intent.use_cache
    assert ("use_cache" in intent.assumed) is assumed


@pytest.mark.parametrize(
    ("document", "dtype"),
    [
        ({"bf16": True, "torch_dtype": "float32"}, "bfloat16"),
        ({"fp16": True}, "float16"),
        ({"bf16": False, "torch_dtype": "torch.float32"}, "float32"),
        ({"bf16": False, "dtype": "auto"}, None),
        ({"packing": False, "model_init_kwargs": {"dtype": "float32"}}, "bfloat16"),
        ({"packing": False, "bf16": False, "model_init_kwargs": {"dtype": "float32"}}, "float32"),
        ({"packing": False, "fp16": True}, "float16"),
        ({"base_model": "m", "bf16": "auto"}, None),
        ({"base_model": "m", "bf16": "true"}, "bfloat16"),
        ({"base_model": "m", "bf16": "full", "fp16": True}, "bfloat16"),
        ({"base_model": "m", "bf16": False, "float16": True}, "float16"),
        ({"base_model": "m", "bf16": False}, "float32"),
    ],
)
def test_dtypes(tmp_path: Path, document: dict[str, Any], dtype: str | None) -> None:
    intent = read(tmp_path, {"output_dir": "o", **document})
    assert intent.dtype == (dtype or "bfloat16")
    assert ("dtype" in intent.assumed) is (dtype is None)


@pytest.mark.parametrize(
    ("document", "trl", "packed", "signals"),
    [
        ({"packing": True}, "1.16.0", True, SIGNALS),
        ({"packing": True}, "1.15.0", True, ("position_ids",)),
        ({"packing": True}, "0.23.1", True, ("position_ids",)),
        ({"packing": True}, "0.21.0", True, None),
        ({"packing": True}, None, True, None),
        ({"packing": True, "packing_strategy": "bfd_split"}, "1.16.0", True, SIGNALS),
        ({"packing": True, "packing_strategy": "wrapped"}, "1.16.0", True, ()),
        ({"packing": True, "packing_strategy": "wrapped", "padding_free": True}, None, True, ()),
        ({"packing": False, "padding_free": True}, "1.16.0", True, SIGNALS),
        ({"packing": False, "packing_strategy": "wrapped"}, "1.16.0", False, None),
        ({"packing": False}, "1.16.0", False, None),
    ],
)
def test_packing_with_trl(
    tmp_path: Path, document: dict[str, Any], trl: str | None, packed: bool, signals: tuple[str, ...] | None
) -> None:
    intent = read(tmp_path, {"output_dir": "o", **document}, **({"trl": trl} if trl else {}))
    assert (intent.packed, intent.signals) == (packed, signals)
    assert "packed" not in intent.assumed
    assert ("signals" in intent.assumed) is (packed and signals is None)
    assert ("--signals" in intent.source) is (packed and signals is None)


def test_trl_without_a_word_on_packing_assumes(tmp_path: Path) -> None:
    assert "packed" in read(tmp_path, {"model_init_kwargs": None, "output_dir": "o"}).assumed


@pytest.mark.parametrize(
    ("document", "packed", "signals"),
    [
        ({"sample_packing": True}, True, None),
        ({"sample_packing": False}, False, None),
        ({"batch_flattening": True}, True, ("position_ids",)),
        ({"batch_flattening": True, "plugins": ["axolotl.integrations.kd.KDPlugin"]}, True, None),
        ({"batch_flattening": True, "rl": "grpo"}, True, None),
        ({"batch_flattening": "auto", "flash_attention": True, "micro_batch_size": 2}, True, ("position_ids",)),
        ({"batch_flattening": "auto", "flash_attention": True, "micro_batch_size": 1}, False, None),
        ({"batch_flattening": "auto", "sdp_attention": True, "micro_batch_size": 2}, False, None),
    ],
)
def test_packing_with_axolotl(
    tmp_path: Path, document: dict[str, Any], packed: bool, signals: tuple[str, ...] | None
) -> None:
    intent = read(tmp_path, {"base_model": "m", **document})
    assert (intent.packed, intent.signals) == (packed, signals)
    assert "packed" not in intent.assumed
    assert ("signals" in intent.assumed) is (packed and signals is None)


@pytest.mark.parametrize(
    ("document", "attention"),
    [
        ({"flash_attention": True, "xformers_attention": False}, "flash_attention_2"),
        ({"sdp_attention": True, "flash_attention": True}, "flash_attention_2"),
        ({"flex_attention": True}, "flex_attention"),
        ({"attn_implementation": "flash_attention_2", "flash_attention": True}, "flash_attention_2"),
        ({"attn_implementation": "kernels-community/flash-attn3"}, "kernels-community/flash-attn3"),
        ({}, None),
    ],
)
def test_attention_with_axolotl(tmp_path: Path, document: dict[str, Any], attention: str | None) -> None:
    intent = read(tmp_path, {"base_model": "m", **document})
    assert intent.attn_implementation == attention
    assert ("attn_implementation" in intent.assumed) is (attention is None)


def test_liger_flags_of_axolotl_need_its_plugin(tmp_path: Path) -> None:
    flags = {"base_model": "m", "liger_rms_norm": True}
    assert not read(tmp_path, flags).liger
    assert read(tmp_path, {**flags, "plugins": ["axolotl.integrations.liger.LigerPlugin"]}).liger


def test_kernels_plugin_of_axolotl_has_defaults(tmp_path: Path) -> None:
    plugin = {"base_model": "m", "plugins": ["axolotl.integrations.kernels.KernelsPlugin"]}
    intent = read(tmp_path, plugin)
    assert (intent.experts_implementation, intent.use_kernels) == ("eager", True)
    intent = read(tmp_path, {**plugin, "expert_backend": "sonicmoe", "use_kernels": False})
    assert (intent.experts_implementation, intent.use_kernels) == ("sonicmoe", False)


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ({"output_dir": "o", "bf16": True, "fp16": True}, ("bf16 and fp16",)),
        ({"output_dir": "o", "use_liger_kernel": "false"}, ("use_liger_kernel", "without quotes")),
        ({"output_dir": "o", "bf16": 3, "torch_compile": [1]}, ("bf16 is 3", "torch_compile is a list")),
        ({"output_dir": "o", "torch_dtype": "bfloat17"}, ("did you mean 'bfloat16'?",)),
        ({"packing": True, "packing_strategy": "bdf"}, ("did you mean 'bfd'?",)),
        ({"packing": True, "model_init_kwargs": "x"}, ("model_init_kwargs", "a mapping was expected")),
        ({"packing": True, "model_init_kwargs": {"use_kernels": 7}}, ("model_init_kwargs.use_kernels",)),
        ({"base_model": "m", "sample_packing": "maybe"}, ("sample_packing",)),
        ({"base_model": "m", "attn_implementation": "sdpa", "flash_attention": True}, ("flash_attention is on",)),
        ({"base_model": "m", "bf16": {"enabled": True}}, ("bf16 is a mapping",)),
        ({"model": {"compute_dtype": ["x"]}, "batch": {"mode": "packd"}}, ("model.compute_dtype", "'packed'")),
    ],
)
def test_impossible_values_are_all_named_once(tmp_path: Path, document: dict[str, Any], says: tuple[str, ...]) -> None:
    said = refused({}, None, write(tmp_path / "x.json", document))
    for text in says:
        assert said.count(text) == 1, said
    assert "x.json" in said


def test_a_bomb_of_aliases_is_not_expanded(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 60)]
    text = "\n".join([*lines, "bf16: *a59", "output_dir: o"])
    assert "bf16 is a list" in refused({}, None, write(tmp_path / "x.yaml", text))


def test_a_resolution_without_files_loads_no_parser() -> None:
    code = (
        "import sys; from kernelguard.declare.intent import resolve_intent; resolve_intent({'packed': True});"
        "print(sorted({'jsonschema', 'yaml', 'tomllib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


KEYS = st.sampled_from(
    (
        *SETTINGS,
        *("schema", "output_dir", "bf16", "fp16", "torch_dtype", "torch_compile", "torch_compile_mode"),
        *("use_liger_kernel", "packing", "packing_strategy", "padding_free", "model_init_kwargs", "base_model"),
        *("sample_packing", "batch_flattening", "flash_attention", "micro_batch_size", "sequence_len", "plugins"),
        *("liger_rope", "rl", "expert_backend", "datasets", "model", "data", "batch", "mode", "compute_dtype"),
    )
)
WORDS = st.sampled_from([*SIGNALS, "auto", "training", "bfloat16", "false", "wrapped", "packed", "sdpa", "axolotl.x"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | WORDS
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=5),
    max_leaves=12,
)


def intent_or_error(intent: Path | None, train: Path | None) -> Intent | InputError:
    try:
        return resolve_intent({}, intent, train)
    except InputError as error:
        return error


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(value=VALUES, as_yaml=st.booleans())
def test_any_value_in_a_file_gives_an_intent_or_our_error(tmp_path: Path, value: Any, as_yaml: bool) -> None:
    text = yaml.safe_dump(value) if as_yaml else json.dumps(value)
    file = write(tmp_path / ("x.yaml" if as_yaml else "x.json"), text)
    for found in (intent_or_error(file, None), intent_or_error(None, file)):
        if isinstance(found, InputError):
            assert str(file) in found.message
            assert found.hint
            continue
        assert isinstance(found.phase, Phase)
        assert found.dtype in {"bfloat16", "float16", "float32"}
        assert all(isinstance(getattr(found, name), bool) for name in ("packed", "liger", "compile", "use_kernels"))
        assert found.signals is None or set(found.signals) <= set(SIGNALS)
        assert found.packed or not found.signals


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)
@given(
    content=st.binary(max_size=60) | st.text(max_size=60).map(str.encode),
    suffix=st.sampled_from(["json", "toml", "yaml", "x"]),
)
def test_any_bytes_in_a_file_give_an_intent_or_our_error(tmp_path: Path, content: bytes, suffix: str) -> None:
    file = write(tmp_path / f"x.{suffix}", content)
    for found in (intent_or_error(file, None), intent_or_error(None, file)):
        assert isinstance(found, Intent) or str(file) in found.message


@pytest.mark.parametrize(
    "document",
    [
        {"base_model": "x", "sample_packing": False, "trust_remote_code": True},
        {"output_dir": "o", "packing": False, "trust_remote_code": True},
        {"output_dir": "o", "bf16": True, "model_init_kwargs": {"trust_remote_code": True}},
    ],
    ids=["axolotl", "TRL", "Trainer"],
)
def test_trust_in_code_of_the_checkpoint_is_read(tmp_path: Path, document: dict[str, Any]) -> None:
    path = write(tmp_path / "train.json", document)
    assert read_training_config(path, {}).said["trust_remote_code"] is True
