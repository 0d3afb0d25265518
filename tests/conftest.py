"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

# Tests run side by side, one for each core: more threads than that only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A property holds on a busy machine too. The first text that Hypothesis draws in a fresh checkout costs it seconds.
hypothesis.settings.register_profile(
    "kernelguard", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kernelguard")


@pytest.fixture(autouse=True)
def _quiet_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colour settings and the caller's virtual environment must not change what tests see."""
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "VIRTUAL_ENV", "PYTHONPATH", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on releases other than the newest belong to the thorough run: the releases multiply seconds of CPU."""
    from observed import VERSIONS

    for item in items:
        parameters = getattr(item, "callspec", None)
        if parameters is not None and any(value in VERSIONS[:-1] for value in parameters.params.values()):
            item.add_marker(pytest.mark.thorough)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """In CI "skipped because it is missing" is a failure: what CI lacks, nobody has tested."""
    report = yield
    if os.environ.get("KERNELGUARD_CI") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}"
    return report
