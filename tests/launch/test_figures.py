"""The figures that the documentation gives are those that were measured, and those of the tests that it names."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")


def test_faults_of_groups() -> None:
    found = json.loads((ROOT / "benchmarks" / "results" / "guard-faults.json").read_text(encoding="utf-8"))
    told = {
        name: rest
        for name, *rest in re.findall(r"^\| ([a-z0-9-]+) \| (\d+) \| (\d+) \| ([\d.]+) s \|$", PAGE, re.MULTILINE)
    }
    measured = {k: [str(v["injected"]), str(v["named_right"]), f"{v['seconds']:g}"] for k, v in found["kinds"].items()}
    assert told == measured
    totals = ("faults_injected", "named_right", "healthy_groups", "false_refusals")
    assert " | ".join(str(found[name]) for name in totals) in PAGE
    assert f"after {found['seconds_to_go_median']:g} s (median" in PAGE


def test_faults_of_running_models_and_shards() -> None:
    """Counted in the tables of the tests, without importing them."""
    models = (ROOT / "tests/guard/test_running_model.py").read_text(encoding="utf-8")
    table = models[models.index("CASES: dict") : models.index('QUICK = "working"')]
    cases = len(re.findall(r'^    "\w+": \(', table, re.MULTILINE))
    wrong = sum(
        '"fail")' in c or '"unknown")' in c for c in re.split(r'^    (?="\w+": \()', table, flags=re.MULTILINE)[1:]
    )
    assert f"test_running_model.py`) | {wrong} | {wrong} | {cases - wrong} | 0 |" in PAGE
    shards = (ROOT / "tests/guard/test_sharded_weights.py").read_text(encoding="utf-8")
    right, wrong = (
        len(re.findall(r'^    "[a-z-]+"', table.group(), re.MULTILINE))
        for table in re.finditer(r"^(?:RIGHT = \(|WRONG = \{).*?^[)}]", shards, re.MULTILINE | re.DOTALL)
    )
    assert f"test_sharded_weights.py`) | {wrong} | {wrong} | {right} | 0 |" in PAGE
