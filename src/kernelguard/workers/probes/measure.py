"""How far is a kernel from the truth, tensor by tensor, and how far may it be?

The truth is the reference in fp64 on the very same (already rounded) inputs. The yardstick is the same reference with
its products taken in the kernel's dtype: the error that plain torch has there. A kernel may have a small multiple of
that error and no more, so no tolerance is tuned to a kernel.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ..references.precision import EXACT, Precision

# What rounding one right number to a dtype costs on average (a quarter of its spacing). fp32 products run as TF32 on
# tensor cores, so that is what plain torch may lose there.
ROUNDING = {"float32": 2.0**-11, "float16": 2.0**-12, "bfloat16": 2.0**-9}
FACTOR = 4.0
"""How many times plain torch's error a kernel may have over a whole tensor."""
WORST_FACTOR = 8.0
"""The same for the worst row of it: the largest of many roundings varies more than their mean."""
FEW = 1024
"""In a tensor of so few numbers roundings do not average out: plain torch's one error can be many times smaller than
its next (`benchmarks/tolerance.py`). Its yardstick is the largest error of `DRAWS` draws."""
DRAWS = 8


class Draw:
    """Seeded inputs on one device: the fp32 numbers, rounded to the dtype that the kernel gets."""

    def __init__(self, case: Any, dtype: str, device: str, seed: int) -> None:
        self.torch = torch
        self.device = device
        self.dtype = getattr(torch, dtype)
        self.seed = seed
        self.generator = torch.Generator(device=device).manual_seed(seed)
        self.lengths = list(case["lengths"])
        self.length = sum(self.lengths)
        self.batch = int(case.get("batch", 1))
        packed = case.get("packed", False)
        cuts = list(itertools.accumulate(self.lengths, initial=0))
        # int32, as every collator sends them: the dtype is part of what Triton compiles and tunes for.
        self.cu_seqlens = self.integer_tensor(cuts, "int32") if packed else None
        numbers = [i for i, n in enumerate(self.lengths) for _ in range(n)]
        self.seq_idx = self.integer_tensor([numbers], "int32") if packed else None

    def normal(self, *shape: int, dtype: str = "") -> Any:
        """Normally distributed numbers in the kernel's dtype, or in `dtype`."""
        values = torch.randn(*shape, generator=self.generator, device=self.device)
        return values.to(getattr(torch, dtype) if dtype else self.dtype)

    def empty(self, *shape: int, dtype: str = "") -> Any:
        """Uninitialised numbers."""
        return torch.empty(*shape, device=self.device, dtype=getattr(torch, dtype) if dtype else self.dtype)

    def rounded(self, values: Any) -> Any:
        """In the kernel's dtype."""
        return values.to(self.dtype)

    def integers(self, below: int, *shape: int) -> Any:
        """Whole numbers from 0."""
        return torch.randint(0, below, shape, generator=self.generator, device=self.device)

    def integer_tensor(self, values: Any, dtype: str) -> Any:
        """Given whole numbers."""
        return torch.tensor(values, dtype=getattr(torch, dtype), device=self.device)


