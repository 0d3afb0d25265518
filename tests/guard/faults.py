"""Kernel packages with one thing wrong, for the path of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import group
from ops import RIGHT

from crafted import metadata
from kernelguard.guard import ticket as tickets

FAULTY_CONVOLUTION = """
import os, signal, time
_right = causal_conv1d_fn

def causal_conv1d_fn(x, weight, bias=None, seq_idx=None, activation=None, **kwargs):
    fault = os.environ.get("FAULT", "")
    if fault == "segv":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hang":
        time.sleep(600)
    if fault == "wrong":
        return _right(x, weight, bias, None, activation) * 1.5
    if fault == "garbage":
        # What a library that writes to whatever descriptor it finds can do to the worker's result.
        result = open("/proc/self/cmdline", "rb").read().split(b"\\0")[-2]
        with open(result, "ab") as handle:
            handle.write(b"\\x00\\xff{not json\\n")
    return _right(x, weight, bias, seq_idx, activation)
"""
_UPDATE = '\ndef causal_conv1d_update(*args, **kwargs):\n    raise NotImplementedError\n\n__version__ = "1.7.0"\n'
# As chatty as some packages are: it must not matter.
_NOISE = 'print("\\x00" + "noise " * 2000)\nimport sys\nsys.stderr.write("{\\"kind\\": \\"done\\"}\\n" * 100)\n'


class Packages:
    """Files below site-packages, by path."""

    @staticmethod
    def working() -> dict[str, str]:
        return {
            "fla/__init__.py": _NOISE + '__version__ = "0.6.0"\n',
            "fla/ops/__init__.py": "",
            "fla/ops/gated_delta_rule/__init__.py": RIGHT,
            **metadata("flash-linear-attention", "0.6.0", "fla"),
            **metadata("fla-core", "0.6.0", "fla"),
            "causal_conv1d/__init__.py": RIGHT + _UPDATE + FAULTY_CONVOLUTION,
            **metadata("causal-conv1d", "1.7.0", "causal_conv1d"),
        }

    @staticmethod
    def broken_conv1d() -> dict[str, str]:
        return {
            "causal_conv1d/__init__.py": "raise ImportError('undefined symbol: _ZN3c104cuda9SetDeviceEi')\n",
            **metadata("causal-conv1d", "1.7.0", "causal_conv1d"),
        }

    @staticmethod
    def crashing_conv1d() -> dict[str, str]:
        return {
            "causal_conv1d/__init__.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
            **metadata("causal-conv1d", "1.7.0", "causal_conv1d"),
        }

    @staticmethod
    def another_fla() -> dict[str, str]:
        return {
            "fla/__init__.py": '__version__ = "0.5.1"\n',
            "fla/ops/__init__.py": "",
            "fla/ops/gated_delta_rule/__init__.py": RIGHT,
            **metadata("flash-linear-attention", "0.5.1", "fla"),
            **metadata("fla-core", "0.5.1", "fla"),
        }

    @staticmethod
    def checkout_of_conv1d() -> dict[str, str]:
        """As in a clone of its repository: the same names, other code, and no metadata that says so."""
        working = Packages.working()["causal_conv1d/__init__.py"]
        return {"causal_conv1d/__init__.py": working.replace("* 1.5", "* 2.5")}

    @staticmethod
    def fla_without_triton() -> dict[str, str]:
        return {
            "fla/__init__.py": '__version__ = "0.6.0"\n',
            "fla/ops/__init__.py": "",
            "fla/ops/gated_delta_rule/__init__.py": "import triton\n",
            **metadata("flash-linear-attention", "0.6.0", "fla"),
            **metadata("fla-core", "0.6.0", "fla"),
        }

    @staticmethod
    def another_transformers() -> dict[str, str]:
        files = {name: text.replace("5.24.0", "5.16.1") for name, text in group.TINY_TRANSFORMERS.items()}
        return {name.replace("5.24.0", "5.16.1"): text for name, text in files.items()}


@dataclass(frozen=True)
class Fault:
    """What is wrong with rank 1 alone, and what has to be said."""

    code: int
    said: tuple[str, ...]
    """Words that the outcome has to have."""
    packages: Callable[[], Mapping[str, str]] | None = None
    """Files in front of rank 1's path."""
    variables: Mapping[str, str] | None = None
    probe: bool = False
    state: str = "differs"
    limits: tickets.Deadlines = group.QUICK


FAULTS = {
    "broken-conv1d": Fault(
        78,
        ("causal_conv1d_fn", "ImportError: undefined symbol: _ZN3c104cuda9SetDeviceEi"),
        packages=Packages.broken_conv1d,
    ),
    "a-checkout-before-it": Fault(
        78,
        ("causal_conv1d_fn", "which belongs to no installed distribution"),
        packages=Packages.checkout_of_conv1d,
    ),
    "another-fla": Fault(78, ("version of fla-core is 0.5.1", "0.6.0"), packages=Packages.another_fla),
    "another-transformers": Fault(
        78, ("version of transformers is 5.16.1",), packages=Packages.another_transformers
    ),
    "a-package-that-raises-where-it-should-hide": Fault(
        78, ("chunk_gated_delta_rule", "ModuleNotFoundError: No module named 'triton'"),
        packages=Packages.fla_without_triton,
    ),
    "crash-at-import": Fault(
        78, ("causal_conv1d_fn", "SIGSEGV"), packages=Packages.crashing_conv1d, state="differs"
    ),
    "dies-in-the-probe": Fault(
        75, ("probe of causal_conv1d_fn", "SIGSEGV"), variables={"FAULT": "segv"}, probe=True, state="fault"
    ),
    "wrong-numbers": Fault(
        75, ("probe of causal_conv1d_fn", "wrong"), variables={"FAULT": "wrong"}, probe=True, state="fault"
    ),
    "hangs-in-the-probe": Fault(
        3, ("could not tell", "did not end within"), variables={"FAULT": "hang"}, probe=True,
        state="unknown", limits=replace(group.QUICK, probe_s=20.0),
    ),
    "garbage-in-the-result": Fault(
        3, ("could not tell", "no result that can be read"), variables={"FAULT": "garbage"}, probe=True,
        state="unknown",
    ),
    "another-switch": Fault(
        78, ("USE_HUB_KERNELS is 0",), variables={"USE_HUB_KERNELS": "0"}
    ),
}  # fmt: skip
