"""How attention keeps packed samples apart: torch's own `varlen_attn`, registered with transformers as `varlen`.

It needs no extra package, and it raises when the boundaries are missing: falling through to plain causal attention
would let every sample see those packed before it, and nothing would tell.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from kernelguard_train.errors import ModelError

NAME = "varlen"
_FLASH_MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
"""Where torch looks for them."""
Varlen = Callable[..., Any]


def adapted(varlen_attn: Varlen) -> Varlen:
    """A causal `f(query, key, value, boundaries, longest, scale)` on this torch's `varlen_attn`.

    Its signature changed in 2.10 (`is_causal`), 2.11 (`window_size`, `scale`) and 2.12 (`enable_gqa`), so it is read.
    Tensors are `[tokens, heads, size]`; there may be fewer key and value heads than query heads.

    Raises:
        TypeError: when the signature has no known way of saying "causal".
    """
    known = inspect.signature(varlen_attn).parameters
    fixed: dict[str, Any]
    if "window_size" in known:
        fixed = {"window_size": (-1, 0)}  # any distance back, none ahead
    elif "is_causal" in known:
        fixed = {"is_causal": True}
    else:
        raise TypeError(f"varlen_attn{inspect.signature(varlen_attn)} cannot be asked for causal attention")

    def attend(  # noqa: PLR0917 - as transformers and torch order them
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        longest: int,
        scale: float,
    ) -> torch.Tensor:
        options = dict(fixed)
        if "scale" in known:
            options["scale"] = scale
        else:  # the kernel applies 1/sqrt(size) itself
            query = query * (scale * query.shape[-1] ** 0.5)
        if "enable_gqa" in known:
            options["enable_gqa"] = query.shape[1] != key.shape[1]
        output: torch.Tensor = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
        return output

    return attend


def attention_function(attend: Varlen) -> Callable[..., tuple[torch.Tensor, None]]:
    """`attend` in the form that transformers calls."""

    def forward(  # noqa: PLR0917 - the signature that transformers calls
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        cu_seq_lens_q: torch.Tensor | None = None,
        max_length_q: int | None = None,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        if cu_seq_lens_q is None or max_length_q is None:
            raise ValueError(f"{type(module).__name__}: varlen attention got no sample boundaries (cu_seq_lens_q)")
        unsupported = {"a mask": attention_mask is not None, "dropout": dropout, "a sliding window": sliding_window}
        if any(unsupported.values()):
            named = ", ".join(name for name, asked in unsupported.items() if asked)
            raise ValueError(
                f"{type(module).__name__}: varlen attention cannot do {named}; use another model.attention"
            )
        if query.shape[0] != 1:
            raise ValueError(f"{type(module).__name__}: varlen attention takes one packed row, not {query.shape[0]}")
        # [1, heads, tokens, size] to [tokens, heads, size] and back to [1, tokens, heads, size]
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        return attend(q, k, v, cu_seq_lens_q, max_length_q, scale)[None], None

    return forward


def register() -> None:
    """Makes `attn_implementation="varlen"` known to transformers, for attention and (as "none") for masks."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - only where it is used
    from transformers import AttentionInterface, AttentionMaskInterface  # noqa: PLC0415

    AttentionInterface.register(NAME, attention_function(adapted(varlen_attn)))
    AttentionMaskInterface.register(NAME, lambda *_args, **_kwargs: None)


def route_flash(which: str, device: torch.device) -> str:
    """Routes torch's flash attention (varlen and sdpa) to FA3 or FA4; returns what was decided, and why.

    `auto` takes FA3 on Hopper and FA4 on Blackwell where they are installed. Not FA4 on Hopper: its backward pass for
    heads of 256 is slower there than torch's own.

    Raises:
        ModelError: when an implementation is asked for by name and is not there.
    """
    own = "flash attention: torch's own"
    if which == "auto":
        if device.type != "cuda":
            return own
        major, _ = torch.cuda.get_device_capability(device)
        which = {9: "FA3", 10: "FA4"}.get(major, "default")
        if which != "default" and find_spec(_FLASH_MODULES[which].partition(".")[0]) is None:
            return f"{own} ({which} is not installed)"
    if which == "default":
        return own
    from torch.nn.attention import activate_flash_attention_impl  # noqa: PLC0415 - only where it is used

    try:
        activate_flash_attention_impl(which)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise ModelError(
            f"model.flash: {which} cannot be had: {type(error).__name__}: {error} (model.flash=default does without)"
        ) from error
    return f"flash attention: {which}, from {_FLASH_MODULES[which]}"
