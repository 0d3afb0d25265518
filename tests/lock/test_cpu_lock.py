"""A CPU lock of the real torch, installed by the real pip with --require-hashes."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kernelguard.declare.values import Intent
from kernelguard.lock import Places, Subject, check_lock, load_lock, make_lock, write_lock
from kernelguard.lock.compile import Engine
from kernelguard.observe.targets import target
from kernelguard.resolve import matrix, resolve
from kernelguard.resolve.market import gather, sources_for
from kernelguard.sources.http import Http
from kernelguard.sources.pipconfig import pip_config
from lock.world import CACHE, FLA
from observed import make_venv
from resolve.cases import declaration


@pytest.mark.online
@pytest.mark.thorough
def test_a_real_cpu_lock_is_installed_by_hash(tmp_path: Path) -> None:
    config = pip_config(Path(sys.executable))
    http = Http(timeout=60, cache=CACHE / "http")
    environment = target(f"cpu,torch=2.13.0,python={sys.version_info.major}.{sys.version_info.minor}")
    market = gather(FLA, matrix(), sources_for(matrix(), config, http))
    resolution = resolve(needs=FLA, environment=environment, market=market)
    declared = declaration()
    subject = Subject(
        model=declared.config,
        intent=Intent(),
        fast_paths=declared.fast_paths,
        transformers=None,
        environment=environment,
    )
    path = tmp_path / "kernelguard.lock"
    # pip-tools on this index would fetch every wheel whole, only to read it; that engine is tested on a local index.
    lock = make_lock(resolution, subject, Places(config=config), cache=CACHE, http=http, engine=Engine.UV)
    write_lock(lock, path)
    assert load_lock(path) == lock
    assert not lock.admits_launch
    assert {"torch", "fla-core", "sympy", "einops"} <= {pin.name for pin in lock.pins}
    assert all(len(pin.sha256) == 64 for pin in lock.pins)
    assert {p["name"] for p in tomllib.loads((tmp_path / "pylock.toml").read_text())["packages"]} == {
        pin.name for pin in lock.pins
    }

    env = make_venv(tmp_path / "env")
    install = ["install", "--quiet", "--no-compile", "--require-hashes", "--no-deps"]
    command = [sys.executable, "-m", "pip", "--python", str(env.python), *install]
    subprocess.run([*command, "-r", str(tmp_path / "requirements.txt")], check=True)
    assert [f.code for f in check_lock(lock, env.python)] == ["lock-holds"]
    code = "from importlib.metadata import version; print(version('torch'), version('fla-core'))"
    done = subprocess.run([env.python, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["2.13.0+cpu", "0.6.0"]
