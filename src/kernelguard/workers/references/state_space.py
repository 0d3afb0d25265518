"""Mamba: the selective scan (Mamba-1) and the state space dual scan (Mamba-2).

Selective scan, for each channel d with a state h of N numbers and step size D_t = softplus(delta_t + bias):

    h  <-  exp(D_t A[d]) h + D_t B_t u_t          y_t = C_t . h + D[d] u_t,  then y_t silu(z_t)

Mamba-2 has one A for a whole head and P channels in it, so that a chunk of it is a masked matrix product:

    y_i = sum_{j <= i} (C_i . B_j) exp(sum_{j < m <= i} D_m A) D_j x_j + D x_i

Decoding takes one step of the same recurrence from a given state (`state_update`); `mamba_inner` is a whole Mamba-1
mixer behind its input projection.
"""

from __future__ import annotations

from typing import Any

import torch

from .convolution import causal_conv1d, starts
from .norms import rms_norm
from .precision import EXACT, Precision, segments


def selective_scan(
    u: Any,
    delta: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any = None,
    z: Any = None,
    delta_bias: Any = None,
    *,
    delta_softplus: bool = True,
    precision: Precision = EXACT,
) -> Any:
    """`u`, `delta`, `z` [B, D, T]; `A` [D, N]; `B`, `C` [B, N, T]; `D`, `delta_bias` [D]. Output [B, D, T]."""
    del precision  # no matrix product
    step = delta if delta_bias is None else delta + delta_bias[:, None]
    if delta_softplus:
        step = torch.nn.functional.softplus(step)
    h = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    outputs = []
    for t in range(u.shape[2]):
        d = step[:, :, t, None]
        h = (d * A).exp() * h + d * B[:, None, :, t] * u[:, :, t, None]
        outputs.append((h * C[:, None, :, t]).sum(-1))
    y = torch.stack(outputs, dim=-1)
    if D is not None:
        y = y + D[:, None] * u
    return y if z is None else y * torch.nn.functional.silu(z)


def chunk_scan(
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    *,
    D: Any = None,
    z: Any = None,
    dt_bias: Any = None,
    seq_idx: Any = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    chunk: int = 0,
    precision: Precision = EXACT,
) -> Any:
    """`x`, `z` [B, T, H, P]; `dt` [B, T, H]; `A`, `D`, `dt_bias` [H]; `B`, `C` [B, T, G, N]. Output [B, T, H, P].

    `chunk=0` goes token by token.
    """
    step = dt if dt_bias is None else dt + dt_bias
    if dt_softplus:
        step = torch.nn.functional.softplus(step)
    if dt_limit != (0.0, float("inf")):
        step = step.clamp(*dt_limit)
    per_group = x.shape[2] // B.shape[2]
    B, C = (m.repeat_interleave(per_group, dim=2) for m in (B, C))
    rows = []
    for row in range(x.shape[0]):
        cuts = None if seq_idx is None else starts(seq_idx[row])
        parts = []
        for a, b in segments(x.shape[1], cuts):
            xs, ds, bs, cs = (m[row, a:b].transpose(0, 1) for m in (x, step, B, C))
            parts.append(
                _scan_chunks(xs, ds, bs, cs, A, chunk, precision) if chunk else _scan_tokens(xs, ds, bs, cs, A)
            )
        rows.append(torch.cat(parts, dim=1).transpose(0, 1))
    y = torch.stack(rows)
    if D is not None:
        y = y + D[:, None] * x
    return y if z is None else y * torch.nn.functional.silu(z)


def _scan_tokens(x: Any, step: Any, B: Any, C: Any, A: Any) -> Any:
    """One step per token; x [H, T, P], step [H, T], B and C [H, T, N], A [H]."""
    h = x.new_zeros(x.shape[0], x.shape[2], B.shape[2])
    outputs = []
    for t in range(x.shape[1]):
        d = step[:, t, None]
        h = (d * A[:, None]).exp()[..., None] * h + torch.einsum("hp,hn->hpn", d * x[:, t], B[:, t])
        outputs.append(torch.einsum("hpn,hn->hp", h, C[:, t]))
    return torch.stack(outputs, dim=1)


def _scan_chunks(x: Any, step: Any, B: Any, C: Any, A: Any, size: int, precision: Precision) -> Any:
    h = x.new_zeros(x.shape[0], B.shape[2], x.shape[2])
    outputs = []
    for start in range(0, x.shape[1], size):
        xc, sc, bc, cc = (m[:, start : start + size] for m in (x, step, B, C))
        total = (sc * A[:, None]).cumsum(1)
        n = xc.shape[1]
        later = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        decay = (total[:, :, None] - total[:, None, :]).masked_fill(later, float("-inf")).exp()
        scores = precision.matmul(cc, bc.transpose(-1, -2)) * decay
        written = sc[..., None] * xc
        outputs.append(precision.matmul(scores, written) + precision.matmul(cc * total.exp()[..., None], h))
        last = total[:, -1:]
        kept = (bc * (last - total).exp()[..., None]).transpose(-1, -2)
        h = last.exp()[..., None] * h + precision.matmul(kept, written)
    return torch.cat(outputs, dim=1)


