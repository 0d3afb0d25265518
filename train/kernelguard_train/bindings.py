"""Which functions do the linear-attention layers really run on, and do those keep packed samples apart?

transformers decides that at import, from what happens to be installed, and falls back without an error. Here it is
decided explicitly: every function is bound by name in the model's own module, a fused kernel that is missing is an
error, and each binding is tried on two packed sequences before the model is used.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from kernelguard_train.errors import ModelError

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = ("torch_chunk_gated_delta_rule", "chunk_gated_delta_rule")
SCAN = "mamba2_chunk_scan"
FUSED_SCAN = "mamba2_split_conv1d_scan_combined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """One function of a model's module and what it was bound to."""

    name: str
    to: str

    def __str__(self) -> str:
        return f"{self.name} -> {self.to}"


def bind(model: torch.nn.Module, *, fused: bool, convolution: str) -> list[Bound]:
    """Binds every linear-attention function that the model's layers use.

    Raises:
        ModelError: when a fused kernel is wanted and cannot be imported; the original exception is its cause.
    """
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    return [
        bound
        for module in sorted((m for m in modules if m.__name__.startswith("transformers.models.")), key=str)
        for bound in _bind_module(module, fused=fused, convolution=convolution)
    ]


def _bind_module(module: ModuleType, *, fused: bool, convolution: str) -> list[Bound]:
    found = [name for name in (CONVOLUTION, *DELTA_RULE, SCAN, FUSED_SCAN) if callable(getattr(module, name, None))]
    bound = []
    for name in found:
        torch_function = inspect.unwrap(getattr(module, name))
        function, label = (_fused if fused else _reference)(name, torch_function, convolution)
        if function is None:
            continue
        # `__wrapped__` leads back to the torch function, so that binding again starts from the same place;
        # `__kernel__`, where there is one, tells whoever looks (kernelguard's guard) what is really called.
        function.__wrapped__ = torch_function  # type: ignore[attr-defined]
        setattr(module, name, function)
        bound.append(Bound(name=f"{module.__name__.rpartition('.')[2]}.{name}", to=label))
    return bound


# --- the reference: the torch function of transformers, one segment at a time ------------------------------------


def _reference(name: str, function: Callable[..., Any], _convolution: str) -> tuple[Callable[..., Any] | None, str]:
    if name == FUSED_SCAN:  # a shortcut that the torch path does not have; it says so by returning None
        return (lambda *_args, **_kwargs: None), "nothing (the torch path has no such shortcut)"
    make = {CONVOLUTION: segmented_convolution, SCAN: segmented_scan}.get(name, segmented_delta_rule)
    return make(function), "the torch function, segment by segment (reference)"


def _segments(boundaries: torch.Tensor | None, seq_idx: torch.Tensor | None, length: int) -> list[tuple[int, int]]:
    if boundaries is not None:
        edges = boundaries.tolist()
    elif seq_idx is not None:
        edges = [0, *(torch.nonzero(seq_idx[0].diff()).flatten() + 1).tolist(), length]
    else:
        return [(0, length)]
    return list(zip(edges, edges[1:], strict=False))  # noqa: RUF007 - of plain ints


def segmented_convolution(function: Callable[..., Any]) -> Callable[..., Any]:
    """A causal convolution `[batch, channels, time]` that starts anew with every segment of `seq_idx`."""

    def convolve(
        x: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, seq_idx: Any = None, **_: Any
    ) -> torch.Tensor:
        parts = _segments(None, seq_idx, x.shape[-1])
        return torch.cat([function(x[..., a:b], weight, bias, activation=activation) for a, b in parts], dim=-1)

    return convolve


