"""A checkpoint in mxfp4: unpacked to bf16 where the GPU, triton or `kernels` do not suit."""

from __future__ import annotations

import re
from collections.abc import Iterable

from packaging.version import Version

from kernelguard.declare.modes import Mxfp4
from kernelguard.declare.reading import Reading

NAME = "mxfp4"
_FILE = "quantizers/quantizer_mxfp4.py"
_CUDA = re.compile(r"get_device_capability.*?>= \((\d+), (\d+)\).*?is_triton_available\(\"([\d.]+)\"\)", re.DOTALL)


def modes(reading: Reading) -> Iterable[Mxfp4]:
    """One value for each part whose configuration says that its weights are mxfp4."""
    for part in reading.parts:
        quantization = part.sub.raw.get("quantization_config")
        if not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
            continue
        found = _CUDA.search(reading.source.text(_FILE) or "")
        if found is None:
            reading.unknowns.append(f"{_FILE}: what mxfp4 needs could not be read.")
            continue
        yield Mxfp4(
            path=part.sub.path,
            model_type=part.sub.model_type,
            dequantize=quantization.get("dequantize") is True,
            minimum_capability=(int(found[1]), int(found[2])),
            minimum_triton=Version(found[3]),
            window=reading.window(),
        )
