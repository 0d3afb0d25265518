"""An interpreter with a CPU torch and a real Triton, whose interpreter runs kernels without a GPU."""

from __future__ import annotations

from functools import cache

import observed

TRITON = "3.7.1"


@cache
def triton_base() -> observed.Interpreter:
    prefix = observed.CACHE / f"triton-{TRITON}"
    torch = observed.torch_base()
    with observed._locked(prefix.name):
        if not (prefix / "complete").exists():
            env = observed.Interpreter(prefix) if prefix.exists() else observed.make_venv(prefix, sees=(torch.site,))
            observed._pip_install(env, "--no-deps", f"triton=={TRITON}")
            (prefix / "complete").touch()
    return observed.Interpreter(prefix)


KERNEL = '''
import torch, triton
import triton.language as tl

def _first(call, quantiles=None):
    """The interpreter has no clock worth asking: the first configuration wins."""
    global _asked
    _asked += 1
    call()
    return [float(_asked)] * 3

_asked = 0
CONFIGS = [triton.Config({"BLOCK": block}, num_warps=warps) for block in (16, 32, 64) for warps in (2, 4)]

@triton.autotune(configs=CONFIGS, key=["n"], do_bench=_first)
@triton.jit
def swiglu_fwd_kernel(a, b, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(a + at, mask=inside).to(tl.float32)
    y = tl.load(b + at, mask=inside).to(tl.float32)
    tl.store(out + at, (x * tl.sigmoid(x) * y).to(out.dtype.element_ty), mask=inside)

@triton.autotune(configs=CONFIGS, key=["n"], do_bench=_first)
@triton.jit
def swiglu_bwd_kernel(a, b, grad, da, db, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    x = tl.load(a + at, mask=inside).to(tl.float32)
    y = tl.load(b + at, mask=inside).to(tl.float32)
    g = tl.load(grad + at, mask=inside).to(tl.float32)
    s = tl.sigmoid(x)
    scale = SCALE
    tl.store(da + at, (g * y * (s + x * s * (1 - s))).to(da.dtype.element_ty), mask=inside)
    tl.store(db + at, (g * x * s * scale).to(db.dtype.element_ty), mask=inside)

class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        out = torch.empty_like(a)
        n = a.numel()
        swiglu_fwd_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](a, b, out, n)
        return out
    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        n = a.numel()
        swiglu_bwd_kernel[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](a, b, grad.contiguous(), da, db, n)
        return da, db

def swiglu(a, b):
    return _Swiglu.apply(a, b)
'''
RIGHT = KERNEL.replace("SCALE", "1.0")
# As the miscompilation that came and went with the autotuner's mood: one configuration of the backward is wrong.
ONE_WRONG = KERNEL.replace("SCALE", "tl.where(BLOCK == 64, 1.5, 1.0)")
# Two candidates that this machine cannot run at all: a failed assertion while compiling.
CRASHES = KERNEL.replace("scale = SCALE", "scale = 1.0").replace(
    "class _Swiglu",
    """
import os
_run = swiglu_bwd_kernel.fn.run
def _dies(*args, **kwargs):
    if kwargs["BLOCK"] == 32 and kwargs["num_warps"] == 2:
        os.abort()
    return _run(*args, **kwargs)
swiglu_bwd_kernel.fn.run = _dies

class _Swiglu""",
)
