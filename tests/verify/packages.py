"""The names of the real kernel packages, with kernels in torch behind them that keep packed samples apart."""

from __future__ import annotations

from ops import RIGHT

from crafted import metadata

_UPDATE = '\ndef causal_conv1d_update(*args, **kwargs):\n    raise NotImplementedError\n\n__version__ = "1.7.0"\n'


def working() -> dict[str, str]:
    """Both fla and causal-conv1d, as a transformers model looks for them; they work on a CPU."""
    return {
        # 5.16 looks for the symbols below what the package root has imported.
        "fla/__init__.py": '__version__ = "0.6.0"\nimport fla.ops.gated_delta_rule, fla.modules\n',
        "fla/ops/__init__.py": "from fla.ops.gated_delta_rule import *\n",
        "fla/ops/gated_delta_rule/__init__.py": RIGHT,
        "fla/modules/__init__.py": RIGHT,
        **metadata("flash-linear-attention", "0.6.0", "fla"),
        **metadata("fla-core", "0.6.0", "fla"),
        "causal_conv1d/__init__.py": RIGHT + _UPDATE,
        **metadata("causal-conv1d", "1.7.0", "causal_conv1d"),
    }
