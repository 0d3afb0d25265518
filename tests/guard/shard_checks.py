"""Run in two ranks by torchrun: `shard_checks.py FOLDER` trains tiny models under a real fully_shard, one way each.

Each rank writes one JSON object: case -> what the guard said, how the step ended, and whether anything of it is left.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from kernelguard.guard.watch import Refused, Watch

V, D, T = 16, 8, 6
APPLY = torch.autograd.Function.__dict__["apply"]


class FusedLoss(torch.autograd.Function):
    """As fused linear losses are made: the head's product and its gradients in one, from the weight itself."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        with torch.enable_grad():
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = torch.nn.functional.cross_entropy(h @ w.t(), labels % w.shape[0])
            grads = torch.autograd.grad(loss, (h, w))
        ctx.save_for_backward(*grads)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad):
        h, w = ctx.saved_tensors
        return h * grad, w * grad, None


class ThatTakesItsPart(FusedLoss):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        return FusedLoss.forward(ctx, hidden, weight.to_local(), labels)

    @staticmethod
    def backward(ctx, grad):
        return ctx.saved_tensors[0] * grad, None, None


class ThatGathers(ThatTakesItsPart):
    @staticmethod
    def forward(ctx, hidden, weight, labels):
        return FusedLoss.forward(ctx, hidden, weight.full_tensor(), labels)


alias = FusedLoss.apply
ALIAS = alias


class PreTrainedModel(torch.nn.Module):
    """What the guard looks for by name."""


class Model(PreTrainedModel):
    def __init__(self, loss, inside):
        super().__init__()
        self.config = types.SimpleNamespace(model_type="tiny")
        self.embed = torch.nn.Embedding(V, D)
        self.body = torch.nn.Linear(D, D)
        self.lm_head = torch.nn.Linear(D, V, bias=False)
        self.loss, self.inside = loss, inside

    def forward(self, ids, labels):
        hidden = self.body(self.embed(ids))
        return self.loss(hidden, self.lm_head, labels) if self.inside else hidden


def reads(function, prepare=lambda weight: weight):
    return lambda hidden, head, labels: function.apply(hidden, prepare(head.weight), labels)


def in_other_words(hidden, head, labels):
    return alias(hidden, head.weight, labels)


def plain_operators(hidden, head, labels):
    return torch.nn.functional.cross_entropy(hidden @ head.weight.t(), labels)


def unsharded(hidden, head, labels):
    head.unshard()
    return FusedLoss.apply(hidden, head.weight, labels)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@torch.compile(fullgraph=True, backend="aot_eager")
def doubled(x):
    return Doubled.apply(x)


def beside_a_compiled_function(hidden, head, labels):
    return in_the_head(doubled(hidden), head, labels)


def in_the_head(hidden, head, labels):
    return torch.nn.functional.cross_entropy(head(hidden), labels)


# (what reads the head's weight, whether the head is a unit of its own, whether the model's own forward does it)
CASES = {
    "in-the-root": (reads(FusedLoss), False, True),
    "in-the-root-after-the-call": (reads(FusedLoss), False, False),
    "through-the-head": (in_the_head, True, True),
    "beside-a-compiled-function": (beside_a_compiled_function, True, True),
    "gathered-before": (reads(FusedLoss, lambda weight: weight.full_tensor()), True, True),
    "gathered-inside": (reads(ThatGathers), True, True),
    "unsharded-before": (unsharded, True, True),
    "raises": (reads(FusedLoss), True, True),
    "raises-under-another-name": (in_other_words, True, True),
    "raises-after-the-call": (reads(FusedLoss), True, False),
    "takes-its-part-before": (reads(FusedLoss, lambda weight: weight.to_local()), True, True),
    "takes-its-part-after-the-call": (reads(FusedLoss, lambda weight: weight.to_local()), True, False),
    "takes-its-part-inside": (reads(ThatTakesItsPart), True, True),
    "plain-operators": (plain_operators, True, True),
}


def train(loss, own_unit, inside):
    torch.manual_seed(0)
    model = Model(loss, inside).train()
    for unit in (model.body, *([model.lm_head] if own_unit else []), model):
        fully_shard(unit)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch = Watch(None, on_refusal="raise")
    watch.wait_for(model, optimizer)
    ids = torch.arange(T) + dist.get_rank()
    ended = "trained"
    try:
        for _ in range(2):
            out = model(ids, ids)
            (out if inside else loss(out, model.lm_head, ids)).backward()
            optimizer.step()
            optimizer.zero_grad()
    except Refused as refused:
        ended = str(refused.code)
    watch.close()
    return {
        "findings": [[f.row, f.status, f.what] for f in watch.findings],
        "ended": ended,
        "left": torch.autograd.Function.__dict__["apply"] is not APPLY or alias is not ALIAS,
    }


def main(folder):
    dist.init_process_group("gloo")
    answers = {name: train(*case) for name, case in CASES.items()}
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(answers))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
