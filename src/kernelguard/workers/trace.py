"""Which GPU kernels does one training step of this model really run?

Run by the observed interpreter as `python trace.py request.json result.jsonl`. Standard library, torch and
transformers only. The model is the cut-down one of `isolation.py`; after steps that compile and tune everything, one
step is recorded with torch.profiler and written as a Chrome trace, which the room `trace/` reads.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH100, PTH118, PTH120, PTH123

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import importlib
import importlib.util
import json
import time
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


def _sibling(name: str) -> Any:
    """Another worker's file, by path."""
    spec = importlib.util.spec_from_file_location(f"kernelguard_{name}", os.path.join(_HERE, f"{name}.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{_HERE} has no {name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(request: dict[str, Any], out: Any, isolation: Any) -> None:
    """Record one step."""
    out.stage("import torch")
    try:
        torch = importlib.import_module("torch")
        profiler = importlib.import_module("torch.profiler")
        out.stage("cuda")
        on_gpu = request.get("device", "cuda") == "cuda"
        if on_gpu:
            torch.cuda.init()
        model = isolation.Model(request, out)
    except BaseException as error:
        out.error("build", error)
        return
    signals = model.signals(request["signals"])
    optimizer = torch.optim.AdamW(model.model.parameters(), lr=1e-4)

    seconds: list[float] = []

    def step() -> None:
        began = time.perf_counter()
        model.gradients(signals)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)

    try:
        for number in range(int(request.get("warmup", 2))):
            out.stage(f"step {number}")
            step()
        out.stage("recorded step")
        activities = [profiler.ProfilerActivity.CPU]
        if on_gpu:
            activities.append(profiler.ProfilerActivity.CUDA)
        # The recorded step is slower by its recording, so it is not among the times.
        times = list(seconds)
        with profiler.profile(activities=activities) as recording:
            step()
        out.stage("write the trace")
        recording.export_chrome_trace(request["output"])
        out.write("trace", file=request["output"], torch=str(torch.__version__), steps=times)
    except BaseException as error:
        out.error("step", error)


if __name__ == "__main__":
    _isolation = _sibling("isolation")
    _out = _isolation.recorder(sys.argv[2])
    with open(sys.argv[1], encoding="utf-8") as _handle:
        _request = json.load(_handle)
    main(_request, _out, _isolation)
    _out.done()
