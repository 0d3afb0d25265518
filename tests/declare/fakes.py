"""Kernel packages that record how they are called and give back tensors of the right shape."""

from __future__ import annotations

FAKES = {
    "fake_kernels.py": """
import functools, inspect
RECORD = []
def recorded(function):
    signature = inspect.signature(function)
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        bound = signature.bind(*args, **kwargs).arguments
        given = dict(bound, **bound.pop("kwargs", {}))
        RECORD.append((function.__name__, given))
        return function(*args, **kwargs)
    return wrapper
""",
    "causal_conv1d/__init__.py": """
from fake_kernels import recorded
__version__ = "1.6.0"
@recorded
def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    return x
@recorded
def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                         conv_state_indices=None):
    return x
""",
    "mamba_ssm/__init__.py": """
__version__ = "2.3.0"
from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn
import mamba_ssm.ops.triton.selective_state_update, mamba_ssm.ops.triton.ssd_combined, mamba_ssm.ops.triton.layer_norm
def falcon_mamba_inner_fn(*args, **kwargs):
    raise NotImplementedError
""",
    "mamba_ssm/ops/__init__.py": "",
    "mamba_ssm/ops/triton/__init__.py": "",
    "mamba_ssm/ops/triton/layer_norm.py": "def _layer_norm_fwd(*args, **kwargs): raise NotImplementedError\n",
    "selective_scan_cuda.py": "",
    "causal_conv1d_cuda.py": "",
    "einops.py": "rearrange = repeat = None\n",
    "mamba_ssm/ops/selective_scan_interface.py": """
from fake_kernels import recorded
@recorded
def mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
                   A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None,
                   delta_softplus=True, checkpoint_lvl=1, b_rms_weight=None, c_rms_weight=None, dt_rms_weight=None,
                   b_c_dt_rms_eps=1e-6):
    return xz.transpose(1, 2)[..., : out_proj_weight.shape[0]]
@recorded
def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      return_last_state=False):
    return (u, u[..., :1]) if return_last_state else u
""",
    "mamba_ssm/ops/triton/selective_state_update.py": """
from fake_kernels import recorded
@recorded
def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    return x
""",
    "mamba_ssm/ops/triton/ssd_combined.py": """
from fake_kernels import recorded
@recorded
def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
                              seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False):
    return (x, None) if return_final_states else x
@recorded
def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size,
                                     initial_states=None, seq_idx=None, dt_limit=(0.0, float("inf")),
                                     return_final_states=False, activation="silu", rmsnorm_weight=None,
                                     rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None,
                                     ngroups=1, norm_before_gate=True):
    # Also None would do for transformers >= 5.15, which then goes on to the separate kernels; the run in evaluation
    # mode shows those.
    size = outproj_weight.shape[0] if outproj_weight is not None else conv1d_weight.shape[0]
    out = zxbcdt[..., :1].expand(*zxbcdt.shape[:2], size)
    return (out, None) if return_final_states else out
""",
    # transformers 5.16 looks for nested modules only through the package root.
    "fla/__init__.py": '__version__ = "0.6.0"\nimport fla.ops.gated_delta_rule, fla.ops.kda, fla.modules\n',
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule/__init__.py": """
from fake_kernels import recorded
@recorded
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    return v, None
@recorded
def fused_recurrent_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None,
                                     output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
                                     **kwargs):
    return v, None
""",
    "fla/ops/kda/__init__.py": """
from fake_kernels import recorded
@recorded
def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **kwargs):
    return v, None
@recorded
def fused_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None,
                        **kwargs):
    return v, None
""",
    "fla/modules/__init__.py": """
import torch
from fake_kernels import recorded
class FusedRMSNormGated(torch.nn.Module):
    def __init__(self, hidden_size, **kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
    def forward(self, x, gate, **kwargs):
        return x
@recorded
def short_convolution(x, **kwargs):
    return x, None
class ShortConvolution(torch.nn.Conv1d):
    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", **kwargs):
        super().__init__(hidden_size, hidden_size, kernel_size, groups=hidden_size, bias=bias)
    def forward(self, x, *args, **kwargs):
        return short_convolution(x, **kwargs)
""",
    "apex/__init__.py": "",
    "apex/normalization.py": "import torch\nclass FusedRMSNorm(torch.nn.LayerNorm): pass\n",
    "mambapy/__init__.py": "",
    "mambapy/pscan.py": "def pscan(*args): raise NotImplementedError\n",
}
for _name, _version in (("causal_conv1d", "1.6.0"), ("mamba_ssm", "2.3.0"), ("fla", "0.6.0"), ("mambapy", "1.2.0")):
    FAKES[f"{_name}-{_version}.dist-info/METADATA"] = f"Metadata-Version: 2.1\nName: {_name}\nVersion: {_version}\n"
