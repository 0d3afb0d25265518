"""Crafted kernel packages: the names, signatures and layouts of the real ones, and every way they are found broken.

The real packages need CUDA to import; what `check` looks at (what can be imported, which symbol is bound, which
arguments it takes) does not. They do not import triton, unlike the real ones: torch takes a crafted triton for a real
one and breaks on it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

Files = dict[str, str]

_CONV = """
__version__ = "1.7.0"

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False,
                     final_states_out=None, activation=None):
    raise NotImplementedError

def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, cache_seqlens=None,
                         conv_state_indices=None):
    raise NotImplementedError
"""

_GDN = """

def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
    raise NotImplementedError

def fused_recurrent_gated_delta_rule(q, k, v, g=None, beta=None, scale=None, initial_state=None,
                                     output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None,
                                     **kwargs):
    raise NotImplementedError
"""

_KDA = """

def chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
              use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, **kwargs):
    raise NotImplementedError

def fused_recurrent_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                        use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, cu_seqlens=None, **kwargs):
    raise NotImplementedError
"""

_FLA_MODULES = """
import torch

class FusedRMSNormGated(torch.nn.Module):
    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
"""

_SSD = """

def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None,
                              seq_idx=None, cu_seqlens=None, dt_softplus=False, dt_limit=(0.0, float("inf")),
                              return_final_states=False, return_varlen_states=False):
    raise NotImplementedError

def mamba_split_conv1d_scan_combined(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size,
                                     initial_states=None, seq_idx=None, dt_limit=(0.0, float("inf")),
                                     return_final_states=False, activation="silu", rmsnorm_weight=None,
                                     rmsnorm_eps=1e-6, outproj_weight=None, outproj_bias=None, headdim=None,
                                     ngroups=1, norm_before_gate=True):
    raise NotImplementedError
"""

_STATE = """

def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None):
    raise NotImplementedError
"""

_SCAN = """
def selective_scan_fn(u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
                      return_last_state=False):
    raise NotImplementedError

def mamba_inner_fn(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias,
                   A, B=None, C=None, D=None, delta_bias=None, B_proj_bias=None, C_proj_bias=None,
                   delta_softplus=True, checkpoint_lvl=1):
    raise NotImplementedError
"""


def metadata(distribution: str, version: str, top_level: str) -> Files:
    """A `.dist-info` as pip leaves it."""
    folder = f"{distribution.replace('-', '_')}-{version}.dist-info"
    return {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
        f"{folder}/top_level.txt": f"{top_level}\n",
        f"{folder}/INSTALLER": "pip\n",
        f"{folder}/RECORD": f"{top_level}/__init__.py,,\n",
    }


def causal_conv1d(version: str = "1.7.0") -> Files:
    return {"causal_conv1d/__init__.py": _CONV, **metadata("causal-conv1d", version, "causal_conv1d")}


def fla(version: str = "0.6.0") -> Files:
    """As fla-core lays it out: the package root does not import its `ops`."""
    return {
        "fla/__init__.py": f'__version__ = "{version}"\n',
        "fla/ops/__init__.py": "",
        "fla/ops/gated_delta_rule/__init__.py": _GDN,
        "fla/ops/kda/__init__.py": _KDA,
        "fla/modules/__init__.py": _FLA_MODULES,
        **metadata("flash-linear-attention", version, "fla"),
        **metadata("fla-core", version, "fla"),
    }


def mamba_ssm(version: str = "2.3.2") -> Files:
    return {
        "mamba_ssm/__init__.py": f'__version__ = "{version}"\n'
        "from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn\n",
        "mamba_ssm/ops/__init__.py": "",
        "mamba_ssm/ops/selective_scan_interface.py": _SCAN,
        "mamba_ssm/ops/triton/__init__.py": "",
        "mamba_ssm/ops/triton/ssd_combined.py": _SSD,
        "mamba_ssm/ops/triton/selective_state_update.py": _STATE,
        **metadata("mamba-ssm", version, "mamba_ssm"),
    }


def everything() -> Files:
    """Every kernel package, all good."""
    return {**causal_conv1d(), **fla(), **mamba_ssm()}


def without(files: Mapping[str, str], *prefixes: str) -> Files:
    """The files that do not start with one of the prefixes."""
    return {name: text for name, text in files.items() if not name.startswith(prefixes)}


def replaced(files: Mapping[str, str], name: str, text: str) -> Files:
    """The files with one of them changed; the name has to exist, so that a test cannot miss its target."""
    assert name in files, name
    return {**files, name: text}


def renamed(files: Mapping[str, str], name: str, old: str, new: str) -> Files:
    """The files with a word changed in one of them."""
    assert old in files[name], old
    return {**files, name: files[name].replace(old, new)}


def shared_object(path: Path, *, undefined: str | None = None, needs: str | None = None) -> None:
    """Compile a Python extension module that cannot be loaded, for the reason that is given.

    `undefined` is a symbol that nothing exports (built against another torch); `needs` is a library that is not
    there (built for another CUDA).
    """
    compiler = shutil.which("cc")
    assert compiler, "the tests need a C compiler"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = f"extern void {undefined}(void);\nvoid *keep = (void *){undefined};\n" if undefined else "int keep;\n"
    source = path.with_suffix(".c")
    source.write_text(body + "void *PyInit_" + path.name.partition(".")[0] + "(void) { return 0; }\n")
    command = [compiler, "-shared", "-fPIC", "-o", str(path), str(source)]
    if needs:
        library = path.parent / needs
        stub = path.with_name("stub.c")
        stub.write_text("int kernelguard_stub;\n")
        subprocess.run(
            [compiler, "-shared", "-fPIC", f"-Wl,-soname,{needs}", "-o", str(library), str(stub)], check=True
        )
        command += ["-Wl,--no-as-needed", str(library)]
        subprocess.run(command, check=True)
        library.unlink()
        stub.unlink()
    else:
        subprocess.run(command, check=True)
    source.unlink()
