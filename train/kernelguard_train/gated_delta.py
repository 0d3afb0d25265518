"""How is a gated delta layer computed without the copies that its author's code makes?

transformers repeats query and key heads to as many as there are value heads, splits and copies what the convolution
made, and norms and gates the output in a dozen float32 steps. The fused kernels take fewer key heads as they are, the
trainer's own convolution writes its parts where they are wanted, and fla has the gated norm as one kernel. This is the
same layer around the delta rule that `bindings` bound, for packed batches.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from packaging.version import InvalidVersion, Version
from torch import nn
from torch.nn import functional

from kernelguard_train.errors import ModelError

_PARTS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
_TWO_HEAD_COUNTS = Version("0.5.0")
HANDED_ON_SINCE = Version("5.23")
"""From this transformers on its own layers, too, leave key heads as they are; before, they repeated them."""
_SIZES = ("key_dim", "value_dim", "head_k_dim", "head_v_dim", "activation", "layer_idx")


def suits(module: nn.Module) -> bool:
    """Whether a module is a gated delta layer built as Qwen3.5's is: separate projections, one convolution."""
    return all(hasattr(module, name) for name in (*_PARTS, *_SIZES)) and getattr(module.conv1d, "bias", 1) is None


def gates(a: torch.Tensor, b: torch.Tensor, log_rate: torch.Tensor, bias: torch.Tensor) -> tuple[Any, Any]:
    """The logarithm of what the state keeps (float32), and how much of a new value is written."""
    return -log_rate.float().exp() * functional.softplus(a.float() + bias.float()), b.sigmoid()


def rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary embedding of the first `cos.shape[-1]` entries of each head."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    size = cos.shape[-1]

    def one(x: torch.Tensor) -> torch.Tensor:
        turning, rest = x[..., :size], x[..., size:]
        low, high = turning.chunk(2, dim=-1)
        turned = turning * cos + torch.cat((-high, low), dim=-1) * sin
        return torch.cat((turned, rest), dim=-1)

    return one(q), one(k)


Convolution = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
Projection = Callable[..., tuple[torch.Tensor, ...]]


def adopt(
    layers: Iterable[nn.Module], *, compiled: bool, dynamic: bool, own_convolution: bool, project: Projection | None
) -> str:
    """Gives every gated delta layer this forward pass, in place; returns what was done, or nothing.

    Raises:
        ModelError: when fla, whose gated norm it needs, cannot be imported, or takes key heads for value heads.
    """
    found = [module for layer in layers for module in layer.modules() if suits(module)]
    if not found:
        return ""
    check_heads(found)
    gated_norm = _gated_norm()
    from kernelguard_train import kernels  # noqa: PLC0415 - imports Triton, as fla does

    make_gates = torch.compile(gates, dynamic=dynamic) if compiled else gates
    own = 0
    for module in found:
        sizes: Any = module
        fits = own_convolution and sizes.activation in {"silu", "swish"}
        fits = fits and kernels.convolution_suits(sizes.conv1d.weight.squeeze(1), sizes.key_dim)
        own += fits
        bind(module, gated_norm, make_gates, kernels.packed_convolution if fits else None, project)
    return f"{len(found)} gated delta layers without repeated heads, {own} with the trainer's own convolution"


