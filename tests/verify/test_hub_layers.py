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
WITH_OUTPUT = ("output 0", "gradient of input 0", "gradient of weight")

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

class ForHiddenStates(nn.Module):
    '''Right for the hidden size, and wrong for the heads, which the model sends through the same name.'''
    def forward(self, x):
        y = norm(x, self.weight, self.eps)
        return y if x.dim() == 3 else 1.1 * y

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


# The same with a repository of the hub, where that is out of reach.
REMOTE = """
import os
os.environ[{variable!r}] = {value!r}
os.environ["HF_HOME"] = {home!r}
from kernels import LayerRepository, Mode
from transformers.integrations import hub_kernels

real = hub_kernels.get_kernel_mapping_transformers
there = LayerRepository("kernels-community/liger_kernels", layer_name="LigerRMSNorm", version=1)
hub_kernels.get_kernel_mapping_transformers = lambda: {{**real(), {layer!r}: {{"cpu": {{Mode.TRAINING: there}}}}}}
"""


def probed(
    folder: Path, name: str, *, layer: str = LAYER, cases: tuple[Case, ...] | None = None, mapped: str = ""
) -> ProbeResult:
    files = {
        "mapped.py": mapped or MAPPING.format(layer=LAYER, name=name),
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
    layers = ("model.layers.0.input_layernorm", "model.layers.1.self_attn.q_norm", "model.layers.1.self_attn.k_norm")
    assert {t.label for t in case.tensors} == {f"{tensor} of {layer}" for tensor in WITH_OUTPUT for layer in layers}
    assert all(t.error is not None and t.allowed is not None and t.error <= t.allowed for t in case.tensors)


@pytest.mark.parametrize(("name", "tensor"), [("Forgetful", "gradient of weight"), ("Plain", "output 0")])
def test_a_wrong_one_is_named_with_its_tensor(tmp_path: Path, name: str, tensor: str) -> None:
    found = probed(tmp_path, name)
    assert found.outcome is Outcome.WRONG, found
    wrong = {t.label for t in found.cases[0].tensors if t.state != "right"}
    assert {label for label in wrong if label.startswith(tensor)}


def test_each_use_of_a_name_is_measured(tmp_path: Path) -> None:
    """The norm of a head goes through the same kernel as that of the hidden states, in another shape."""
    found = probed(tmp_path, "ForHiddenStates")
    assert found.outcome is Outcome.WRONG, found
    heads = {f"{role} of model.layers.1.self_attn.{norm}" for norm in ("q_norm", "k_norm") for role in WITH_OUTPUT}
    assert {t.label for t in found.cases[0].tensors if t.state != "right"} == heads


@pytest.mark.parametrize(("variable", "value"), [("HF_ENDPOINT", "http://127.0.0.1:9"), ("HF_HUB_OFFLINE", "1")])
def test_a_hub_out_of_reach_is_no_fault_of_a_kernel(tmp_path: Path, variable: str, value: str) -> None:
    mapped = REMOTE.format(variable=variable, value=value, home=str(tmp_path / "hub"), layer=LAYER)
    found = probed(tmp_path, "", mapped=mapped)
    assert found.outcome is Outcome.UNREACHABLE, found.reason


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
