"""Rows through the command itself: what a person sees, and the exit code that a script sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from failure_asks import tree

import configs
import crafted
from command import Command
from observed import environment

pytestmark = pytest.mark.observed

CODE = "from transformers.utils import is_flash_attn_available\n"


def test_h02_code_of_a_checkpoint_that_imports_a_name_that_is_gone(tmp_path: Path) -> None:
    config = {**configs.LLAMA, "model_type": "Yi", "auto_map": {"AutoModelForCausalLM": "modeling_yi.YiForCausalLM"}}
    model = configs.write(tmp_path / "model", config)
    (model / "modeling_yi.py").write_text(CODE)
    asked = ("check", model, "--target", "h100", "--transformers", tree("5.24.0"))
    said = Command(*asked)
    assert said.code == 1
    assert "imports is_flash_attn_available from transformers.utils" in " ".join(said.out.split())
    # Code that may be loaded is still not known to be good, and where it is not at hand nothing is said about it.
    for text in ("class YiForCausalLM:\n    pass\n", None):
        if text is None:
            (model / "modeling_yi.py").unlink()
        else:
            (model / "modeling_yi.py").write_text(text)
        said = Command(*asked)
        assert said.code == 3
        assert "modeling_yi.YiForCausalLM" in " ".join(said.out.split())


def test_b02_a08_what_a_script_and_a_person_see_of_a_broken_build(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.24.0", crafted.everything())
    crafted.shared_object(env.site / "causal_conv1d_cuda.so", undefined="_ZN3c104cuda9SetDeviceEi")
    (env.site / "causal_conv1d-1.7.0.dist-info/RECORD").write_text("causal_conv1d_cuda.so,,\n")
    model = configs.write(tmp_path / "model", configs.QWEN3_5)
    asked = ("check", model, "--python", env.python, "--level", "resolve")
    person = Command(*asked)
    assert person.code == 1
    assert "causal_conv1d_cuda.so wants 1 symbol(s)" in " ".join(person.out.split())
    script = Command(*asked, "--json")
    assert script.code == 1
    paths = {path["symbol"]: path for path in json.loads(script.out)["fast_paths"]}
    assert "wrong-torch" in paths["causal_conv1d_fn"]["codes"]
