"""One Chromium for all tests of the pages, and the pages themselves, written by the real command."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command import ROOT, Command

RESULTS = ROOT / "benchmarks/results"
SOURCES: dict[str, tuple[str, list[Path]]] = {
    "profile": ("profile", [RESULTS / "verify-h200-trace.json.gz"]),
    "training": ("profile", [ROOT / "tests/data/runs/demo-train"]),
    "check": ("report", [RESULTS / "check-h200-stock-triton.json"]),
    "verdict": ("report", [RESULTS / "verify-h200-fla060-triton371.json"]),
    "isolation": ("report", [RESULTS / "verify-h200-isolation.json"]),
    "run": ("report", [ROOT / "tests/data/runs/demo-train"]),
    "two": ("report", [RESULTS / "check-h200.json", RESULTS / "check-h200-stock-triton.json"]),
}


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each kind of page, as a file."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, (command, sources) in SOURCES.items():
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
