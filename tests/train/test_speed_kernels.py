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

lengths, key, width = (5, 1, 2, 38, 24), 32, 128
numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()[None]
x = torch.randn(1, sum(lengths), width, requires_grad=True)
weight = torch.randn(width, 4, requires_grad=True)
parts = []
for sample in x.split(lengths, 1):
    padded = functional.conv1d(sample.transpose(1, 2), weight[:, None], padding=3, groups=width)
    parts.append(functional.silu(padded[:, :, : sample.shape[1]]).transpose(1, 2))
expected = torch.cat(parts, 1).split([key, key, width - 2 * key], -1)
slopes = [torch.randn_like(part) for part in expected]
wanted = torch.autograd.grad(expected, (x, weight), slopes)
own = kernels.convolution(x, weight, numbers, key)
for name, a, b in zip(("query", "key", "value"), own, expected):
    found[name] = apart(a, b)
    found[f"{name} is contiguous"] = float(not a.is_contiguous())
for name, a, b in zip(("x", "weight"), torch.autograd.grad(own, (x, weight), slopes), wanted):
    found[f"gradient of {name}"] = apart(a, b)

# Only the third sample gets a gradient: none may arrive at the others, not even a small one.
own = kernels.convolution(x, weight, numbers, key)
third = [slope * (numbers[0] == 3)[None, :, None] for slope in slopes]
(arrived,) = torch.autograd.grad(own, (x,), third)
found["leaks"] = float(arrived[0, numbers[0] != 3].abs().max())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "train"), *filter(None, [environment.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_values_and_gradients_are_torchs(found: dict[str, float]) -> None:
    assert {name: error for name, error in found.items() if not error < 2e-6} == {}
    assert len(found) == 18


def test_a_convolutions_gradient_stays_within_its_sample(found: dict[str, float]) -> None:
    assert found["leaks"] == 0
