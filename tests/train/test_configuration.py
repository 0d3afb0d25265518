from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from kernelguard_train import configfile
from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError

NEEDED = ["model.path=m", "data.path=d"]


def test_a_file_and_overrides_make_a_config(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('[model]\npath = "m"\n[data]\npath = "d"\n[optim]\nlr = 3e-4\nbetas = [0.8, 0.9]\n')
    config = configfile.load(path, ["optim.lr=1", 'model.compile=["mlp"]', "data.path=/x/y.jsonl"])
    assert config.optim.lr == 1.0
    assert isinstance(config.optim.lr, float)
    assert config.optim.betas == (0.8, 0.9)
    assert config.model.compile == ("mlp",)
    assert config.data.path == "/x/y.jsonl"


def test_what_is_printed_is_read_back(tmp_path: Path) -> None:
    config = configfile.load(None, [*NEEDED, "optim.betas=[0.5, 0.6]", 'data.path=a "b"', "train.deterministic=true"])
    path = tmp_path / "c.toml"
    path.write_text(configfile.dump(config))
    assert configfile.load(path) == config


def test_every_key_is_documented() -> None:
    for section in get_type_hints(Config).values():
        for item in fields(section):
            assert len(item.metadata["doc"]) > 10, item.name
    text = configfile.dump(Config())
    assert text.count("\n# ") >= sum(len(fields(section)) for section in get_type_hints(Config).values())


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.learning_rat=1", "unknown key optim.learning_rat"),
        ("optim.lrs=1", "did you mean optim.lr?"),
        ("modell.path=x", "did you mean model?"),
        ("lr=1", "did you mean optim.lr?"),
        ("train.lr=1", "did you mean optim.lr?"),
        ("model.layers=1.5", "model.layers = 1.5; expected int"),
        ("model.layers=true", "model.layers = True; expected int"),
        ("train.epochs=many", "expected int"),
        ("batch.mode=paked", "(packed?)"),
        ("optim.betas=[0.9]", "expected a list of 2 float"),
        ("batch.tokens=1000", "multiple of 128"),
        ("data.max_length=9000", "does not fit batch.tokens"),
        ("data.streaming=true", "needs train.steps"),
        ("optim.lr=0", "optim.lr = 0.0; expected more than 0"),
        ("optim.lr=inf", "optim.lr = inf; expected a finite number"),
        ("optim.betas=[1.5, 0.9]", "optim.betas = [1.5, 0.9]; expected two numbers from 0 to below 1"),
        ("optim.eps=-1.0", "optim.eps = -1.0; expected 0 or more"),
        ("train.seed=-1", "train.seed = -1; expected 0 or more"),
        ("data.synthetic_median=-5", "data.synthetic_median = -5; expected more than 0"),
        ("data.shuffle_buffer=0", "data.shuffle_buffer = 0; expected more than 0"),
        ("model=3", "model is a section"),
        ("model.compute_dtype=float16", "expected one of bfloat16, float32"),
        ("nonsense", "is not section.key=value"),
    ],
)
def test_a_wrong_value_is_refused_and_explained(override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configfile.load(None, [*NEEDED, override])
    assert expected in str(caught.value)


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        configfile.load(None, ["optim.lrs=1", "model.layers=x", "train.sed=1"])
    assert str(caught.value).count("\n  - ") == 3


def test_a_missing_model_and_data_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is missing[\s\S]*data\.path is missing"):
        configfile.load(None)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml"):
        configfile.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[model\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        configfile.load(tmp_path / "bad.toml")
