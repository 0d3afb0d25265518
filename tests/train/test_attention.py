"""The varlen attention: adapted to every signature that `varlen_attn` had, and refusing to run without boundaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from kernelguard_train import attention

BOUNDARIES = torch.tensor([0, 5, 6, 20], dtype=torch.int32)


def segments(
    query: Any, key: Any, value: Any, boundaries: Any, scale: float, *, causal: bool, gqa: bool
) -> torch.Tensor:
    """What varlen attention computes, one segment at a time."""
    edges = boundaries.tolist()
    parts = []
    for a, b in itertools.pairwise(edges):
        q, k, v = (tensor[a:b].transpose(0, 1)[None] for tensor in (query, key, value))
        part = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=gqa)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


# The signatures of three torch releases. Each computes only what it is asked for: forgetting to ask shows.
def torch_2_10(  # noqa: PLR0917
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *, is_causal: bool = False
) -> Any:
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k
    return segments(query, key, value, cu_seq_q, scale=query.shape[-1] ** -0.5, causal=is_causal, gqa=True)


def torch_2_11(  # noqa: PLR0917
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    assert return_aux is None
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k
    scale = scale or query.shape[-1] ** -0.5
    return segments(query, key, value, cu_seq_q, scale=scale, causal=window_size == (-1, 0), gqa=True)


def torch_2_12(  # noqa: PLR0917
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False, seqused_k: Any = None, block_table: Any = None, num_splits: int | None = None,
) -> Any:  # fmt: skip
    assert return_aux is seqused_k is block_table is num_splits is None
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("enable_gqa is required")
    scale = scale or query.shape[-1] ** -0.5
    return segments(query, key, value, cu_seq_q, scale=scale, causal=window_size == (-1, 0), gqa=enable_gqa)


def inputs(key_heads: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, heads, 20, 8, generator=draw) for heads in (4, key_heads, key_heads))  # type: ignore[return-value]


@pytest.mark.parametrize("varlen_attn", [torch_2_10, torch_2_11, torch_2_12])
@pytest.mark.parametrize("key_heads", [2, 4])
@pytest.mark.parametrize("scaling", [None, 0.1])
def test_every_signature_gives_causal_attention_within_samples(
    varlen_attn: Callable[..., Any], key_heads: int, scaling: float | None
) -> None:
    query, key, value = inputs(key_heads)
    forward = attention.attention_function(attention.adapted(varlen_attn))
    output, weights = forward(
        torch.nn.Identity(), query, key, value, None, scaling=scaling, cu_seq_lens_q=BOUNDARIES, max_length_q=14
    )
    same = torch.repeat_interleave(torch.arange(3), BOUNDARIES.diff())
    mask = (same[:, None] == same[None]) & torch.ones(20, 20).tril().bool()
    expected = functional.scaled_dot_product_attention(query, key, value, mask, scale=scaling, enable_gqa=True)
    assert weights is None
    torch.testing.assert_close(output, expected.transpose(1, 2))


def test_the_installed_torch_is_understood() -> None:
    from torch.nn.attention.varlen import varlen_attn

    attention.adapted(varlen_attn)


def test_an_unknown_signature_is_refused() -> None:
    def future(query: Any, key: Any, value: Any, lengths: Any) -> None: ...

    with pytest.raises(TypeError, match="cannot be asked for causal attention"):
        attention.adapted(future)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cu_seq_lens_q": None}, "got no sample boundaries"),
        ({"max_length_q": None}, "got no sample boundaries"),
        ({"dropout": 0.1}, "cannot do dropout"),
        ({"sliding_window": 4}, "cannot do a sliding window"),
        ({"attention_mask": torch.ones(1, 20)}, "cannot do a mask"),
    ],
)
def test_it_raises_rather_than_attend_to_other_samples(changes: dict[str, Any], expected: str) -> None:
    query, key, value = inputs(4)
    arguments = {"attention_mask": None, "cu_seq_lens_q": BOUNDARIES, "max_length_q": 14} | changes
    forward = attention.attention_function(attention.adapted(torch_2_12))
    with pytest.raises(ValueError, match=expected):
        forward(torch.nn.Identity(), query, key, value, **arguments)


def test_more_than_one_row_is_refused() -> None:
    query, key, value = (tensor.expand(2, -1, -1, -1) for tensor in inputs(4))
    forward = attention.attention_function(attention.adapted(torch_2_12))
    with pytest.raises(ValueError, match="takes one packed row, not 2"):
        forward(torch.nn.Identity(), query, key, value, None, cu_seq_lens_q=BOUNDARIES, max_length_q=14)


def test_transformers_finds_it_and_makes_no_mask_for_it() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention.register()
    assert attention.NAME in ALL_ATTENTION_FUNCTIONS
    assert ALL_MASK_ATTENTION_FUNCTIONS[attention.NAME](1, 2, three=3) is None
