"""What of a command line and of the environment may be written to a file? Named variables, and nothing like a secret.

Standard library only, Python 3.9 or newer: it runs in every rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Values of these may be written to files; every other variable's value stays where it is.
VARIABLES = frozenset(
    {
        "CUDA_VISIBLE_DEVICES",
        "NVIDIA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_MODULE_LOADING",
        "DISABLE_KERNEL_MAPPING",
        "FLA_CACHE_RESULTS",
        "FLA_FLASH_QLA",
        "FLA_TILELANG",
        "FLA_USE_TMA",
        "GROUP_RANK",
        "HF_HUB_OFFLINE",
        "LD_LIBRARY_PATH",
        "LD_PRELOAD",
        "LOCAL_KERNELS",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "NCCL_ALGO",
        "NCCL_IB_DISABLE",
        "NCCL_IB_HCA",
        "NCCL_NVLS_ENABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_PROTO",
        "NCCL_SHM_DISABLE",
        "NCCL_SOCKET_IFNAME",
        "OMP_NUM_THREADS",
        "PYTHONPATH",
        "PYTHONNOUSERSITE",
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "RANK",
        "SLURM_JOB_ID",
        "SLURM_NODEID",
        "TILELANG_CACHE_DIR",
        "TORCHDYNAMO_DISABLE",
        "TORCHINDUCTOR_CACHE_DIR",
        "TORCH_COMPILE_DISABLE",
        "TRITON_CACHE_AUTOTUNING",
        "TRITON_CACHE_DIR",
        "TRITON_INTERPRET",
        "TRITON_PTXAS_PATH",
        "USE_HUB_KERNELS",
        "VIRTUAL_ENV",
        "WORLD_SIZE",
    }
)
_SECRET_VALUE = re.compile(
    r"\b(hf|sk|pk|gh[pousr]|github_pat|xox[abp]|glpat|dapi|AKIA)[-_]?[A-Za-z0-9_-]{16,}"  # tokens, by how they begin
    r"|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+"  # JSON web tokens
    r"|(?<=://)[^/@\s]+@"  # user and password in a URL
)
_SECRET_NAME = re.compile(
    r"token(?!s|iz)|secret|passw|credential|api[-_.]?key|access[-_.]?key|private[-_.]?key|auth", re.IGNORECASE
)
MASK = "(masked)"


def shown_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables whose values may be written to a file, with anything that looks like a secret masked."""
    return {name: masked(environ[name]) for name in sorted(VARIABLES) if name in environ}


def masked(text: str) -> str:
    """A text without what looks like a token or a password in a URL."""
    return _SECRET_VALUE.sub(MASK, text)


def shown_arguments(argv: tuple[str, ...]) -> tuple[str, ...]:
    """A command line as it may be written to a file: values of options and keys that name a secret are masked."""
    shown: list[str] = []
    hide_next = False
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if hide_next and not argument.startswith("-"):
            shown.append(MASK)
            hide_next = False
        elif equals and _SECRET_NAME.search(name):
            shown.append(f"{name}={MASK}")
            hide_next = False
        else:
            shown.append(masked(argument))
            hide_next = argument.startswith("-") and not equals and _SECRET_NAME.search(name) is not None
    return tuple(shown)
