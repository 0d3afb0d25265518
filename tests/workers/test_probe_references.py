"""The references are right: their gradients by finite differences, their values by code that others wrote."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from pathlib import Path

import pytest

import observed
from kernelguard import workers

pytestmark = pytest.mark.observed

SCRIPT = Path(__file__).with_name("reference_checks.py")
CHECKS = sorted(
    node.name
    for node in ast.parse(SCRIPT.read_text("utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
)


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    python = observed.transformers_base("5.24.0").python
    done = subprocess.run(
        [str(python), str(SCRIPT), str(Path(workers.__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answers: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.parametrize("check", CHECKS)
def test_reference(check: str, results: dict[str, str]) -> None:
    assert results[check] == ""
