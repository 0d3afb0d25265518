"""Kernel packages with one thing wrong, for the path of one rank."""

from __future__ import annotations

from ops import RIGHT

from crafted import metadata

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
        from group import TINY_TRANSFORMERS

        files = {name: text.replace("5.24.0", "5.16.1") for name, text in TINY_TRANSFORMERS.items()}
        return {name.replace("5.24.0", "5.16.1"): text for name, text in files.items()}
