"""Rows that only a real import tells: a live interpreter with a real transformers, and crafted packages."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from failure_asks import CONV, GDN, TRAINING, Said, installed, live

import configs
import crafted
from observed import environment, torch_base

pytestmark = pytest.mark.observed

CONV_FILE = "causal_conv1d/__init__.py"
GDN_FILE = "fla/ops/gated_delta_rule/__init__.py"
SYMBOL = "_ZN3c104cuda9SetDeviceEi"
FLASH = """
__version__ = "2.8.3"
import flash_attn_gpu

def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False):
    raise NotImplementedError

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
    raise NotImplementedError
"""
FLASH_METADATA = crafted.metadata("flash-attn", "2.8.3", "flash_attn")


def check(tmp: Path, version: str, files: crafted.Files) -> Said:
    return live(tmp, environment(tmp / "env", version, files))


@pytest.mark.thorough
def test_a01_a09_a_working_fla_that_5_16_ignores_is_the_fault_of_transformers(tmp_path: Path) -> None:
    said = check(tmp_path, "5.16.1", crafted.everything())
    assert said.code == 1
    assert "ignored" in said.paths[GDN]["codes"]
    assert "transformers>=5.17" in said.paths[GDN]["fix"]
    assert "install 'flash" not in said.paths[GDN]["fix"]
    assert said.paths[CONV]["status"] == "pass"


@pytest.mark.parametrize("version", ["5.24.0", pytest.param("5.16.1", marks=pytest.mark.thorough)])
def test_a08_h11_an_import_that_raises_keeps_its_words_and_is_not_called_absent(tmp_path: Path, version: str) -> None:
    """An extension for another torch, really loaded: what its file shows and what the import says are one answer."""
    files = crafted.everything()
    files[CONV_FILE] = "import torch\nimport causal_conv1d_cuda\n" + files[CONV_FILE]
    env = environment(tmp_path / "env", version, files)
    crafted.shared_object(env.site / "causal_conv1d_cuda.so", undefined=SYMBOL)
    installed(env.site, "causal-conv1d", "causal_conv1d", "1.7.0", ("causal_conv1d_cuda.so",))
    said = live(tmp_path, env)
    assert said.code == 1
    assert said.paths[CONV]["codes"] == ("broken", "wrong-torch")
    assert f"undefined symbol: {SYMBOL}" in said.paths[CONV]["reason"]
    assert "not installed" not in said.paths[CONV]["reason"]


@pytest.mark.thorough
def test_h11_5_5_crashes_at_model_import_and_the_cause_is_told(tmp_path: Path) -> None:
    words = "undefined symbol: _ZN3c10x"
    said = check(
        tmp_path, "5.5.4", crafted.replaced(crafted.everything(), CONV_FILE, f"raise ImportError({words!r})\n")
    )
    assert said.code == 1
    assert said.paths[CONV]["codes"] == ("broken",)
    assert words in said.paths[CONV]["reason"]


@pytest.mark.thorough
def test_a13_a_flash_attn_that_does_not_load_on_this_torch(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.24.0", {"flash_attn/__init__.py": "import flash_attn_2_cuda\n"})
    crafted.shared_object(env.site / "flash_attn_2_cuda.so", undefined=SYMBOL)
    installed(env.site, "flash-attn", "flash_attn", "2.8.3", ("flash_attn_2_cuda.so",))
    said = live(tmp_path, env, configs.LLAMA, attn_implementation="flash_attention_2")
    assert said.code == 1
    assert SYMBOL in said.finding("attention-broken")["reason"]
    assert said.finding("wrong-torch")["status"] == "fail"


@pytest.mark.thorough
def test_b16_b15_a_wheel_tagged_for_another_torch_that_works_is_no_failure(tmp_path: Path) -> None:
    files = crafted.without(crafted.everything(), "causal_conv1d")
    files |= crafted.causal_conv1d("1.6.1+cu12torch2.10cxx11abiTRUE")
    said = check(tmp_path, "5.24.0", files)
    assert said.code == 0
    assert {symbol: said.paths[symbol]["status"] for symbol in TRAINING} == {CONV: "warn", GDN: "pass"}
    assert said.finding("tag-other-torch")["fast_path"] == CONV


@pytest.mark.thorough
def test_b23_an_extension_that_finds_libc10_only_after_torch_is_fine(tmp_path: Path) -> None:
    files = crafted.everything()
    files[CONV_FILE] = "import causal_conv1d_cuda\n" + files[CONV_FILE]
    env = environment(tmp_path / "env", "5.24.0", files)
    module, source = env.site / "causal_conv1d_cuda.so", tmp_path / "module.c"
    source.write_text(
        # The module definition by hand: the tests have a C compiler, but not always Python's headers.
        "extern void _ZN3c106detail23torchInternalAssertFailEPKcS2_jS2_S2_(void);\n"
        "void *keep = (void *)_ZN3c106detail23torchInternalAssertFailEPKcS2_jS2_S2_;\n"
        "struct definition { long refs; void *type, *init; long index; void *copy; const char *name, *doc; long size;"
        " void *methods, *slots, *traverse, *clear, *free; };\n"
        'static struct definition made = {1, 0, 0, 0, 0, "causal_conv1d_cuda", 0, -1, 0, 0, 0, 0, 0};\n'
        "extern void *PyModule_Create2(void *, int);\n"
        "void *PyInit_causal_conv1d_cuda(void) { return PyModule_Create2(&made, 1013); }\n"
    )
    library = torch_base().site / "torch/lib/libc10.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", module, source, library], check=True)
    installed(env.site, "causal-conv1d", "causal_conv1d", "1.7.0", (module.name,))
    said = live(tmp_path, env)
    assert said.code == 0
    assert said.paths[CONV]["codes"] == ("bound",)


@pytest.mark.thorough
def test_d07_an_argument_that_the_bound_function_does_not_take(tmp_path: Path) -> None:
    files = crafted.renamed(crafted.everything(), GDN_FILE, "cu_seqlens=None", "offsets=None")
    env = environment(tmp_path / "env", "5.24.0", files)
    said = live(tmp_path, env, packed=True, signals=("position_ids", "cu_seq_lens_q", "seq_idx"))
    assert said.code == 1
    assert "boundary-argument-lost" in said.paths[GDN]["codes"]
    assert said.paths[CONV]["status"] == "pass"


@pytest.mark.thorough
@pytest.mark.parametrize("content", ["readme.txt", "__init__.py"])
def test_h04_a_flash_attn_without_metadata_is_named_with_its_place(tmp_path: Path, content: str) -> None:
    env = environment(tmp_path / "env", "5.24.0", {f"flash_attn/{content}": ""})
    said = live(tmp_path, env, configs.LLAMA, attn_implementation="flash_attention_2")
    assert said.code == 1
    assert str(env.site / "flash_attn") in said.finding("attention-without-metadata")["reason"]


@pytest.mark.thorough
@pytest.mark.parametrize(("level", "code"), [("import", 0), ("gpu", 3)])
def test_h06_h14_private_names_decide_nothing_and_no_gpu_is_no_denial(tmp_path: Path, level: str, code: int) -> None:
    files = {"flash_attn/__init__.py": FLASH, "flash_attn_gpu.py": "", **FLASH_METADATA}
    env = environment(tmp_path / "env", "5.24.0", files)
    said = live(tmp_path, env, configs.LLAMA, level=level, attn_implementation="flash_attention_2")
    assert said.code == code
    assert not said.codes("fail")
    assert "not installed" not in said.text()


@pytest.mark.thorough
def test_h08_a_leftover_folder_is_named_where_5_5_dies_of_it(tmp_path: Path) -> None:
    env = environment(tmp_path / "env", "5.5.4", crafted.without(crafted.everything(), "fla", "flash_linear"))
    (env.site / "fla").mkdir()
    said = live(tmp_path, env)
    assert said.code == 1
    assert said.paths[GDN]["codes"] == ("shadowed",)
    assert str(env.site / "fla") in said.paths[GDN]["reason"]


@pytest.mark.thorough
def test_h12_fla_core_alone_is_enough(tmp_path: Path) -> None:
    said = check(tmp_path, "5.24.0", crafted.without(crafted.everything(), "flash_linear"))
    assert said.code == 0
    assert {said.paths[symbol]["status"] for symbol in TRAINING} == {"pass"}
