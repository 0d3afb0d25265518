"""Torch's `varlen_attn`: how each release is called, and how a model is given it as attention `varlen`.

kernelguard_train registers it with transformers under that name. Loaded by path too: nothing here is imported from
the other probes.
"""

from __future__ import annotations

from typing import Any


def causal(  # noqa: PLR0917 - as torch orders them
    function: Any, q: Any, k: Any, v: Any, cu: Any, longest: int, scale: Any = None
) -> Any:
    """`function` over samples that begin at `cu`; `[tokens, heads, size]`, fewer key heads where they are grouped."""
    import inspect

    parameters = inspect.signature(function).parameters
    # torch 2.10 says is_causal, later ones window_size=(-1, 0).
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    if scale is not None and "scale" in parameters:
        options["scale"] = scale
    elif scale is not None:  # it divides by the root of the size itself
        q = q * (scale * q.shape[-1] ** 0.5)
    if "enable_gqa" in parameters:
        options["enable_gqa"] = True
    else:
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    return function(q, k, v, cu, cu, longest, longest, **options)


def _each(q: Any, k: Any, v: Any, cuts: Any, scale: Any) -> Any:
    """The same without a GPU, where torch has no `varlen_attn`: one sample at a time."""
    import torch

    found = []
    for a, b in zip(cuts, cuts[1:]):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        made = torch.nn.functional.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True, scale=scale)
        found.append(made[0].transpose(0, 1))
    return torch.cat(found)


def attend(  # noqa: PLR0917 - as transformers calls it
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any = None,
    scaling: Any = None,
    cu_seq_lens_q: Any = None,
    max_length_q: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """In the form that transformers calls: `[1, heads, tokens, size]`. Without boundaries all of it is one sample."""
    import torch

    del module, attention_mask  # the mask is none: see `register`
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    cu = cu_seq_lens_q
    if cu is None:
        cu, max_length_q = torch.tensor([0, q.shape[0]], dtype=torch.int32, device=q.device), q.shape[0]
    if not q.is_cuda:
        return _each(q, k, v, cu.tolist(), scaling)[None], None
    from torch.nn.attention.varlen import varlen_attn

    longest = int(max_length_q) if max_length_q is not None else int((cu[1:] - cu[:-1]).max())
    return causal(varlen_attn, q, k, v, cu, longest, scaling)[None], None


def register() -> None:
    """Make `attn_implementation="varlen"` known to transformers, as kernelguard_train does."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("varlen", attend)
    AttentionMaskInterface.register("varlen", lambda *_args, **_kwargs: None)
