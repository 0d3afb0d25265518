"""Attention beside varlen: flex and flash-attn packages through transformers' own dispatch, torch's FA3 and FA4."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_model
import tiny
import torch
import transformers

from kernelguard_train import attention
from kernelguard_train.batches import packed_batch
from kernelguard_train.errors import ModelError
from kernelguard_train.ranks import Ranks

HERE = Path(__file__).parent


@pytest.mark.filterwarnings("ignore:_compile flag on create_block_mask:DeprecationWarning")  # transformers sets it
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # on the way into the compiler
def test_flex_attention_keeps_samples_apart_as_sdpa_does(tmp_path: Path) -> None:
    """Forward: torch has no backward pass of it on a CPU. From the batch's own signals, as the trainer passes them."""
    config = transformers.AutoConfig.from_pretrained(tiny.write_config(tmp_path, "llama"))
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(config).eval()
    batch = packed_batch(tiny.samples(test_model.RAGGED), 256, 0)
    found = {}
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        for name in ("sdpa", "flex_attention"):
            lm.set_attn_implementation(name)
            found[name] = lm.base_model(**batch.model_inputs()).last_hidden_state
        # Other tokens in the first sample change nothing in the others.
        inputs = batch.model_inputs()
        inputs["input_ids"] = inputs["input_ids"].clone()
        inputs["input_ids"][0, : test_model.RAGGED[0]] += 1
        moved = lm.base_model(**inputs).last_hidden_state
    torch.testing.assert_close(found["flex_attention"], found["sdpa"], rtol=1e-4, atol=1e-5)
    first = test_model.RAGGED[0]
    assert torch.equal(moved[0, first:], found["flex_attention"][0, first:])
    assert not torch.equal(moved[0, :first], found["flex_attention"][0, :first])


@pytest.mark.parametrize(
    ("architecture", "implementation", "expected"),
    [
        ("llama", "flex_attention", "has no backward pass of it on a CPU"),
        ("llama", "flash_attention_2", "model.attention = flash_attention_2: .*doesn't seem to be installed"),
        ("llama", "flash_attention_3", "model.attention = flash_attention_3: .*doesn't seem to be installed"),
    ],
)
def test_an_implementation_that_cannot_be_had_is_an_error(
    tmp_path: Path, alone: Ranks, architecture: str, implementation: str, expected: str
) -> None:
    config = tiny.configured(tiny.write_config(tmp_path, architecture), f"model.attention={implementation}")
    with pytest.raises(ModelError, match=expected):
        test_model.built(config, alone)


PACKAGES = {
    "flash_attention_2": ("flash_attn", "flash-attn", "2.8.3"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3", "3.0.0"),
}
KERNEL = '''
"""Stands in for the package's kernels: the same names and arguments, one segment at a time."""
import itertools
import torch
from torch.nn import functional
seen = []
def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {dropout}
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, **other):
    assert q.ndim == k.ndim == 3 and cu_seqlens_q.dtype == torch.int32 and causal, (q.shape, cu_seqlens_q.dtype, causal)
    assert torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    assert softcap == 0.0 and tuple(window_size) == (-1, -1)
    seen.append(cu_seqlens_q.tolist())
    parts = []
    for a, b in itertools.pairwise(cu_seqlens_q.tolist()):
        one = [tensor[a:b].transpose(0, 1)[None] for tensor in (q, k, v)]
        part = functional.scaled_dot_product_attention(*one, is_causal=True, scale=softmax_scale, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
def flash_attn_func(*arguments, **named):
    raise AssertionError("the boundaries were not passed on")
flash_attn_with_kvcache = flash_attn_func
'''
PROGRAM = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
import torch
import transformers.utils
from transformers.utils import import_utils
# transformers offers the package on a GPU only; every tensor here is on the CPU
import_utils.is_torch_cuda_available = transformers.utils.is_torch_cuda_available = lambda: True
import test_model, tiny
from kernelguard_train import configfile, isolation, ranks
from kernelguard_train.batches import packed_batch
name, folder = sys.argv[1], Path(sys.argv[2])
own = ranks.start(configfile.load(None, ["model.path=x", "data.path=x", "train.device=cpu"]))
batch = packed_batch(tiny.samples(test_model.RAGGED), 256, 0)
for architecture in ("llama", "qwen3_5"):
    model = tiny.write_config(folder / architecture, architecture)
    expected = test_model.gradients(test_model.built(tiny.configured(model), own).network, [batch])
    made = test_model.built(tiny.configured(model, "model.attention=" + name), own)
    isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, own.device)
    found = test_model.gradients(made.network, [batch])
    assert abs(found[0] - expected[0]) <= 1e-6 * expected[0], (found[0], expected[0])
    assert test_model.worst(found[1], expected[1])[0] < 5e-5, test_model.worst(found[1], expected[1])
