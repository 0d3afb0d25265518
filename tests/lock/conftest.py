from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lock.world import World, world


@pytest.fixture(autouse=True)
def _only_the_local_index(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pip's configuration on this machine must not reach into tests that bring an index of their own."""
    if "online" in request.keywords:
        return
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    # A server that fails on purpose goes on failing.
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")


@pytest.fixture
def here(tmp_path: Path) -> Iterator[World]:
    with world(tmp_path) as made:
        yield made
