"""Workers run in interpreters that have nothing of kernelguard: these five need the standard library alone."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kernelguard.workers

FOLDER = Path(kernelguard.workers.__file__).parent
WORKERS = ("environment", "gpu", "importer", "bindings", "collective")
# What is under test; a worker may ask for it by name, and has to live without it.
_UNDER_TEST = {"torch", "transformers"}
_REQUESTS: dict[str, dict[str, Any]] = {
    "environment": {},
    "gpu": {},
    "importer": {"modules": [{"module": "json", "symbols": ["dumps", "gone"]}], "limit_s": 30},
    "bindings": {"modules": [], "sites": [], "gates": [], "config": None, "build_s": 5},
    "collective": {"rank": 0, "world": 2, "host": "127.0.0.1", "port": 1, "device": "cpu", "budget_s": 30},
}
_PYTHONS = sorted({path for minor in range(9, 16) if (path := shutil.which(f"python3.{minor}"))} | {sys.executable})


def _answers(python: str) -> bool:
    """Whether it runs at all: version managers put names on PATH that only print a complaint."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a worker is a single file"
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            for argument in node.args:
                if isinstance(argument, ast.Constant):
                    yield str(argument.value).partition(".")[0]


@pytest.mark.parametrize("worker", WORKERS)
def test_imports(worker: str) -> None:
    tree = ast.parse((FOLDER / f"{worker}.py").read_text(), feature_version=(3, 9))
    assert set(_imported(tree)) <= set(sys.stdlib_module_names) | _UNDER_TEST


@pytest.mark.parametrize("python", [path for path in _PYTHONS if _answers(path)])
@pytest.mark.parametrize("worker", WORKERS)
def test_it_runs_where_nothing_is_installed(worker: str, python: str, tmp_path: Path) -> None:
    request, result = tmp_path / "request.json", tmp_path / "result.jsonl"
    request.write_text(json.dumps(_REQUESTS[worker]))
    result.touch()
    # -S: no site-packages; -E: no PYTHONPATH; a warning would be an error, but for the fork that is done on purpose.
    command = [python, "-S", "-E", "-W", "error", str(FOLDER / f"{worker}.py"), str(request), str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    records = [json.loads(line) for line in result.read_text().splitlines()]
    assert records[-1] == {"done": True}
    if worker == "environment":
        assert not [entry for entry in records[0]["path"] if entry in ("", str(FOLDER), str(tmp_path))]
        assert records[0]["distributions"] == []
    if worker == "importer":
        fact = next(record for record in records if record.get("kind") == "import")
        assert (fact["outcome"], fact["symbols"]) == ("ok", {"dumps": True, "gone": False})