def segmented_delta_rule(function: Callable[..., Any]) -> Callable[..., Any]:
    """A gated delta rule `[batch, time, heads, size]` whose state is zero at every boundary of `cu_seqlens`."""
    known = set(inspect.signature(function).parameters) - {"cu_seqlens"}

    def recur(*args: Any, g: Any, beta: Any, cu_seqlens: Any = None, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        options = {name: value for name, value in kwargs.items() if name in known}
        parts = _segments(cu_seqlens, None, g.shape[1])
        if len(parts) == 1:
            result: tuple[torch.Tensor, Any] = function(*args, g=g, beta=beta, **options)
            return result
        outputs = [function(*(x[:, a:b] for x in args), g=g[:, a:b], beta=beta[:, a:b], **options)[0] for a, b in parts]
        return torch.cat(outputs, dim=1), None

    return recur


def segmented_scan(function: Callable[..., Any]) -> Callable[..., Any]:
    """A Mamba-2 scan `[batch, time, heads, size]` whose state is zero at every boundary of `seq_idx`."""
    known = set(inspect.signature(function).parameters)

    def scan(x: Any, dt: Any, A: Any, B: Any, C: Any, *, seq_idx: Any = None, **kwargs: Any) -> Any:  # noqa: N803
        options = {name: value for name, value in kwargs.items() if name in known}
        parts = _segments(None, seq_idx, x.shape[1])
        if len(parts) == 1:
            return function(x, dt, A, B, C, **options)
        outputs = [function(x[:, a:b], dt[:, a:b], A, B[:, a:b], C[:, a:b], **options) for a, b in parts]
        return torch.cat(outputs, dim=1)

    return scan


# --- the fused kernels ---------------------------------------------------------------------------------------------


def _fused(name: str, _function: Callable[..., Any], convolution: str) -> tuple[Callable[..., Any] | None, str]:
    if name == CONVOLUTION:
        return _fused_convolution(convolution)
    if name in DELTA_RULE:
        kernel = _imported("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "flash-linear-attention")
        return _keeping_known(kernel), "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    path = "mamba_ssm.ops.triton.ssd_combined"
    kernel = _imported(path, "mamba_chunk_scan_combined" if name == SCAN else FUSED_SCAN.replace("2", ""), "mamba-ssm")
    return _keeping_known(kernel), f"{path}.{kernel.__name__}"


def _fused_convolution(which: str) -> tuple[Callable[..., Any], str]:
    if which != "fla":
        try:
            kernel = _imported("causal_conv1d", CONVOLUTION, "causal-conv1d")
        except ModelError:
            if which == "causal_conv1d":
                raise
        else:
            return _channels_last(kernel), "causal_conv1d.causal_conv1d_fn"
    for module in ("fla.modules.causal_conv1d", "fla.modules.conv", "fla.modules.convolution"):  # 0.6, 0.5, older
        try:
            kernel = _imported(module, "causal_conv1d", "flash-linear-attention")
        except ModelError as error:
            problem = error
        else:
            return _fla_convolution(kernel), f"{module}.causal_conv1d"
    raise problem


def _imported(module: str, name: str, distribution: str) -> Callable[..., Any]:
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ModelError(
            f"the fused kernel {module}.{name} cannot be had: {type(error).__name__}: {error}. "
            f"Install {distribution}, or set model.kernels=reference (correct, and many times slower)"
        ) from error
    return found


def _keeping_known(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel, called with those of the model's keyword arguments that it takes."""
    known = inspect.signature(kernel).parameters

    def call(*args: Any, **kwargs: Any) -> Any:
        return kernel(*args, **{name: value for name, value in kwargs.items() if name in known})

    call.__kernel__ = kernel  # type: ignore[attr-defined]
    return call


def _channels_last(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """causal-conv1d takes `seq_idx` only when channels are the innermost dimension, which a transpose is."""

    def convolve(
        x: torch.Tensor, weight: Any, bias: Any = None, activation: Any = None, seq_idx: Any = None, **_: Any
    ) -> Any:
        if x.stride(1) != 1:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        return kernel(x, weight, bias, seq_idx=seq_idx, activation=activation)

    convolve.__kernel__ = kernel  # type: ignore[attr-defined]
    return convolve


def _fla_convolution(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The convolution of fla is `[batch, time, channels]` and knows boundaries, not `seq_idx`."""
    known = inspect.signature(kernel).parameters

    def convolve(
        x: torch.Tensor,
        weight: Any,
        bias: Any = None,
        *,
        activation: Any = None,
        seq_idx: Any = None,
        cu_seq_lens_q: Any = None,
        cu_seqlens_cpu: Any = None,
        **_: Any,
    ) -> Any:
        if seq_idx is not None and cu_seq_lens_q is None:
            raise ValueError("fla's convolution needs cu_seq_lens_q to keep packed samples apart")
        options = {"cu_seqlens": cu_seq_lens_q, "cu_seqlens_cpu": cu_seqlens_cpu}
        output = kernel(
            x.transpose(1, 2),
            weight,
            bias,
            activation=activation,
            **{name: value for name, value in options.items() if name in known},
        )
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)

    convolve.__kernel__ = kernel  # type: ignore[attr-defined]
    return convolve
