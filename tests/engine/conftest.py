"""A real engine, a base image of local files, and locks of tiny wheels. `.ci/engine.sh` brings the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base import base_tar
from engine.world import BEFORE, World, make_world, says, verdict
from kernelguard.errors import UndeterminedError
from kernelguard.image.build import run_build
from kernelguard.image.engine import Engine, connect
from kernelguard.image.values import Outcome
from kernelguard.judge.values import Level

BASE = "kernelguard-test-base:host"
NO_COMPILER = "kernelguard-test-base:no-compiler"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def base() -> str:
    """The name of a base image with Python and a C compiler."""
    return _imported(BASE, compiler=True)


@pytest.fixture(scope="session")
def no_compiler() -> str:
    """The name of a base image with Python and no C compiler."""
    return _imported(NO_COMPILER, compiler=False)


def _imported(name: str, *, compiler: bool) -> str:
    try:
        with connect(os.environ) as engine:
            api = engine._client.api
            if not BEFORE:
                BEFORE.update(row["Id"] for row in (*api.images(), *api.containers(all=True)))
            if engine.image(name) is None:
                repository, _, tag = name.partition(":")
                api.import_image_from_data(base_tar(compiler=compiler), repository=repository, tag=tag)
    except UndeterminedError as error:
        pytest.skip(f"needs a Docker engine: {error.message}")
    return name


@pytest.fixture
def engine(base: str) -> Iterator[Engine]:
    assert base
    with connect(os.environ) as connected:
        yield connected


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, base: str) -> Iterator[tuple[World, Outcome]]:
    """One candidate for all tests that only look at it."""
    with make_world(tmp_path_factory.mktemp("world"), base) as made, connect(os.environ) as connected:
        request = made.request()
        how = says(verdict(Level.IMPORT))
        yield made, run_build(connected, request, dict(os.environ), made.cache, verifier=how)
        for name in (made.image, f"{made.image}-candidate"):
            connected.remove(name)


@pytest.fixture
def world(tmp_path: Path, base: str, engine: Engine) -> Iterator[World]:
    with make_world(tmp_path, base) as made:
        yield made
        for name in (made.image, f"{made.image}-candidate", f"{made.image}-failed"):
            engine.remove(name)
