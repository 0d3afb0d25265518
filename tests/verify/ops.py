"""Kernels made for the tests, in torch: a right one of each kind, and every liar that is known from the field.

`RIGHT` and `LIARS` are the texts of modules that the tests put into a throw-away interpreter.
"""

from __future__ import annotations

RIGHT = '''
import torch
from torch.nn import functional as F

def l2norm(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    dtype = q.dtype
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    group = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    q = q * (q.shape[-1] ** -0.5)
    if g.dim() == 3:
        g = g[..., None]
    cuts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    outputs, states = [], []
    for n, (a, b) in enumerate(zip(cuts, cuts[1:])):
        state = q.new_zeros(q.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
        if initial_state is not None:
            state = initial_state[n:n + 1].float() if cu_seqlens is not None else initial_state.float()
        for t in range(a, b):
            state = state * g[:, t, :, :, None].exp()
            u = beta[:, t, :, None] * (v[:, t] - (state * k[:, t, :, :, None]).sum(-2))
            state = state + k[:, t, :, :, None] * u[:, :, None]
            outputs.append((state * q[:, t, :, :, None]).sum(-2))
        states.append(state)
    return torch.stack(outputs, 1).to(dtype), torch.cat(states) if output_final_state else None

chunk_kda = chunk_gated_delta_rule

class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, g, beta, kwargs):
        return chunk_gated_delta_rule(q, k, v, g, beta, **kwargs)
    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("Backward pass is not implemented yet")

def fused_recurrent_gated_delta_rule(q, k, v, g=None, beta=None, **kwargs):
    return _NoBackward.apply(q, k, v, g, beta, kwargs)

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None, **kwargs):
    outputs = []
    for row in range(x.shape[0]):
        cuts = [0, x.shape[-1]]
        if seq_idx is not None:
            cuts = [0, *(seq_idx[row].diff().nonzero().flatten() + 1).tolist(), x.shape[-1]]
        parts = [F.conv1d(F.pad(x[row:row + 1, :, a:b], (weight.shape[1] - 1, 0)), weight[:, None], bias,
                          groups=len(weight)) for a, b in zip(cuts, cuts[1:])]
        outputs.append(torch.cat(parts, -1))
    y = torch.cat(outputs)
    return F.silu(y) if activation else y

def packed_convolution(x, weight, numbers, key):
    y = causal_conv1d_fn(x.transpose(1, 2), weight, seq_idx=numbers, activation="silu").transpose(1, 2)
    return y.split([key, key, y.shape[-1] - 2 * key], -1)

def fla_convolution(x, weight, bias=None, activation=None, cu_seqlens=None, **kwargs):
    ids = None
    if cu_seqlens is not None:
        ids = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())[None]
    return causal_conv1d_fn(x.transpose(1, 2), weight, bias, ids, activation).transpose(1, 2), None

class FusedRMSNormGated(torch.nn.Module):
    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.eps = eps
    def forward(self, x, g):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float() * F.silu(g.float())).to(x.dtype)

def rms_norm(x, w, eps, offset=0.0, casting_mode="llama", in_place=True):
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (y * (w.float() + offset)).to(x.dtype)

def swiglu(a, b):
    return (F.silu(a.float()) * b.float()).to(a.dtype)

def linear_cross_entropy(hidden, weight, labels):
    return F.cross_entropy((hidden @ weight.T).float(), labels)

def grouped_mm(x, weight, offs=None):
    ends = offs.tolist()
    return torch.cat([x[a:b] @ weight[e] for e, (a, b) in enumerate(zip([0, *ends], ends))])

def flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, causal=False):
    cuts = cu_q.tolist()
    outs = []
    for a, b in zip(cuts, cuts[1:]):
        one = [x[a:b].transpose(0, 1)[None] for x in (q, k, v)]
        outs.append(F.scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(outs)

def flash_attn_func(q, k, v, causal=False):
    one = [x.transpose(1, 2) for x in (q, k, v)]
    return F.scaled_dot_product_attention(*one, is_causal=causal, enable_gqa=True).transpose(1, 2)

def flex_attention(q, k, v, block_mask=None, enable_gqa=False):
    """torch's own has no backward on a CPU."""
    at = torch.arange(q.shape[2])
    seen = block_mask.mask_mod(0, 0, at[:, None], at)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=enable_gqa)

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, seq_idx=None,
                              dt_softplus=False, **kwargs):
    dtype = x.dtype
    x, dt, B, C = (t.float() for t in (x, dt, B, C))
    dt = F.softplus(dt + dt_bias)
    group = x.shape[2] // B.shape[2]
    B, C = (t.repeat_interleave(group, 2) for t in (B, C))
    h = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], B.shape[-1])
    outs = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t and int(seq_idx[0, t]) != int(seq_idx[0, t - 1]):
            h = torch.zeros_like(h)
        h = h * (dt[:, t] * A).exp()[..., None, None] + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        outs.append((h * C[:, t, :, None]).sum(-1))
    return (torch.stack(outs, 1) + x * D[:, None]).to(dtype)

def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, seq_idx=None,
                                     activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6, outproj_weight=None,
                                     headdim=None, ngroups=1, norm_before_gate=True, **kwargs):
    inner, heads = len(A) * headdim, len(A)
    state = (zxbcdt.shape[-1] - 2 * inner - heads) // 2 // ngroups
    z, xbc, dt = zxbcdt.split([inner, inner + 2 * ngroups * state, heads], -1)
    xbc = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, "silu").transpose(1, 2)
    x, B, C = xbc.split([inner, ngroups * state, ngroups * state], -1)
    y = mamba_chunk_scan_combined(x.unflatten(-1, (heads, headdim)), dt, A, B.unflatten(-1, (ngroups, state)),
                                  C.unflatten(-1, (ngroups, state)), chunk_size, D=D, dt_bias=dt_bias, seq_idx=seq_idx)
    y = (y.flatten(-2).float() * F.silu(z.float())).unflatten(-1, (ngroups, -1))
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + rmsnorm_eps)
    return (y.flatten(-2) * rmsnorm_weight.float()).to(z.dtype) @ outproj_weight.T

def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False):
    dtype = u.dtype
    u, delta, B, C, z = (t.float() for t in (u, delta, B, C, z))
    delta = F.softplus(delta + delta_bias[:, None])
    h = u.new_zeros(u.shape[0], u.shape[1], A.shape[1])
    outs = []
    for t in range(u.shape[-1]):
        d = delta[:, :, t, None]
        h = (d * A).exp() * h + d * B[:, None, :, t] * u[:, :, t, None]
        outs.append((h * C[:, None, :, t]).sum(-1))
    return ((torch.stack(outs, -1) + u * D[:, None]) * F.silu(z)).to(dtype)

def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False):
    heads = x.dim() == 3
    h, xs, steps = (t if heads else t[:, None] for t in (state, x.float(), dt.float()))
    A, D, dt_bias = (t if heads else t[None] for t in (A, D, dt_bias))
    B, C = (t if heads else t[:, None] for t in (B.float(), C.float()))
    B, C = (t.repeat_interleave(xs.shape[1] // t.shape[1], 1)[:, :, None] for t in (B, C))
    steps = F.softplus(steps + dt_bias)[..., None]
    h.copy_((steps * A).exp() * h + steps * B * xs[..., None])
    return ((h * C).sum(-1) + D * xs).to(x.dtype).reshape(x.shape)

def mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
                   A, B=None, C=None, D=None, delta_bias=None, delta_softplus=True, b_rms_weight=None,
                   c_rms_weight=None, dt_rms_weight=None, b_c_dt_rms_eps=1e-6):
    x, z = xz.chunk(2, 1)
    x = causal_conv1d_fn(x, conv1d_weight[:, 0], conv1d_bias, activation="silu")
    n = A.shape[1]
    dt, B, C = (x.transpose(1, 2) @ x_proj_weight.T).split([delta_proj_weight.shape[1], n, n], -1)
    if b_rms_weight is not None:
        B, C, dt = (rms_norm(t, w, b_c_dt_rms_eps) for t, w in
                    ((B, b_rms_weight), (C, c_rms_weight), (dt, dt_rms_weight)))
    delta = (dt @ delta_proj_weight.T).transpose(1, 2)
    y = selective_scan_fn(x, delta, A, B.transpose(1, 2), C.transpose(1, 2), D, z, delta_bias, delta_softplus)
    return y.transpose(1, 2) @ out_proj_weight.T

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None):
    seen = torch.cat([conv_state, x[..., None]], -1)
    conv_state.copy_(seen[..., 1:])
    y = (seen[..., -weight.shape[1]:].float() * weight.float()).sum(-1)
    y = y if bias is None else y + bias.float()
    return (F.silu(y) if activation else y).to(x.dtype)
'''

