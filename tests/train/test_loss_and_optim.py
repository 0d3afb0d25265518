from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from kernelguard_train import loss, optim
from kernelguard_train.config import OptimConfig
from kernelguard_train.errors import ModelError, NonFiniteError


def tensors(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 16, generator=draw, dtype=torch.float64)
    weight = torch.randn(50, 16, generator=draw, dtype=torch.float64)
    return hidden, weight, torch.randint(0, 50, (rows,), generator=draw)


@pytest.mark.parametrize("chunk", [1, 7, 100])
def test_chunked_loss_and_gradients_are_those_of_cross_entropy(chunk: int) -> None:
    hidden, weight, targets = tensors(23)
    ours = [hidden.clone().float().requires_grad_(), weight.clone().float().requires_grad_()]
    theirs = [hidden.clone().float().requires_grad_(), weight.clone().float().requires_grad_()]
    total = loss.linear_cross_entropy(ours[0], ours[1], targets, chunk)
    expected = functional.cross_entropy(theirs[0] @ theirs[1].T, targets, reduction="sum")
    (total * 0.25).backward()
    (expected * 0.25).backward()
    torch.testing.assert_close(total, expected)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_a_scale_is_not_rounded_to_the_gradients_type() -> None:
    """1/n in bf16 is off by up to 2^-9: the same factor on all gradients of a step, and another one the next step."""
    hidden, weight, targets = tensors(23)
    found = {}
    for scale in (1.0, 1 / 515):
        ours = [hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()]
        loss.linear_cross_entropy(ours[0], ours[1], targets, 100, scale=scale).backward()
        found[scale] = [tensor.grad.float() / scale for tensor in ours if tensor.grad is not None]
    for whole, scaled in zip(found[1.0], found[1 / 515], strict=True):
        factor = float((whole * scaled).sum() / (whole * whole).sum())
        assert abs(factor - 1) < 2**-12, "single values are rounded, their common factor is not"
    assert abs(float(torch.tensor(1 / 515).bfloat16()) * 515 - 1) > 2**-10, "the premise: this one would be off"


def test_no_target_gives_zero_and_zero_gradients() -> None:
    hidden, weight, targets = (t.float().requires_grad_() if t.is_floating_point() else t for t in tensors(0))
    total = loss.linear_cross_entropy(hidden, weight, targets, 8)
    total.backward()
    assert float(total.detach()) == 0
    assert weight.grad is not None
    assert float(weight.grad.abs().max()) == 0


def test_no_more_logits_exist_than_a_chunk() -> None:
    seen: list[int] = []

    def kernel(logits: torch.Tensor, targets: torch.Tensor) -> Any:
        seen.append(len(logits))
        return loss._chunk(logits, targets)

    hidden, weight, targets = tensors(23)
    loss.linear_cross_entropy(hidden.float().requires_grad_(), weight.float(), targets, 8, kernel)
    assert seen == [8, 8, 7]


def test_an_output_layer_is_adopted_in_place() -> None:
    head = nn.Linear(16, 50, bias=False)
    weight = head.weight
    adopted = loss.adopt(head, chunk=4, implementation="chunked", compiled=False)
    assert adopted is head
    assert adopted.weight is weight
    hidden, _, targets = tensors(9)
    logits = adopted(hidden.float())
    torch.testing.assert_close(
        adopted(hidden.float(), targets), functional.cross_entropy(logits, targets, reduction="sum")
    )
    with pytest.raises(ModelError, match="a linear layer without bias was expected"):
        loss.adopt(nn.Linear(4, 4), chunk=4, implementation="chunked", compiled=False)


def test_bf16_weights_lose_most_updates_at_1e_5_and_float32_weights_none() -> None:
    """Why parameters are float32: an update of 1e-5 is less than half a bf16 step of most weights."""
    moved = {}
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        model = nn.Linear(256, 256, bias=False)
        nn.init.normal_(model.weight, std=0.02)
        model.to(dtype)
        before = model.weight.detach().clone()
        optimizer = optim.make_optimizer(model, OptimConfig(lr=1e-5), torch.device("cpu"))
        gradient = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
        for _ in range(5):
            model.weight.grad = gradient.to(dtype)
            optimizer.step()
        moved[dtype] = float((model.weight.detach() != before).float().mean())
    assert moved[torch.float32] == 1.0
    assert moved[torch.bfloat16] < 0.5


@pytest.mark.parametrize(("decay", "middle"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_the_rate_rises_then_falls(decay: Any, middle: float) -> None:
    config = OptimConfig(lr=2.0, warmup=0.2, decay=decay, min_lr_ratio=0.1)
    assert optim.learning_rate(config, 0.1) == pytest.approx(1.0)
    assert optim.learning_rate(config, 0.2) == pytest.approx(2.0)
    assert optim.learning_rate(config, 0.6) == pytest.approx(2.0 * middle)
    assert optim.learning_rate(config, 1.0) == pytest.approx(2.0 if decay == "constant" else 0.2)
    assert optim.learning_rate(OptimConfig(lr=2.0, warmup=0.0), 1e-9) == pytest.approx(2.0)


def test_clipping_scales_all_gradients_by_the_global_norm() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    gradients = [parameter.grad for parameter in parameters[:2]]
    norm = float(optim.gradient_norm(parameters))
    assert norm == 5
    untouched = [gradient._version for gradient in gradients]
    for largest in (0, 5.0, 10.0):
        optim.clip_gradients(parameters, norm, largest)
    assert [gradient._version for gradient in gradients] == untouched
    assert gradients[1].tolist() == [4.0]
    optim.clip_gradients(parameters, norm, 1.0)
    assert [round(float(x), 4) for gradient in gradients for x in gradient] == [0.6, 0.0, 0.8]
    assert float(optim.gradient_norm(parameters)) == pytest.approx(1, rel=1e-4)
    optim.clip_gradients(parameters[2:], norm, 1.0)  # None of them has a gradient.


def test_vectors_are_not_decayed() -> None:
    model = nn.LayerNorm(4)
    model.matrix = nn.Parameter(torch.ones(4, 4))
    optimizer = optim.make_optimizer(model, OptimConfig(lr=0.1, weight_decay=0.5), torch.device("cpu"))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert float(model.weight.detach().max()) == 1
    assert float(model.matrix.detach().max()) == pytest.approx(0.95)


def test_the_guard_refuses_and_then_gives_up() -> None:
    guard = optim.NonFiniteGuard(3)
    assert guard.accepts(1.0, 1.0)
    assert not guard.accepts(math.nan, 1.0)
    assert not guard.accepts(1.0, math.inf)
    assert guard.accepts(1.0, 1.0), "a finite step starts the count again"
    assert not guard.accepts(math.inf, 1.0)
    assert not guard.accepts(math.nan, math.nan)
    with pytest.raises(NonFiniteError, match="not finite for 3 steps in a row"):
        guard.accepts(math.nan, math.nan)
