"""The table of readers of one recording has the numbers that were read."""

from __future__ import annotations

import json

from command import ROOT

TOLD = json.loads((ROOT / "benchmarks" / "results" / "trace-readers.json").read_text(encoding="utf-8"))
RECORDING = TOLD["recording"]
PAGE = (ROOT / "docs" / "profile.md").read_text(encoding="utf-8").split("## Beside other readers")[1]


def test_the_table_has_the_numbers_that_were_read() -> None:
    names = {
        "key_averages": f"`key_averages()`, torch {RECORDING['torch'].split('+')[0]}",
        "kernelguard": "kernelguard",
        "HolisticTraceAnalysis": f"HolisticTraceAnalysis {TOLD['versions']['HolisticTraceAnalysis']}",
    }
    assert names.keys() == RECORDING["readers"].keys()
    for key, told in RECORDING["readers"].items():
        own = "not told" if told["self_cpu_us"] is None else f"{told['self_cpu_us'] / 1e3:.2f} ms"
        row = f"| {names[key]} | {told['operators']} | {told['calls']:,} | {own} | {told['seconds']:.2f} s |"
        assert row in PAGE
    assert f"a trace of {RECORDING['megabytes']} MB" in PAGE


def test_kernelguard_counted_what_torch_counts() -> None:
    """Of any new recording: tests/trace/test_profile.py."""
    torch, ours = (RECORDING["readers"][name] for name in ("key_averages", "kernelguard"))
    for key in ("operators", "calls", "self_cpu_us"):
        assert ours[key] == torch[key]