def split_conv1d_scan(
    zxbcdt: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    dt_bias: Any,
    A: Any,
    D: Any,
    *,
    headdim: int,
    ngroups: int,
    seq_idx: Any = None,
    rmsnorm_weight: Any = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None,
    norm_before_gate: bool = False,
    chunk: int = 0,
    precision: Precision = EXACT,
) -> Any:
    """A whole Mamba-2 mixer between its two projections: convolution, scan, gated norm, output projection.

    `zxbcdt` [B, T, 2 H P + 2 G N + H] holds the gate z, x, B, C and dt side by side.
    """
    heads, inner = len(A), len(A) * headdim
    states = (zxbcdt.shape[-1] - 2 * inner - heads) // 2 // ngroups
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * states, heads], dim=-1)
    xbc = causal_conv1d(xbc, conv1d_weight, conv1d_bias, activation="silu", seq_idx=seq_idx)
    x, B, C = xbc.split([inner, ngroups * states, ngroups * states], dim=-1)
    x, gate = (m.unflatten(-1, (heads, headdim)) for m in (x, z))
    B, C = (m.unflatten(-1, (ngroups, states)) for m in (B, C))
    y = chunk_scan(
        x,
        dt,
        A,
        B,
        C,
        D=D,
        z=None if rmsnorm_weight is not None else gate,
        dt_bias=dt_bias,
        seq_idx=seq_idx,
        chunk=chunk,
        precision=precision,
    )
    y = y.flatten(-2)
    if rmsnorm_weight is not None:
        silu = torch.nn.functional.silu(z)
        if norm_before_gate:
            y = rms_norm(y, rmsnorm_weight, eps=rmsnorm_eps, groups=ngroups) * silu
        else:
            y = rms_norm(y * silu, rmsnorm_weight, eps=rmsnorm_eps, groups=ngroups)
    return y if outproj_weight is None else precision.matmul(y, outproj_weight.transpose(0, 1))


def state_update(
    state: Any,
    x: Any,
    dt: Any,
    A: Any,
    B: Any,
    C: Any,
    D: Any,
    dt_bias: Any,
) -> tuple[Any, Any]:
    """One token further: the output [B, H, P] and the state.

    `state` [B, H, P, N]; `x`, `dt` [B, H, P]; `A` [H, P, N]; `B`, `C` [B, G, N]; `D`, `dt_bias` [H, P].
    """
    per_group = x.shape[1] // B.shape[1]
    B, C = (m.repeat_interleave(per_group, dim=1)[:, :, None] for m in (B, C))
    step = torch.nn.functional.softplus(dt + dt_bias)[..., None]
    h = (step * A).exp() * state + step * B * x[..., None]
    return (h * C).sum(-1) + D * x, h


def mamba_inner(
    xz: Any,
    conv1d_weight: Any,
    conv1d_bias: Any,
    x_proj_weight: Any,
    delta_proj_weight: Any,
    out_proj_weight: Any,
    A: Any,
    D: Any,
    delta_bias: Any,
    *,
    norm_weights: Any = None,
    eps: float = 1e-6,
    precision: Precision = EXACT,
) -> Any:
    """`xz` [B, 2 D, T] holds x and the gate z; output [B, T, hidden]. `norm_weights` are those of B, C and dt."""
    x, z = xz.chunk(2, dim=1)
    x = precision.stored(causal_conv1d(x.transpose(1, 2), conv1d_weight[:, 0], conv1d_bias, activation="silu"))
    projected = precision.matmul(x, x_proj_weight.transpose(0, 1))
    states = A.shape[1]
    dt, B, C = projected.split([projected.shape[-1] - 2 * states, states, states], dim=-1)
    if norm_weights is not None:
        B, C, dt = (precision.stored(rms_norm(m, w, eps=eps)) for m, w in zip((B, C, dt), norm_weights))
    delta = precision.matmul(dt, delta_proj_weight.transpose(0, 1))
    u, delta, B, C = (m.transpose(1, 2) for m in (x, delta, B, C))
    y = selective_scan(u, delta, A, B, C, D, z, delta_bias, precision=precision)
    return precision.matmul(y.transpose(1, 2), out_proj_weight.transpose(0, 1))
