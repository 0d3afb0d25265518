"""The trainer's own Triton kernels compute what torch computes, in Triton's interpreter, which needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed here")
PROGRAM = """
import json, sys
import torch
from torch.nn import functional
from kernelguard_train import kernels
from kernelguard_train.loss import _chunk

torch.manual_seed(0)
kernels.COLUMNS = 32
found = {}

def apart(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())

for name, size, scale in (("small", 70, 1.0), ("several blocks", 9001, 3.0), ("far apart", 5000, 80.0)):
    logits, targets = torch.randn(6, size) * scale, torch.randint(0, size, (6,))
    targets[0], targets[1] = 0, size - 1
    loss, gradient = _chunk(logits.clone(), targets)
    own, in_place = kernels.cross_entropy(logits, targets)
    found[f"loss, {name}"] = apart(own, loss)
    found[f"logits' gradient, {name}"] = apart(in_place, gradient)
    found[f"in place, {name}"] = float(in_place.data_ptr() != logits.data_ptr())

def numbered(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()[None]

def compare(label, lengths, width=96, dtype=torch.float32):
    numbers = numbered(lengths)
    x = torch.randn(1, sum(lengths), width).to(dtype).requires_grad_()
    weight = torch.randn(width, 4).to(dtype).requires_grad_()
    true_x, true_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    parts = []
    for sample in true_x.split(lengths, 1):
        padded = functional.conv1d(sample.transpose(1, 2), true_weight[:, None], padding=3, groups=width)
        parts.append(functional.silu(padded[:, :, : sample.shape[1]]).transpose(1, 2))
    expected = torch.cat(parts, 1).split([key, key, width - 2 * key], -1)
    slopes = [torch.randn(part.shape).to(dtype) for part in expected]
    wanted = torch.autograd.grad(expected, (true_x, true_weight), [slope.double() for slope in slopes])
    own = kernels.packed_convolution(x, weight, numbers, key)
    for name, a, b in zip(("query", "key", "value"), own, expected):
        found[f"{label}: {name}"] = apart(a, b)
        found[f"{label}: {name} is contiguous"] = float(not a.is_contiguous())
    for name, a, b in zip(("x", "weight"), torch.autograd.grad(own, (x, weight), slopes), wanted):
        found[f"{label}: gradient of {name}"] = apart(a, b)

# The walk goes along strips of 64 rows; one is plain when it and three rows on each side are of one sample.
key = 32
assert (kernels.ROWS, kernels.UNROLL) == (64, 4)
compare("a whole strip", (5, 1, 2, 38, 18), width=128)
compare("around a strip", (1, 3, 31, 32, 33, 64, 65))
compare("a plain strip", (3, 130, 10))
compare("shorter than a strip", (2,))
compare("coarse", (1, 3, 31, 101), dtype=torch.bfloat16)
kernels.ROWS, kernels.UNROLL = 16, 4
compare("short strips", (1, 3, 15, 16, 17, 40))

# What lies in another sample is not even multiplied: there it may be infinite.
lengths, width = (5, 1, 2, 38, 24), 96
numbers = numbered(lengths)
x, weight = torch.randn(1, sum(lengths), width), torch.randn(width, 4, requires_grad=True)
x[:, 5] = float("inf")
x.requires_grad_()
own = kernels.packed_convolution(x, weight, numbers, key)
found["infinite neighbour"] = sum(float((~part[0, numbers[0] != 1].isfinite()).sum()) for part in own)
(arrived,) = torch.autograd.grad(own, (x,), [torch.ones_like(part) for part in own])
found["infinite neighbour's gradient"] = float((~arrived[0, numbers[0] != 1].isfinite()).sum())

x = torch.randn(1, sum(lengths), width, requires_grad=True)
slopes = [torch.randn(1, sum(lengths), size) for size in (key, key, width - 2 * key)]
# Only the third sample gets a gradient: none may arrive at the others, not even a small one.
own = kernels.packed_convolution(x, weight, numbers, key)
third = [slope * (numbers[0] == 3)[None, :, None] for slope in slopes]
(arrived,) = torch.autograd.grad(own, (x,), third)
found["leaks"] = float(arrived[0, numbers[0] != 3].abs().max())
print(json.dumps(found))
"""
WHOLE = """
import json, sys
from pathlib import Path
import torch
import test_speed_layers as layers
import tiny
from kernelguard_train import bindings, fused, gated_delta, isolation, kernels, ranks
from kernelguard_train.batches import packed_batch
import transformers.models.qwen3_5.modeling_qwen3_5 as home

torch.manual_seed(0)
kernels.COLUMNS = 16
alone = ranks.start(tiny.configured(Path("."), "train.output=unused"))
made = layers.build(Path(sys.argv[1]), alone, "qwen3_5", "model.fused=on")
tiny.remember(made.network)
batch = packed_batch(tiny.samples((40, 70, 10)), 128, 0)
value, expected = layers.gradients(made, batch)
name = "chunk_gated_delta_rule" if hasattr(home, "chunk_gated_delta_rule") else bindings.DELTA_RULE[0]
setattr(home, name, layers.grouped(getattr(home, name)))
own = [m for layer in made.parts.layers for m in layer.modules() if gated_delta.suits(m)]
assert own and all(kernels.convolution_suits(m.conv1d.weight.squeeze(1), m.key_dim) for m in own)
for module in own:
    gated_delta.bind(module, layers.reference_norm, gated_delta.gates, kernels.packed_convolution, fused.project)
made.parts.ending[-1].kernel = kernels.cross_entropy
again, found = layers.gradients(made, batch)
isolation.check(made.network, made.parts.embedding, tiny.VOCABULARY, alone.device)
apart = {n: float((found[n] - g).norm() / (g.norm() + 1e-9)) for n, g in expected.items()}
print(json.dumps({"loss": abs(again - value) / value, "names": float(found.keys() != expected.keys()), **apart}))
"""


def run(program: str, *arguments: str) -> dict[str, float]:
    """What a program prints last, run with Triton's interpreter in place of its compiler."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    folders = [str(ROOT / "train"), str(ROOT / "tests/train"), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(folders)
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    return run(PROGRAM)


def test_values_and_gradients_are_torchs(found: dict[str, float]) -> None:
    # What is stored in bfloat16 is as near as its 8 bits are; all else is float32 throughout.
    most = {name: 4e-3 if name.startswith("coarse") else 2e-6 for name in found}
    assert {name: error for name, error in found.items() if not error < most[name]} == {}
    assert len(found) == 9 + 6 * 8 + 3


def test_a_convolutions_gradient_stays_within_its_sample(found: dict[str, float]) -> None:
    assert found["leaks"] == 0


@pytest.mark.thorough
def test_a_whole_model_on_the_own_kernels_has_the_same_loss_and_gradients(tmp_path: Path) -> None:
    """And no gradient crosses a sample: the program runs the trainer's own check."""
    differences = run(WHOLE, str(tmp_path))
    assert len(differences) > 30
    assert {name: error for name, error in differences.items() if not error < 1e-3} == {}
