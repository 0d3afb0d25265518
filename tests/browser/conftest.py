"""One Chromium for all tests of the pages, and the pages themselves, written by the real command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import machines
from command import ROOT, Command

RESULTS = ROOT / "benchmarks/results"
SOURCES: dict[str, tuple[str, list[Path]]] = {
    "profile": ("profile", [RESULTS / "verify-h200-trace.json.gz"]),
    "training": ("profile", [ROOT / "tests/data/runs/demo-train"]),
    "verdict": ("report", [RESULTS / "verify-h200-fla060-triton371.json"]),
    "isolation": ("report", [RESULTS / "verify-h200-isolation.json"]),
    "leak": ("report", [RESULTS / "verify-h200-mamba.json"]),
    "raised": ("report", [RESULTS / "verify-h200-fla060-stock-triton.json"]),
    "verdicts": ("report", [RESULTS / "verify-h200-27b.json", RESULTS / "verify-h200-isolation.json"]),
    "run": ("report", [ROOT / "tests/data/runs/demo-train"]),
    "runs": ("report", [ROOT / "tests/data/runs/demo-train", ROOT / "tests/data/runs/demo-train"]),
}


def made_up(folder: Path, rank: int) -> Path:
    """A trace with whatever makes the page longest: steps, a slow path, waits, compiling, communication, a rank."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, start: float, duration: float, tid: int = 1, **arguments: Any) -> None:
        events.append(
            {"ph": "X", "cat": category, "name": name, "pid": int(tid == 1), "tid": tid, "ts": start, "dur": duration}
            | {"args": arguments}
        )

    shapes = {"Input Dims": [[4096, 4096], [4096, 4096]], "Input type": ["c10::BFloat16", "c10::BFloat16"]}
    for step in range(3):
        at = step * 10_000.0
        add("user_annotation", f"ProfilerStep#{step + 4}", at, 10_000)
        add("cpu_op", "aten::linalg_solve_triangular", at, 300, **{"External id": 10 * step})
        add("cpu_op", "aten::mm", at + 400, 300, **{"External id": 10 * step + 1}, **shapes)
        add("cpu_op", "aten::item", at + 2000, 900, **{"External id": 10 * step + 2})
        add("cuda_runtime", "cudaStreamSynchronize", at + 2010, 880)
        add("cpu_op", "_compile.compile_inner (dynamo_timed)", at + 3000, 900)
        kernels = (
            ("nvjet_tst_128x256", 1000, 1500, 7),
            ("never_heard_of", 2600, 300, 7),
            ("ncclDevKernel_AllGather_RING_LL", 5000 if rank else 8000, 4000 if rank else 1000, 20),
        )
        for number, (name, start, duration, stream) in enumerate(kernels):
            both = {"correlation": 10 * step + number, "External id": 10 * step + 1}
            add("cuda_runtime", "cudaLaunchKernel", at + 410 + number, 1, **both)
            add("kernel", name, at + start, duration, stream, **both)
    header = {"deviceProperties": [{"name": "NVIDIA H200"}], "distributedInfo": {"rank": rank, "world_size": 2}}
    path = folder / f"rank{rank}.json"
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of page, as a file."""
    folder = tmp_path_factory.mktemp("pages")
    made: dict[str, Path] = {}
    ranks = [made_up(folder, rank) for rank in (0, 1)]
    # Checks by the present code: a recorded one shows how an earlier version spoke.
    checks = [machines.write_check(verdict, folder) for verdict in (machines.H200, machines.H200_STOCK_TRITON)]
    made_here = {
        "everything": ("profile", [*ranks, ROOT / "tests/data/runs/demo-train"]),
        "check": ("report", checks[1:]),
        "two": ("report", checks),
    }
    for name, (command, sources) in {**SOURCES, **made_here}.items():
        made[name] = folder / f"{name}.html"
        done = Command(command, *sources, "-o", made[name])
        assert made[name].is_file(), done.err
    return made


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A running browser."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium: .ci/browser.sh installs it")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install -e '.[browser]'")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
