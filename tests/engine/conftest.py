"""A real engine, a base image of local files, and locks of tiny wheels. `.ci/engine.sh` brings the engine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.base import base_tar
from engine.world import BEFORE, World, says, verdict
from kernelguard.errors import UndeterminedError
from kernelguard.image.build import run_build
from kernelguard.image.context import tar_stream
from kernelguard.image.engine import Engine, connect
from kernelguard.image.plan import make_plan
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


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheels that most worlds share."""
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, base: str, wheels: Path) -> Iterator[tuple[World, Outcome]]:
    """One candidate for all tests that only look at it.

    It stays until the end, and so do the steps that it was made in: whoever builds the same lock again gets them from
    the engine's cache, unless asked for with `no_cache`.
    """
    made = World(folder=tmp_path_factory.mktemp("world"), base=base, wheels=wheels)
    with connect(os.environ) as connected:
        outcome = run_build(
            connected, made.request(), dict(os.environ), made.cache, verifier=says(verdict(Level.IMPORT))
        )
        kept = _kept(connected, made)
        yield made, outcome
        for name in (made.image, f"{made.image}-candidate", kept):
            connected.remove(name)


def _kept(engine: Engine, made: World) -> str:
    """Name the stage `wheels`, from which the image only copies, so that nothing removes it."""
    plan = make_plan(made.request(), dict(os.environ), made.cache, resolve=engine.resolve, fetched=True)
    events = engine.build_classic(tar_stream(plan.recipe.files), labels={}, target="wheels", network="none")
    ids = [event["aux"]["ID"] for event in events if "aux" in event]
    engine.tag(ids[-1], "kg-test-wheels:v1")
    return "kg-test-wheels:v1"


@pytest.fixture
def world(tmp_path: Path, built: tuple[World, Outcome], engine: Engine) -> Iterator[World]:
    """A lock of one's own, the same as `built`'s until it is changed."""
    made = World(folder=tmp_path, base=built[0].base, wheels=built[0].wheels)
    yield made
    for name in (made.image, f"{made.image}-candidate", f"{made.image}-failed"):
        engine.remove(name)
