"""An environment is made exactly what the lock says, and every way in which it stops being that is named."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernelguard.errors import InputError, ToolError, UndeterminedError
from kernelguard.judge.values import Finding, Status, exit_code, worst
from kernelguard.lock import check_lock, local_kernels, sync
from kernelguard.lock.compile import Engine
from kernelguard.lock.record import digest_of_wheel, parse_record, record_digest
from kernelguard.lock.values import HubFilePin, HubPin, Lock
from kernelguard.sources.http import Http
from kernelguard.sources.hub import Hub
from lock.world import CACHE, CPU, World, world
from observed import Interpreter, make_venv
from programs import tool
from sources.fakehub import FakeHub, variant
from sources.servers import broken, cut_off, sha256, wheel

HTTP = Http(timeout=5, attempts=1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(tmp_path_factory.mktemp("world")) as made:
        yield made


@pytest.fixture(scope="module")
def lock(shared: World) -> Lock:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIP_CONFIG_FILE", "/dev/null")
        return shared.lock(CPU, engine=Engine.UV)


@pytest.fixture(autouse=True)
def _pip_looks_into_the_world(shared: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in pip_settings(shared).items():
        monkeypatch.setenv(name, value)


def pip_settings(world: World) -> dict[str, str]:
    return {
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": f"{world.site.url}/simple",
        "PIP_FIND_LINKS": str(world.wheels),
        "PIP_NO_CACHE_DIR": "1",
    }


@pytest.fixture(scope="module")
def made(shared: World, lock: Lock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that `sync` made out of an empty one."""
    empty = make_venv(tmp_path_factory.mktemp("made") / "env")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in pip_settings(shared).items():
            patch.setenv(name, value)
        findings = check_lock(lock, empty.python)
        assert codes(findings) == ["lock-missing"] * len(lock.pins)
        assert exit_code(worst(f.status for f in findings)) == 1
        assert codes(sync(lock, empty.python, cache=CACHE)) == ["lock-holds"]
    return empty.prefix


@pytest.fixture
def env(tmp_path: Path) -> Interpreter:
    """An empty environment."""
    return make_venv(tmp_path / "env")


@pytest.fixture
def synced(made: Path, tmp_path: Path) -> Interpreter:
    """A copy of the synced environment, to be damaged."""
    shutil.copytree(made, tmp_path / "env", symlinks=True)
    return Interpreter(tmp_path / "env")


def codes(findings: tuple[Finding, ...]) -> list[str]:
    return [f.code for f in findings]


def pip(env: Interpreter, *arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(env.python), *arguments], check=True, capture_output=True
    )