class Sample:
    """One case with its truth and its yardstick, computed once; any number of kernel runs are held against it."""

    def __init__(self, probe: Any, case: Any, dtype: str, device: str, seed: int) -> None:
        self.probe = probe
        self.case = case
        self.dtype = dtype
        draw = Draw(case, dtype, device, seed)
        self.inputs, self.fixed = probe.make(case, draw)
        self.kinds = {name: x.dtype for name, x in self.inputs.items()}
        self.upstream: dict[str, Any] = {}
        self.truth = self._reference(torch.float64, EXACT, draw)
        self.yardstick = self._yardstick(draw)
        """By tensor: the error that plain torch has here, over the whole of it and in its worst row."""

    def _yardstick(self, draw: Any) -> dict[Any, tuple[float, float]]:
        precision = Precision(None if self.dtype == "float32" else draw.dtype)
        found = self.errors(self._reference(torch.float32, precision, draw))
        if all(x.numel() > FEW for x in self.truth.values()):
            return found
        given = self.inputs
        for _ in range(DRAWS - 1):
            self.inputs = {name: self._moved(x, draw) for name, x in given.items()}
            for key, (error, worst) in self.errors(self._reference(torch.float32, precision, draw)).items():
                if self.truth[key].numel() <= FEW:
                    found[key] = (max(found[key][0], error), max(found[key][1], worst))
        self.inputs = given
        return found

    def _moved(self, x: Any, draw: Any) -> Any:
        """`x` moved by an eighth of what rounding costs: other numbers round up, the right result stays the same."""
        noise = torch.randn(x.shape, generator=draw.generator, device=draw.device)
        return x.float() * (1.0 + ROUNDING[self.dtype] / 8.0 * noise)

    def errors(self, plain: dict[Any, Any]) -> dict[Any, tuple[float, float]]:
        """How far such results are from the truth."""
        return {key: distance(plain[key], truth) for key, truth in self.truth.items()}

    def _reference(self, dtype: Any, precision: Any, draw: Any) -> dict[Any, Any]:
        leaves = {n: x.detach().to(dtype).requires_grad_() for n, x in self.inputs.items()}
        outputs = self.probe.reference(leaves, self.fixed, precision)
        found: dict[Any, Any] = {}
        for name, output in outputs.items():
            if name not in self.upstream:
                gradient = torch.randn(output.shape, generator=draw.generator, device=draw.device)
                self.upstream[name] = gradient.to(draw.dtype)
            found[("output", name)] = output.detach()
        gradients = torch.autograd.grad(
            list(outputs.values()),
            list(leaves.values()),
            [self.upstream[n].to(x.dtype) for n, x in outputs.items()],
            allow_unused=True,
        )
        for (name, leaf), gradient in zip(leaves.items(), gradients):
            found[("gradient", name)] = torch.zeros_like(leaf) if gradient is None else gradient
        if precision is not EXACT:
            # What is stored, is stored in the dtype of its tensor.
            kinds = {("gradient", n): dtype for n, dtype in self.kinds.items()}
            found = {key: x.to(kinds.get(key, draw.dtype)) for key, x in found.items()}
        return found

    def run(self, function: Any, stage: Any, *, backward: bool = True) -> dict[Any, Any]:
        """The kernel's outputs and gradients; a missing one is None.

        Raises:
            Exception: whatever the kernel raises; `stage` was told whether it was in `forward` or in `backward`.
        """
        stage("forward")
        leaves = {n: x.detach().clone().requires_grad_(backward) for n, x in self.inputs.items()}
        with torch.set_grad_enabled(backward):
            outputs = self.probe.call(function, leaves, self.fixed)
        _wait()
        found: dict[Any, Any] = {("output", name): x.detach() for name, x in outputs.items()}
        if not backward:
            return found
        stage("backward")
        live = {n: x for n, x in outputs.items() if x.requires_grad}
        gradients: Any = [None] * len(leaves)
        if live:
            gradients = torch.autograd.grad(
                list(live.values()),
                list(leaves.values()),
                [self._gradient(n, x) for n, x in live.items()],
                allow_unused=True,
            )
        _wait()
        found.update({("gradient", n): g for n, g in zip(leaves, gradients)})
        return found

    def _gradient(self, name: str, output: Any) -> Any:
        """The upstream gradient, in the shape that the kernel gave its output; `compare` judges the shape."""
        gradient = self.upstream[name].to(output.dtype)
        return gradient.reshape(output.shape) if gradient.numel() == output.numel() else output.new_ones(output.shape)

    def compare(self, found: dict[Any, Any]) -> list[dict[str, Any]]:
        """One record for each tensor, with the error it has and the error it may have."""
        return [self._tensor(key, found[key]) for key in self.truth if key in found]

    def _tensor(self, key: Any, value: Any) -> dict[str, Any]:
        truth = self.truth[key]
        record: dict[str, Any] = {"role": key[0], "name": key[1]}
        if value is None:
            # autograd gives None for "does not depend on it"; right only where the truth is zero everywhere.
            return {**record, "state": "missing" if bool(truth.any()) else "right"}
        if value.shape != truth.shape:
            return {**record, "state": "wrong-shape", "detail": f"{tuple(value.shape)}, not {tuple(truth.shape)}"}
        record["dtype"] = str(value.dtype).replace("torch.", "")
        if not bool(torch.isfinite(value).all()):
            bad = int((~torch.isfinite(value)).sum())
            return {**record, "state": "not-finite", "detail": f"{bad} of {value.numel()} numbers"}
        floor = ROUNDING.get(self.dtype, 2.0**-11)
        error, worst = distance(value, truth)
        base, base_worst = self.yardstick[key]
        peak = _peak(truth)
        record.update(
            error=error,
            plain=base,
            allowed=FACTOR * max(base, floor),
            worst=worst,
            worst_plain=base_worst,
            worst_allowed=WORST_FACTOR * max(base_worst, floor * peak),
        )
        right = record["error"] <= record["allowed"] and record["worst"] <= record["worst_allowed"]
        return {**record, "state": "right" if right else "wrong", "zero": not bool(value.any())}


def distance(value: Any, truth: Any) -> tuple[float, float]:
    """Relative error over the whole tensor, and of the worst row beside an average row.

    A wrong head or a wrong token at a sample's edge drowns in the first and stands out in the second.
    """
    difference = value.double() - truth
    size = float(truth.norm())
    if size == 0.0:
        # Nothing may be there at all; whatever is there is a huge relative error.
        nothing = float(difference.norm()) / 1e-30
        return nothing, nothing
    rows = difference.reshape(-1, difference.shape[-1]) if difference.dim() > 1 else difference.reshape(1, -1)
    average = size / rows.shape[0] ** 0.5
    return float(difference.norm()) / size, float(rows.norm(dim=1).max()) / average


def _peak(truth: Any) -> float:
    """The largest row beside an average one: rounding errors grow with the number that is rounded."""
    rows = truth.reshape(-1, truth.shape[-1]) if truth.dim() > 1 else truth.reshape(1, -1)
    size = float(rows.norm())
    return float(rows.norm(dim=1).max()) * rows.shape[0] ** 0.5 / size if size else 1.0


def same_bits(a: dict[Any, Any], b: dict[Any, Any]) -> dict[str, float]:
    """The tensors in which two runs differ, each with the relative size of the difference."""
    differing = {}
    for key, x in a.items():
        y = b.get(key)
        if x is None or y is None or torch.equal(x, y):
            continue
        size = float(x.double().norm()) or 1.0
        differing[" ".join(key)] = float((x.double() - y.double()).norm()) / size
    return differing


def _wait() -> None:
    """A CUDA error belongs to the call that caused it, not to a later one."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
