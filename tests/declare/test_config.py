"""config.json: nested parts, and every way of being unreadable told in one line with its fix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernelguard.declare import parse_config, read_config
from kernelguard.declare.config import MAX_BYTES
from kernelguard.errors import InputError, UndeterminedError


def write(folder: Path, text: str | bytes, name: str = "config.json") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_parts_are_found_at_every_depth(tmp_path: Path) -> None:
    raw = {
        "model_type": "outer",
        "architectures": ["OuterModel"],
        "text_config": {"model_type": "text", "deep": {"audio_config": {"model_type": "audio"}}},
        "rope_parameters": {"rope_type": "default"},
    }
    config = read_config(str(write(tmp_path, json.dumps(raw))))
    assert [(part.path, part.model_type) for part in config.parts] == [
        ("", "outer"),
        ("text_config", "text"),
        ("text_config.deep.audio_config", "audio"),
    ]
    assert config.architectures == ("OuterModel",)
    assert config.folder == tmp_path


def test_a_folder_is_read_like_its_config(tmp_path: Path) -> None:
    write(tmp_path, '{"model_type": "mamba"}')
    assert read_config(str(tmp_path)).model_type == "mamba"


def test_auto_map_is_remote_code(tmp_path: Path) -> None:
    raw = {"model_type": "x", "auto_map": {"AutoModel": "modeling_x.X", "AutoTokenizer": ["t.Slow", None]}}
    config = read_config(str(write(tmp_path, json.dumps(raw))))
    assert config.remote_code == ("modeling_x.X", "t.Slow")


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    config = read_config(str(write(tmp_path, '{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')))
    assert config.raw["time_step_limit"] == [0.0, float("inf")]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        ("{", "at line 1, column 2"),
        ('{"model_type": "x",\n "a": }', "at line 2, column 7"),
        ("[1, 2]", "holds a list"),
        ("3", "holds a number"),
        ("null", "holds null"),
        ('"text"', "holds a string"),
        ("{}", "it is an empty object"),
        ('{"hidden_size": 3}', "its keys are hidden_size"),
        ('{"model_type": 3}', "model_type is 3"),
        ('{"model_type": null}', "model_type is null"),
        ('{"model_type": " "}', 'model_type is " "'),
        ('{"model_type": ["a"]}', 'model_type is ["a"]'),
        ('{"model_type": "x", "a": NaN}', "NaN is no JSON number"),
        ('{"weight_map": {}}', "index of weight files"),
        ('{"peft_type": "LORA"}', "PEFT adapter"),
        (b"\x80\x04\x95", "byte 0x80 at offset 0"),
        (b'\xef\xbb\xbf{"model_type": "x"}', "byte order mark"),
        ('{"model_type": "x", "num_hidden_layers": -4}', "num_hidden_layers is -4"),
        ('{"model_type": "x", "text_config": {"num_hidden_layers": "4"}}', 'text_config.num_hidden_layers is "4"'),
        ('{"model_type": "x", "n_layer": 4.5}', "n_layer is 4.5"),
        ('{"model_type": "x", "num_layers": true}', "num_layers is true"),
        (
            '{"model_type": "x", "num_hidden_layers": 3, "layer_types": ["a", "b"]}',
            "layer_types lists 2 layers, but num_hidden_layers is 3",
        ),
        ("[" * 100_000, "nested too deeply"),
        ('{"model_type": "x", "a": ' + '{"b": ' * 100 + "1" + "}" * 101, "nested more than"),
        ('{"model_type": "x", "a": ' + "9" * 5000 + "}", "number that cannot be read"),
    ],
)
def test_what_cannot_be_used(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_config(str(path))
    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_lfs_pointers_and_web_pages_are_recognized(tmp_path: Path) -> None:
    for text, hint in (
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        ("<!DOCTYPE html>", "raw file"),
    ):
        with pytest.raises(InputError) as caught:
            read_config(str(write(tmp_path, text)))
        assert hint in (caught.value.hint or "")


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as handle:
        handle.truncate(100 * MAX_BYTES)  # sparse: 1 GB that takes no room
    with pytest.raises(InputError, match="has 1000 MB"):
        read_config(str(path))


def test_missing_paths_name_what_is_near(tmp_path: Path) -> None:
    write(tmp_path, "{}")
    (tmp_path / "qwen").mkdir()
    with pytest.raises(InputError) as caught:
        read_config(str(tmp_path / "confg.json"))
    assert "has config.json" in caught.value.message
    with pytest.raises(InputError) as caught:
        read_config(str(tmp_path / "qwem" / "config.json"))
    assert caught.value.hint == f"give {tmp_path / 'qwen'}"


def test_a_folder_without_config_says_what_it_holds(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it is empty"):
        read_config(str(tmp_path))
    write(tmp_path, "{}", "generation_config.json")
    with pytest.raises(InputError, match=r"it holds generation_config\.json"):
        read_config(str(tmp_path))
    (tmp_path / "inner").mkdir()
    write(tmp_path / "inner", "{}")
    with pytest.raises(InputError) as caught:
        read_config(str(tmp_path))
    assert caught.value.hint == f"give {tmp_path / 'inner'}"


def test_links_folders_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(tmp_path / "gone.json")
    for model in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(InputError, match="does not exist"):
            read_config(str(model))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match="is a folder"):
        read_config(str(tmp_path))
    (tmp_path / "config.json").rmdir()
    os.mkfifo(tmp_path / "config.json")  # reading it would wait for ever
    with pytest.raises(InputError, match="not a regular file"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("model", ["\0", "a" * 5000, "x/" * 3000, "~nobody-of-that-name/x"])
def test_strange_names(model: str) -> None:
    with pytest.raises(InputError):
        read_config(model)


_BLOCKED = """
import sys
from kernelguard.declare import read_config
try:
    read_config(sys.argv[1])
except Exception as error:
    print(type(error).__name__, error, getattr(error, "hint", ""))
"""


def test_a_hub_id_offline_is_undetermined_and_the_token_stays_secret(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED, "org-that-is-not/model@main"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_verysecret"},
    )
    assert done.stdout.startswith(UndeterminedError.__name__)
    assert "hf download org-that-is-not/model config.json" in done.stdout
    assert "verysecret" not in done.stdout + done.stderr


def test_a_cached_hub_id_is_read_offline(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "mamba"}')
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    code = "import sys; from kernelguard.declare import read_config; print(read_config('org/name').model_type)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert done.stdout.strip() == "mamba"


def test_reading_imports_nothing_heavy() -> None:
    code = (
        "import sys, kernelguard.declare\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'jsonschema', 'rich', 'yaml', 'tomllib', 'difflib'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_parse_config_takes_parsed_json() -> None:
    assert parse_config({"model_type": "bamba"}, source="here").source == "here"