def test_sync_installs_exactly_the_lock(synced: Interpreter, lock: Lock) -> None:
    for pin in lock.pins:
        assert (synced.site / f"{pin.name.replace('-', '_')}-{pin.version}.dist-info").is_dir()
    out = subprocess.run([synced.python, "-c", "import fla, torch"], capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


def test_torch_that_a_later_install_moved_is_named(synced: Interpreter, lock: Lock, tmp_path: Path) -> None:
    later = tmp_path / "torch-2.14.0-py3-none-any.whl"
    later.write_bytes(wheel("torch", "2.14.0"))
    pip(synced, "install", "--no-deps", str(later))
    [finding] = check_lock(lock, synced.python)
    assert (finding.code, finding.status) == ("torch-moved", Status.FAIL)
    assert "torch 2.14.0 is installed, the lock has 2.13.0+cpu" in finding.reason


def test_another_version_of_a_kernel_is_named(synced: Interpreter, lock: Lock) -> None:
    metadata = synced.site / "fla_core-0.6.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("0.6.0", "0.5.2"))
    [finding] = check_lock(lock, synced.python)
    assert (finding.code, finding.reason) == ("lock-version", "fla-core 0.5.2 is installed, the lock has 0.6.0")


@pytest.mark.parametrize("change", ["# 9.9.9\n", "# 0.6.0\nmore", ""], ids=["same length", "longer", "empty"])
def test_a_changed_file_is_named(synced: Interpreter, lock: Lock, change: str) -> None:
    file = synced.site / "fla" / "__init__.py"
    assert file.read_text() != change
    file.write_text(change)
    [finding] = check_lock(lock, synced.python)
    assert finding.code == "file-changed"
    assert str(file) in finding.reason


def test_a_removed_file_is_named(synced: Interpreter, lock: Lock) -> None:
    (synced.site / "einops" / "__init__.py").unlink()
    [finding] = check_lock(lock, synced.python)
    assert finding.code == "file-changed"
    assert finding.reason.endswith("einops/__init__.py is missing")


def test_a_file_of_the_same_size_in_a_dependency_is_found_by_a_deep_check(synced: Interpreter, lock: Lock) -> None:
    file = synced.site / "einops" / "__init__.py"
    file.write_text(file.read_text().replace("0.8.1", "0.8.9"))
    assert codes(check_lock(lock, synced.python)) == ["lock-holds"]
    assert codes(check_lock(lock, synced.python, deep=True)) == ["file-changed"]


def test_another_build_of_the_same_version_is_named_though_its_own_record_is_right(
    synced: Interpreter, lock: Lock, tmp_path: Path
) -> None:
    other = tmp_path / "fla_core-0.6.0-py3-none-any.whl"
    other.write_bytes(wheel("fla-core", "0.6.0", files={"fla/__init__.py": "# built by somebody else\n"}))
    pip(synced, "install", "--no-deps", "--force-reinstall", str(other))
    [finding] = check_lock(lock, synced.python)
    assert finding.code == "lock-other-build"


def test_everything_that_is_wrong_is_named_at_once_and_put_right(
    synced: Interpreter, lock: Lock, tmp_path: Path
) -> None:
    other = tmp_path / "fla_fork-1.0-py3-none-any.whl"
    other.write_bytes(wheel("fla-fork", "1.0", files={"fla/__init__.py": "# 0.6.0\n"}))
    later = tmp_path / "torch-2.14.0-py3-none-any.whl"
    later.write_bytes(wheel("torch", "2.14.0"))
    pip(synced, "install", "--no-deps", str(other), str(later))
    (synced.site / "einops" / "__init__.py").write_text("")
    findings = check_lock(lock, synced.python)
    assert {"file-two-owners", "torch-moved", "file-changed", "lock-extra"} <= set(codes(findings))
    shared = next(f for f in findings if f.code == "file-two-owners")
    assert "belongs to fla-core and fla-fork" in shared.reason
    assert str(synced.site / "fla" / "__init__.py") in shared.reason
    assert codes(sync(lock, synced.python, cache=CACHE)) == ["lock-holds"]
    assert (synced.site / "fla" / "__init__.py").read_text() == "# 0.6.0\n"


def test_what_is_not_in_the_lock_is_said_and_removed_unless_kept(synced: Interpreter, lock: Lock) -> None:
    info = synced.site / "triton-3.7.1.dist-info"
    shutil.copytree(synced.site / "einops-0.8.1.dist-info", info)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: triton\nVersion: 3.7.1\n")
    (info / "RECORD").write_text("".join(f"{info.name}/{path.name},,\n" for path in info.iterdir()))
    holds, extra = check_lock(lock, synced.python)
    assert (holds.code, extra.code, extra.status) == ("lock-holds", "lock-extra", Status.WARN)
    assert "triton" in extra.reason
    assert "lock-extra" in codes(sync(lock, synced.python, cache=CACHE, keep_extra=True))
    assert codes(sync(lock, synced.python, cache=CACHE)) == ["lock-holds"]


def test_a_distribution_without_a_record_proves_nothing(synced: Interpreter, lock: Lock) -> None:
    (synced.site / "einops-0.8.1.dist-info" / "RECORD").unlink()
    [finding] = check_lock(lock, synced.python)
    assert finding.code == "lock-record"


def test_a_lock_for_another_python_is_refused(env: Interpreter, lock: Lock) -> None:
    other = dataclasses.replace(lock, target=dataclasses.replace(lock.target, python="3.12"))
    assert "lock-python" in codes(check_lock(other, env.python))
    with pytest.raises(InputError, match=r"the lock is for 3\.12"):
        sync(other, env.python, cache=CACHE)


def test_kernelguards_own_environment_is_never_emptied(lock: Lock) -> None:
    with pytest.raises(InputError, match="kernelguard itself"):
        sync(lock, Path(sys.executable), cache=CACHE)


def test_an_interpreter_that_is_not_there_is_an_input_error(lock: Lock, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be run"):
        check_lock(lock, tmp_path / "nope")


def test_an_interpreter_that_answers_nothing_is_not_a_no(lock: Lock) -> None:
    with pytest.raises(UndeterminedError, match="could not be read"):
        check_lock(lock, Path("/bin/true"))


def test_bytes_that_are_not_those_of_the_lock_are_refused_by_pip(env: Interpreter, lock: Lock, shared: World) -> None:
    path = "/files/fla_core-0.6.0-py3-none-any.whl"
    right = shared.site.files[path]
    page = shared.site.files["/simple/fla-core/"]
    body = wheel("fla-core", "0.6.0", files={"fla/__init__.py": "# swapped on the server\n"})
    try:
        shared.site.put(path, body)
        listing = json.loads(page[1])
        for row in listing["files"]:
            row["hashes"] = {}
        shared.site.files["/simple/fla-core/"] = (page[0], json.dumps(listing).encode())
        with pytest.raises(ToolError, match=r"(?i)hash"):
            sync(lock, env.python, cache=CACHE)
    finally:
        shared.site.files[path] = right
        shared.site.files["/simple/fla-core/"] = page
    assert not (env.site / "fla").exists()


def test_a_wheel_that_breaks_off_leaves_nothing_half_installed(env: Interpreter, lock: Lock, shared: World) -> None:
    path = "/files/einops-0.8.1-py3-none-any.whl"
    shared.site.special[path] = cut_off(shared.site.files[path][1])
    try:
        with pytest.raises(ToolError):
            sync(lock, env.python, cache=CACHE)
    finally:
        del shared.site.special[path]
    assert not list(env.site.glob("*.dist-info"))


# -- hub kernels ------------------------------------------------------------------------------------------------------

VARIANT = "torch-cuda"


@pytest.fixture
def hub_lock(lock: Lock, shared: World) -> tuple[Lock, FakeHub, Hub]:
    hub = FakeHub(shared.site)
    files = variant("conv", VARIANT)
    commit = hub.publish("org/conv", {VARIANT: files})
    pin = HubPin(
        repository="org/conv",
        version=1,
        commit=commit,
        variant=VARIANT,
        files=tuple(
            HubFilePin(path=path, sha256=sha256(str(text).encode()), size=len(str(text)))
            for path, text in files.items()
        ),
    )
    return dataclasses.replace(lock, hub=(pin,)), hub, Hub(hub.url, HTTP)


def test_hub_files_are_put_in_place_hashed_and_found_again_offline(
    synced: Interpreter, hub_lock: tuple[Lock, FakeHub, Hub]
) -> None:
    lock, _, client = hub_lock
    with pytest.raises(UndeterminedError, match="no hub was given"):
        sync(lock, synced.python, cache=CACHE)
    assert codes(sync(lock, synced.python, cache=CACHE, hub=client)) == ["lock-holds"]
    # Offline from here on: neither looking nor making it right again needs the hub.
    assert codes(check_lock(lock, synced.python)) == ["lock-holds"]
    assert codes(sync(lock, synced.python, cache=CACHE)) == ["lock-holds"]
    place = synced.prefix / "share" / "kernelguard" / "hub" / "org" / "conv"
    assert local_kernels(lock, synced.prefix) == f"org/conv={place / 'build' / VARIANT}"
    assert (place / "build" / VARIANT / "__init__.py").read_text() == f"WHICH = {VARIANT!r}\n"


@pytest.mark.online
def test_the_real_kernels_package_loads_the_pinned_files_offline(
    synced: Interpreter, hub_lock: tuple[Lock, FakeHub, Hub]
) -> None:
    lock, _, client = hub_lock
    sync(lock, synced.python, cache=CACHE, hub=client)
    code = "from kernels import get_kernel; k = get_kernel('org/conv', version=1); print(k.WHICH, k.__file__)"
    env = {**os.environ, "LOCAL_KERNELS": local_kernels(lock, synced.prefix), "HF_HUB_OFFLINE": "1"}
    python = tool("kernels-0.17.2", "kernels==0.17.2")
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, env=env)
    which, file = done.stdout.split()
    assert which == VARIANT
    assert Path(file).is_relative_to(synced.prefix / "share" / "kernelguard" / "hub")


def test_a_changed_missing_or_added_hub_file_is_named(synced: Interpreter, hub_lock: tuple[Lock, FakeHub, Hub]) -> None:
    lock, _, client = hub_lock
    sync(lock, synced.python, cache=CACHE, hub=client)
    folder = synced.prefix / "share" / "kernelguard" / "hub" / "org" / "conv" / "build" / VARIANT
    (folder / "__init__.py").write_text("WHICH = 'else'\n")
    (folder / "metadata.json").unlink()
    (folder / "sitecustomize.py").write_text("")
    assert set(codes(check_lock(lock, synced.python))) == {"hub-file-changed", "hub-file-missing", "hub-file-extra"}
    assert codes(sync(lock, synced.python, cache=CACHE, hub=client)) == ["lock-holds"]


def test_a_branch_that_moved_is_named_and_one_that_cannot_be_asked_is_unknown(
    synced: Interpreter, hub_lock: tuple[Lock, FakeHub, Hub], shared: World
) -> None:
    lock, hub, client = hub_lock
    sync(lock, synced.python, cache=CACHE, hub=client)
    assert codes(check_lock(lock, synced.python, hub=client)) == ["lock-holds"]
    moved = hub.publish("org/conv", {VARIANT: {**variant("conv", VARIANT), "new.py": ""}})
    [finding] = check_lock(lock, synced.python, hub=client)
    assert (finding.code, finding.status) == ("hub-branch-moved", Status.FAIL)
    assert moved in finding.reason
    assert lock.hub[0].commit in finding.reason
    shared.site.special["/api/kernels/org/conv/refs"] = broken
    [finding] = check_lock(lock, synced.python, hub=client)
    assert (finding.code, finding.status) == ("hub-unreachable", Status.UNKNOWN)
    del shared.site.special["/api/kernels/org/conv/refs"]


def test_a_hub_that_serves_other_bytes_is_refused(
    synced: Interpreter, hub_lock: tuple[Lock, FakeHub, Hub], shared: World
) -> None:
    lock, _, client = hub_lock
    commit = lock.hub[0].commit
    path = f"/kernels/org/conv/resolve/{commit}/build/{VARIANT}/__init__.py"
    right = shared.site.special[path]
    shared.site.special[path] = lambda handler: handler.answer(200, "text/plain", b"WHICH = 'torch-evil'"[:21])  # type: ignore[attr-defined]
    with pytest.raises(UndeterminedError, match="is pinned"):
        sync(lock, synced.python, cache=CACHE, hub=client)
    shared.site.special[path] = right
    assert not (
        synced.prefix / "share" / "kernelguard" / "hub" / "org" / "conv" / "build" / VARIANT / "__init__.py"
    ).exists()


# -- records ----------------------------------------------------------------------------------------------------------


def test_the_record_of_a_wheel_and_of_its_installation_have_one_digest(
    synced: Interpreter, lock: Lock, shared: World
) -> None:
    url = f"{shared.site.url}/files/fla_core-0.6.0-py3-none-any.whl"
    installed = (synced.site / "fla_core-0.6.0.dist-info" / "RECORD").read_text()
    assert "INSTALLER" in installed
    assert record_digest(parse_record(installed)) == digest_of_wheel(url, HTTP)
    assert next(p for p in lock.pins if p.name == "fla-core").files_sha256 == digest_of_wheel(url, HTTP)


def test_a_record_digest_depends_on_every_file_and_not_on_their_order() -> None:
    rows = [("a.py", "1"), ("b.py", "2")]
    assert record_digest(rows) == record_digest(rows[::-1])
    assert record_digest(rows) != record_digest(rows[:1])
    assert record_digest(rows) != record_digest([("a.py", "1"), ("b.py", "3")])
    assert record_digest(rows) == record_digest([*rows, ("x-1.dist-info/INSTALLER", "9"), ("__pycache__/a.pyc", "8")])
