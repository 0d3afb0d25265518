"""A recorded step leaves its figures, and beside them the trace that they were taken from."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import torch

from kernelguard_train.profiling import Recorder


def test_a_recorded_step_leaves_figures_and_the_trace_with_shapes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run" / "profile.json")
    recorder.start()
    torch.ones(3, 5) @ torch.ones(5, 7)
    recorder.finish(step=3)
    figures = json.loads((tmp_path / "run" / "profile.json").read_text())
    with gzip.open(tmp_path / "run" / "profile.trace.json.gz", "rt") as file:
        trace = json.loads(file.read(), strict=False)["traceEvents"]
    assert figures["step"] == 3
    assert figures["cpu_ops"] >= 1
    products = [event for event in trace if event.get("name") == "aten::mm"]
    assert products
    assert products[0]["args"]["Input Dims"][:2] == [[3, 5], [5, 7]]
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"profile.json", "profile.trace.json.gz"}


def test_nothing_is_recorded_without_a_target() -> None:
    recorder = Recorder(None)
    recorder.start()
    recorder.finish()
    assert recorder.profile is None
