"""How long do images take? A small one, an unchanged one, a promotion; with --lock also a real one.

    .ci/engine.sh .venv/bin/python benchmarks/image.py --json benchmarks/results/image.json
    .ci/engine.sh .venv/bin/python benchmarks/image.py --lock kernelguard.lock --json benchmarks/results/image.json

Wall time on the engine that DOCKER_HOST names, whose base image is made from this machine's own files first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import docker

from engine.conftest import BASE, _imported
from engine.world import World, says, verdict
from kernelguard.image.build import Talk, run_build
from kernelguard.image.engine import connect
from kernelguard.image.plan import Request
from kernelguard.image.subject import subject_of
from kernelguard.judge.values import Level
from kernelguard.lock import load_lock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lock", type=Path, help="also build this lock, and verify it inside")
    asked = parser.parse_args()
    rows: dict[str, Any] = {}
    began = time.monotonic()
    _imported(BASE, compiler=True)
    rows["base image from local files"] = {"seconds": round(time.monotonic() - began, 2)}
    with tempfile.TemporaryDirectory() as folder, connect(os.environ) as engine:
        world = World(folder=Path(folder), base=BASE)
        for name in ("small build", "small build, unchanged lock"):
            load, laps, began = load_average(), Laps(), time.monotonic()
            made = run_build(
                engine,
                world.request(),
                dict(os.environ),
                world.cache,
                talk=Talk(line=laps.line, step=laps.line),
                verifier=says(verdict(Level.IMPORT)),
            )
            rows[name] = {
                "seconds": round(time.monotonic() - began, 2),
                "load_average_before": load,
                "parts": made.seconds,
                "dockerfile": laps.slowest(),
                "layers_mb": [round(layer.size / 1e6, 2) for layer in made.layers],
            }
        engine.remove(made.image)
        if asked.lock is not None:
            rows |= _real(engine, asked.lock)
    load = os.getloadavg()
    document = {"cpus": os.cpu_count(), "load_average": load, "engine": engine_version(), "rows": rows}
    text = json.dumps(document, indent=1)
    print(text)
    if asked.json is not None:
        asked.json.write_text(text + "\n")


def load_average() -> float:
    """Of the last minute."""
    return round(os.getloadavg()[0], 1)


class Laps:
    """How long each step of a Dockerfile took."""

    def __init__(self) -> None:
        self._found: list[tuple[str, float]] = []

    def line(self, text: str) -> None:
        """Take a line of a build's progress."""
        if text.startswith(("step ", "verifying", "promoting")):
            self._found.append((text.removeprefix("step ")[:70], time.monotonic()))

    def slowest(self) -> dict[str, float]:
        """Seconds by step, those of a quarter of a second and more."""
        pairs = zip(self._found, self._found[1:], strict=False)
        return {text: round(end - begin, 2) for (text, begin), (_, end) in pairs if end - begin >= 0.25}


def _real(engine: Any, path: Path) -> dict[str, Any]:
    lock = load_lock(path)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kernelguard")
    request = Request(
        lock=lock, path=path, image="kg-bench:real", subject=subject_of(lock, path), level=Level.IMPORT, base=BASE
    )
    rows: dict[str, Any] = {}
    for name in ("real build, verified inside", "real build, unchanged lock"):
        began = time.monotonic()
        made = run_build(engine, request, dict(os.environ), cache)
        rows[name] = {"seconds": round(time.monotonic() - began, 2), "steps": made.seconds}
    rows["real build, verified inside"]["layers_mb"] = [round(layer.size / 1e6, 1) for layer in made.layers]
    engine.remove(made.image)
    return rows


def engine_version() -> str:
    """Of the engine that DOCKER_HOST names."""
    client = docker.from_env()
    try:
        return str(client.version()["Version"])
    finally:
        client.close()


if __name__ == "__main__":
    main()
