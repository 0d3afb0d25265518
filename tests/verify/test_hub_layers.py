"""A layer that the hub replaces is measured against what it replaces, in a real model, swapped by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import configs
import observed
from kernelguard.observe.process import run_worker
from kernelguard.verify.requests import Case, ProbeRequest
from kernelguard.verify.results import interpret
from kernelguard.verify.values import Outcome, ProbeResult
from programs import tool

pytestmark = [pytest.mark.observed, pytest.mark.online, pytest.mark.thorough]

RELEASE = "5.17.0"
"""The newest of the tested releases whose `kernels` package can be had."""
LAYER = "RMSNormZeroCentered"

KERNEL = """
import torch
from torch import nn

def norm(x, weight, eps):
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (1.0 + weight.float())).type_as(x)

class Right(nn.Module):
    def forward(self, x):
        return norm(x, self.weight, self.eps)

class Forgetful(nn.Module):
    '''Computes the right output and loses the gradient of the weight.'''
    def forward(self, x):
        return norm(x, self.weight.detach(), self.eps)

class Plain(nn.Module):
    '''Takes the weight for what it is, and not for what is to be added to 1.'''
    def forward(self, x):
        return norm(x, self.weight - 1.0, self.eps)

class Raising(nn.Module):
    def forward(self, x):
        raise RuntimeError("no kernel image is available")
"""
ABOUT = {
    "name": "hub-repository",
    "id": "hub_repository",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}
# What transformers' own table would have, were there a build of it for a CPU.
MAPPING = """
from pathlib import Path
from kernels import LocalLayerRepository, Mode
from transformers.integrations import hub_kernels

real = hub_kernels.get_kernel_mapping_transformers
here = LocalLayerRepository(Path(__file__).parent / "hub_repository", layer_name={name!r})
hub_kernels.get_kernel_mapping_transformers = lambda: {{**real(), {layer!r}: {{"cpu": {{Mode.TRAINING: here}}}}}}
"""


def probed(folder: Path, name: str, *, layer: str = LAYER, cases: tuple[Case, ...] | None = None) -> ProbeResult:
    files = {
        "mapped.py": MAPPING.format(layer=LAYER, name=name),
        "hub_repository/build/torch-universal/__init__.py": "from . import layers\n",
        "hub_repository/build/torch-universal/layers.py": KERNEL,
        "hub_repository/build/torch-universal/metadata.json": json.dumps(ABOUT),
    }
    env = observed.environment(folder / "env", RELEASE, files)
    site = tool("kernels-0.16.2", "kernels==0.16.2").parent.parent / observed._LIB
    # Behind everything of the interpreter's own.
    (env.site / "zz_kernels.pth").write_text(f"{site}\n")
    config = dict(configs.QWEN3_5)
    request = ProbeRequest(
        symbol=layer,
        package="kernels",
        module="mapped",
        op="layer",
        dtype="bfloat16",
        cases=cases if cases is not None else (Case(name="odd", lengths=(37,)),),
        model={"parts": [{"model_type": config["model_type"], "raw": config}]},
    )
    return interpret(request, [run_worker(str(env.python), "probe", request.to_json(device="cpu"), timeout=120)])


def test_a_right_replacement_is_right(tmp_path: Path) -> None:
    found = probed(tmp_path, "Right")
    assert found.outcome is Outcome.RIGHT, found.reason
    assert found.target.endswith("Right.forward")
    [case] = found.cases
    assert {t.label for t in case.tensors} == {"output 0", "gradient of input 0", "gradient of weight"}
    assert all(t.error is not None and t.allowed is not None and t.error <= t.allowed for t in case.tensors)


@pytest.mark.parametrize(("name", "tensor"), [("Forgetful", "gradient of weight"), ("Plain", "output 0")])
def test_a_wrong_one_is_named_with_its_tensor(tmp_path: Path, name: str, tensor: str) -> None:
    found = probed(tmp_path, name)
    assert found.outcome is Outcome.WRONG, found
    assert tensor in {t.label for t in found.cases[0].tensors if t.state != "right"}


def test_one_that_raises_is_a_fault_of_the_kernel(tmp_path: Path) -> None:
    found = probed(tmp_path, "Raising")
    assert found.outcome is Outcome.RAISED
    assert "no kernel image is available" in found.reason


def test_what_the_hub_did_not_replace_cannot_be_told(tmp_path: Path) -> None:
    found = probed(tmp_path, "Right", layer="RMSNormGated")
    assert found.outcome is Outcome.REFERENCE
    assert "replaces no RMSNormGated on cpu" in found.reason


def test_a_name_that_the_model_does_not_have_cannot_be_told(tmp_path: Path) -> None:
    found = probed(tmp_path, "Right", layer="NoSuchLayer")
    assert found.outcome is Outcome.REFERENCE
    assert f"it knows Qwen3_5GatedDeltaNet, RMSNormGated, {LAYER}" in found.reason


def test_without_cases_it_is_loaded_and_nothing_is_executed(tmp_path: Path) -> None:
    assert probed(tmp_path, "Raising", cases=()).outcome is Outcome.LOADED
