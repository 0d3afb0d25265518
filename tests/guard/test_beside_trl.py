"""The script that measures TRL beside the trainer runs: in toy size, with working kernels that a CPU can run."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import packages
import pytest
import scripts

import observed

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "beside_trl.py"


@pytest.mark.observed
@pytest.mark.thorough
def test_trl_is_measured_on_what_its_packs_really_hold(tmp_path: Path) -> None:
    env = observed.environment(tmp_path / "env", "5.24.0", packages.working())
    (env.site / "trl.pth").write_text(f"{scripts.trl_base().site}\n")
    out = tmp_path / "loop.json"
    code = f"""
import pathlib, sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import beside_trl
beside_trl.main(["--tiny", "--layers", "4", "--steps", "2", "--warmup", "1"], pathlib.Path({str(out)!r}))
"""
    done = subprocess.run([env.python, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert (found["loop"], found["layers"], found["steps"]) == ("trl", 4, 2)
    # Packs of 512 tokens, filled by best fit: full, or nearly so.
    assert 0.8 * 512 < found["tokens_per_s"] * found["step_s"] <= 512