def check_heads(modules: Iterable[nn.Module]) -> None:
    """Refuses an fla that knows one number of heads: with fewer key heads it computes wrong numbers, and says nothing.

    Read in fla-core 0.4.2 and 0.5.0: ops/gated_delta_rule/chunk.py.

    Raises:
        ModelError: when one of the modules is a layer with fewer key heads than value heads, and fla is such a one.
    """
    sizes: list[Any] = [module for module in modules if suits(module)]
    if all(s.key_dim // s.head_k_dim == s.value_dim // s.head_v_dim for s in sizes):
        return
    try:
        import fla  # noqa: PLC0415 - GPU only
    except ImportError:
        return  # said where it is needed
    version = str(getattr(fla, "__version__", "of unknown version"))
    try:
        known = Version(version)
    except InvalidVersion as error:
        raise ModelError(
            f"flash-linear-attention {version}: whether it knows more value heads than key heads, as this model has, "
            f"cannot be told; {_TWO_HEAD_COUNTS} or later does"
        ) from error
    if known < _TWO_HEAD_COUNTS:
        raise ModelError(
            f"flash-linear-attention {version} takes the number of key heads for that of value heads, which this model "
            f"has more of, and computes wrong values: {_TWO_HEAD_COUNTS} or later is needed"
        )


def _gated_norm() -> Callable[..., Any]:
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated  # noqa: PLC0415 - GPU only
    except ImportError:
        try:
            from fla.modules.fused_norm_gate import rms_norm_gated  # noqa: PLC0415 - before 0.6
        except ImportError as error:
            raise ModelError(f"model.fused = on needs flash-linear-attention: {error}") from error
    found: Callable[..., Any] = rms_norm_gated
    return found


def _through(module: Any, home: Any) -> Convolution:
    """The convolution that `bindings` bound, in the shape of the trainer's own."""

    def convolve(mixed: torch.Tensor, weight: torch.Tensor, numbers: torch.Tensor, key: int, **kwargs: Any) -> Any:
        made: Any = home.causal_conv1d_fn(
            mixed.transpose(1, 2), weight, None, activation=module.activation, seq_idx=numbers, **kwargs
        )
        return made.transpose(1, 2).split([key, key, module.value_dim], dim=-1)

    return convolve


def bind(
    module: nn.Module,
    gated_norm: Callable[..., Any],
    make_gates: Callable[..., Any] = gates,
    convolution: Convolution | None = None,
    project: Projection | None = None,
) -> None:
    """Gives one layer this forward pass."""
    home = sys.modules[type(module).__module__]
    rule_name = "chunk_gated_delta_rule" if hasattr(home, "chunk_gated_delta_rule") else "torch_chunk_gated_delta_rule"
    bound = _through(module, home)

    def forward(
        self: Any, hidden_states: torch.Tensor, cache_params: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        boundaries, numbers = kwargs.get("cu_seq_lens_q"), kwargs.pop("seq_idx", None)
        if cache_params is not None or attention_mask is not None or boundaries is None or numbers is None:
            raise ValueError(f"{type(self).__name__}: the fused layer takes packed batches in training, nothing else")
        shape = hidden_states.shape[:2]
        parts = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        mixed, gate, b, a = project(hidden_states, *parts) if project else (part(hidden_states) for part in parts)
        weight = self.conv1d.weight.squeeze(1)
        if convolution:
            query, key, value = convolution(mixed, weight, numbers, self.key_dim)
        else:
            query, key, value = bound(mixed, weight, numbers, self.key_dim, **kwargs)
        log_kept, written = make_gates(a, b, self.A_log, self.dt_bias)
        kwargs.pop("cu_seq_lens_q")
        output, _ = getattr(home, rule_name)(
            query.reshape(*shape, -1, self.head_k_dim),
            key.reshape(*shape, -1, self.head_k_dim),
            value.reshape(*shape, -1, self.head_v_dim),
            g=log_kept,
            beta=written,
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=boundaries,
            **kwargs,
        )
        epsilon = getattr(self.norm, "variance_epsilon", None) or self.layer_norm_epsilon
        output = gated_norm(
            output, gate.view(*shape, -1, self.head_v_dim), self.norm.weight, None, activation="swish", eps=epsilon
        )
        result: torch.Tensor = self.out_proj(output.reshape(*shape, -1))
        return result

    module.forward = types.MethodType(forward, module)


def compile_rotation(model: nn.Module, *, dynamic: bool) -> bool:
    """Compiles the rotary embedding of the model's module, where it is the kind that `rotate` is."""
    done = False
    homes: set[Any] = {sys.modules[type(part).__module__] for part in model.modules()}
    for home in homes:
        if home.__name__.startswith("transformers.models.qwen3") and hasattr(home, "apply_rotary_pos_emb"):
            home.apply_rotary_pos_emb = torch.compile(rotate, dynamic=dynamic)
            done = True
    return done