LIARS = '''
import ctypes, os, signal, threading, time
import torch
from torch.nn import functional as F

def swiglu(a, b):
    return (F.silu(a.float()) * b.float()).to(a.dtype)

class _Lie(torch.autograd.Function):
    """Right output; the gradients that `lie` makes of the right ones."""
    @staticmethod
    def forward(ctx, a, b, lie):
        ctx.save_for_backward(a, b)
        ctx.lie = lie
        return swiglu(a, b)
    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (a, b)]
            right = torch.autograd.grad(swiglu(*leaves), leaves, grad)
        return (*ctx.lie(*right, grad), None)

def zero_gradient(a, b):
    return _Lie.apply(a, b, lambda da, db, g: (da * 0, db * 0))

def identity_gradient(a, b):
    return _Lie.apply(a, b, lambda da, db, g: (g, g))

def one_wrong_input(a, b):
    return _Lie.apply(a, b, lambda da, db, g: (da, db * 1.1))

def too_few_gradients(a, b):
    return _Lie.apply(a, b, lambda da, db, g: (da, None))

def no_gradient_at_all(a, b):
    return swiglu(a.detach(), b.detach())

def one_wrong_row(a, b):
    def lie(da, db, g):
        db = db.clone()
        db[63] *= 2
        return da, db
    return _Lie.apply(a, b, lie)

def nan_above_a_length(a, b):
    def lie(da, db, g):
        da = da.clone()
        da[200:, 3] = float("nan")
        return da, db
    return _Lie.apply(a, b, lie)

def wrong_output(a, b):
    return swiglu(a, b) * 1.05

def wrong_shape(a, b):
    return swiglu(a, b)[:, None]

_calls = 0
def trembles(a, b):
    """Right, but never the same bits: as kernels that add with atomics."""
    global _calls
    _calls += 1
    noise = 1 + 5e-3 * (torch.rand(a.shape, generator=torch.Generator().manual_seed(_calls)) - 0.5)
    return (swiglu(a, b).float() * noise).to(a.dtype)

_turns = 0
def wrong_now_and_then(a, b):
    global _turns
    _turns += 1
    return swiglu(a, b) * (2 if _turns == 3 else 1)

def segfault(a, b):
    ctypes.string_at(0)

def abort_in_backward(a, b):
    return _Lie.apply(a, b, lambda da, db, g: os.abort())

def hang(a, b):
    threading.Event().wait()

def out_of_memory(a, b):
    return torch.empty(1 << 50)

def memory_above_the_limit(a, b):
    return swiglu(a, b) + torch.ones(12 << 30, dtype=torch.uint8).sum()

def killed(a, b):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(a, b):
    os._exit(0)

def raises(a, b):
    raise ValueError("head_dim 256 is not supported")

def raises_in_backward(a, b):
    def lie(da, db, g):
        raise RuntimeError("Triton >= 3.4.0 and < 3.7.1 on Hopper GPUs produces incorrect results")
    return _Lie.apply(a, b, lie)

def loads_from_a_host_that_is_away(a, b):
    import urllib.request
    try:
        urllib.request.urlopen("http://127.0.0.1:9/kernel")
    except OSError:
        raise ValueError("the publisher cannot be verified")

def not_implemented(a, b):
    def lie(da, db, g):
        raise NotImplementedError("no backward")
    return _Lie.apply(a, b, lie)

def garbage(a, b):
    """Writes into the worker's own result file."""
    import sys
    with open(sys.argv[2], "a") as handle:
        handle.write("Segmentation is not JSON" + chr(10))
    os._exit(0)
'''