package = sys.modules[{"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}[name]]
assert package.seen.count(batch.cu_seqlens.tolist()) == 3, package.seen  # two layers of llama, one of the hybrid
print("as sdpa")
"""


@pytest.mark.parametrize("name", list(PACKAGES))
def test_transformers_hands_the_boundaries_to_a_flash_attention_package(tmp_path: Path, name: str) -> None:
    """Through transformers' real dispatch, which has a dense and a varlen call; only the kernel is a stand-in."""
    module, distribution, version = PACKAGES[name]
    about = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (about / "top_level.txt").write_text(module + "\n")
    (tmp_path / module).mkdir()
    dropout = "dropout_p=0.0," if name == "flash_attention_2" else ""
    (tmp_path / module / "__init__.py").write_text(
        f'__version__ = "{version}"\n' + KERNEL.replace("{dropout}", dropout)
    )
    (tmp_path / module / "bert_padding.py").write_text("index_first_axis = pad_input = unpad_input = None\n")
    (tmp_path / module / "layers").mkdir()
    (tmp_path / module / "layers" / "rotary.py").write_text("apply_rotary_emb = None\n")
    paths = [str(tmp_path), str(HERE), str(HERE.parents[1] / "train")]
    command = [sys.executable, "-c", PROGRAM, name, *paths]
    done = subprocess.run(command, env={**os.environ}, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("as sdpa\n")


# --- torch's own flash attention, routed to another implementation ---------------------------------------------------


def test_flash_attention_is_rerouted_where_it_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch.nn.attention as torch_attention

    activated: list[str] = []
    monkeypatch.setattr(torch_attention, "activate_flash_attention_impl", activated.append)
    capability = [9]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device=None: (capability[0], 0))
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert attention.route_flash("auto", cpu) == "flash attention: torch's own"
    assert attention.route_flash("auto", cuda) == "flash attention: torch's own (FA3 is not installed)"
    (tmp_path / "flash_attn_interface.py").write_text("")
    (tmp_path / "flash_attn").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert attention.route_flash("auto", cuda) == "flash attention: FA3, from flash_attn_interface"
    capability[0] = 10
    assert attention.route_flash("auto", cuda) == "flash attention: FA4, from flash_attn.cute.interface"
    capability[0] = 8
    assert attention.route_flash("auto", cuda) == "flash attention: torch's own"
    assert attention.route_flash("default", cuda) == "flash attention: torch's own"
    assert activated == ["FA3", "FA4"]


@pytest.mark.parametrize("which", ["FA3", "FA4"])
def test_an_implementation_asked_for_by_name_is_there_or_an_error(which: str) -> None:
    """Torch's real registry: FA3 and FA4 are known to it and cannot be imported here."""
    assert which in torch.nn.attention.list_flash_attention_impls()
    with pytest.raises(ModelError, match=rf"model\.flash: {which} cannot be had: \w+Error: .*flash_attn"):
        attention.route_flash(which, torch.device("cuda", 0))
