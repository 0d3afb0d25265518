"""The gated delta rule and its per-channel form (KDA): token by token as the formula says, and in chunks.

For each value head, with a state S of K rows and V columns, decay a_t = exp(g_t) and write strength b_t:

    S  <-  a_t S                        forget (KDA: one a_t for each of the K rows)
    u   =  b_t (v_t - S^T k_t)          what the state gets wrong about v_t
    S  <-  S + k_t u^T                  write the correction
    o_t =  S^T q_t / sqrt(K)

Shapes: q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, HV] (KDA: [B, T, HV, K]); beta [B, T, HV]. With HV > H each query
and key head serves HV / H neighbouring value heads. The chunked form is the same sum in another order, for lengths at
which one step per token would not fit a GPU's memory; a test holds the two together.
"""

from __future__ import annotations

from typing import Any

import torch

from .precision import EXACT, Precision, segments


def gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Any,
    beta: Any,
    *,
    scale: Any = None,
    cu_seqlens: Any = None,
    initial_state: Any = None,
    l2norm: bool = False,
    chunk: int = 0,
    precision: Precision = EXACT,
) -> tuple[Any, Any]:
    """Output [B, T, HV, V] and the last state [N, HV, K, V]. `chunk=0` goes token by token."""
    if l2norm:
        q, k = _unit(q), _unit(k)
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if g.dim() == 3:
        g = g.unsqueeze(-1)
    outputs, states = [], []
    for index, (a, b) in enumerate(segments(q.shape[1], cu_seqlens)):
        qs, ks, vs, gs, bs = (x[:, a:b].transpose(1, 2) for x in (q, k, v, g, beta))
        if initial_state is None:
            state = q.new_zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
        else:
            state = initial_state if cu_seqlens is None else initial_state[index : index + 1]
        if chunk:
            output, state = _chunks(qs, ks, vs, gs, bs, state, chunk, precision)
        else:
            output, state = _tokens(qs, ks, vs, gs, bs, state)
        outputs.append(output.transpose(1, 2))
        states.append(state)
    return torch.cat(outputs, dim=1), torch.cat(states, dim=0)


def _unit(x: Any, eps: float = 1e-6) -> Any:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


def _tokens(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> tuple[Any, Any]:
    """One step per token; all inputs [B, HV, T, ...], g [B, HV, T, 1 or K]."""
    outputs = []
    for t in range(q.shape[2]):
        state = g[:, :, t, :, None].exp() * state
        wrong = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, :, t], beta[:, :, t, None] * wrong)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(outputs, dim=2), state


def _chunks(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, size: int, precision: Precision) -> tuple[Any, Any]:
    """The same in chunks.

    Within one, with G the running sum of g, the corrections u solve a triangular system:

    u_i + b_i sum_{j<i} (k_i exp(G_i - G_j) . k_j) u_j  =  b_i (v_i - S^T (exp(G_i) k_i))
    """
    outputs = []
    for start in range(0, q.shape[2], size):
        qc, kc, vc, gc, bc = (x[:, :, start : start + size] for x in (q, k, v, g, beta))
        n = qc.shape[2]
        total = gc.cumsum(2)
        earlier = torch.ones(n, n, dtype=torch.bool, device=q.device).tril(-1)
        inclusive = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        kk = _decayed_products(kc, kc, total, earlier, precision)
        qk = _decayed_products(qc, kc, total, inclusive, precision)
        right = bc[..., None] * (vc - precision.matmul(kc * total.exp(), state))
        system = torch.eye(n, dtype=q.dtype, device=q.device) + bc[..., None] * kk
        u = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        outputs.append(precision.matmul(qc * total.exp(), state) + precision.matmul(qk, u))
        last = total[:, :, -1:]
        state = last.exp().transpose(-1, -2) * state + precision.matmul(
            (kc * (last - total).exp()).transpose(-1, -2), u
        )
    return torch.cat(outputs, dim=2), state


def _decayed_products(a: Any, b: Any, total: Any, mask: Any, precision: Precision) -> Any:
    """`exp(G_i - G_j) a_i . b_j` where `mask[i, j]`, else 0. The difference is masked before exp, so none overflows."""
    if total.shape[-1] == 1:
        difference = (total - total.transpose(-1, -2)).masked_fill(~mask, float("-inf"))
        return precision.matmul(a, b.transpose(-1, -2)) * difference.exp()
    rows = []
    for i in range(a.shape[2]):
        difference = (total[:, :, i : i + 1] - total).masked_fill(~mask[i][:, None], float("-inf"))
        rows.append(precision.einsum("bhjk,bhk->bhj", b * difference.exp(), a[:, :, i]))
    return torch.stack(rows, dim=2)
