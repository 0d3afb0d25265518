"""Other builders, what the commands say, and what goes wrong: with a real engine."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from command import Command
from engine.base import libraries
from engine.test_build import Built, inside, leftovers, stale
from engine.world import EXAMPLE, World, says, tiny_lock, verdict
from kernelguard.errors import InputError, ToolError, UndeterminedError
from kernelguard.image.build import Talk, run_build
from kernelguard.image.builders import Order, build
from kernelguard.image.complaints import build_error
from kernelguard.image.context import tar_stream
from kernelguard.image.engine import Engine, connect
from kernelguard.image.values import Builder, ContextFile, State
from kernelguard.judge.values import Level
from kernelguard.lock.values import Role

OLD_DOCKER = Path("/usr/bin/docker")
"""Debian's, which speaks to BuildKit without a plugin; another docker may come before it on PATH."""


def test_buildkit_makes_the_same_image(engine: Engine, world: World) -> None:
    assert OLD_DOCKER.exists(), ".ci/engine.sh installs Debian's docker.io"
    environ = {**os.environ, "PATH": f"{OLD_DOCKER.parent}:{os.environ['PATH']}"}
    lines: list[str] = []
    made = run_build(
        engine,
        world.request(builder=Builder.BUILDKIT),
        environ,
        world.cache,
        talk=Talk(line=lines.append),
        verifier=says(verdict(Level.IMPORT)),
    )
    assert made.claims is not None
    assert made.facts is not None
    assert made.claims.state is State.CANDIDATE
    assert made.claims.content == made.facts.content
    assert inside(made.image, "id", "-u") == "1000"
    assert stale(made.image) == "0"
    assert any(line.startswith("step ") and "pip install" in line for line in lines)
    assert leftovers(engine) == []
    again = run_build(engine, world.request(builder=Builder.BUILDKIT), environ, world.cache, verifier=says())
    assert again.unchanged


def test_a_failing_step_under_buildkit(engine: Engine, world: World) -> None:
    environ = {**os.environ, "PATH": f"{OLD_DOCKER.parent}:{os.environ['PATH']}"}
    world.take(replace(tiny_lock(world.folder), target=replace(world.lock.target, python="3.13")))
    with pytest.raises(Exception, match=r"has no python3\.13"):
        run_build(engine, world.request(builder=Builder.BUILDKIT), environ, world.cache, verifier=says())
    assert leftovers(engine) == []


# -- the commands ------------------------------------------------------------------------------------------------------


def test_check_tells_what_an_image_lacks(base: str, no_compiler: str) -> None:
    """The facts are taken in a real container; a triton is put in so that the compiler matters."""
    said = _with_triton(no_compiler)
    done = Command("check", "--image", said, "--ranks", "8", "--driver", "580")
    assert done.code == 1
    text = " ".join(done.out.split())
    assert "there is no C compiler in the image" in text
    assert "/dev/shm is 64 MB" in text, "what the engine gives by itself"
    better = _with_triton(base)
    done = Command("check", "--image", better, "--ranks", "8", "--shm-size", "16384", "--json")
    rows = json.loads(done.out)["findings"]
    assert (done.code, [row["code"] for row in rows]) == (0, ["image-fit"])
    done = Command("check", "--image", better, "--gpus", "--shm-size", "16384")
    assert done.code == 3
    assert "cannot give a GPU" in " ".join(done.out.split())
    for name in (said, better):
        subprocess.run(["docker", "rmi", "-f", name], check=True, capture_output=True)


def _with_triton(start: str) -> str:
    name = f"kg-test-triton:{start.rpartition(':')[2]}"
    folder = "/usr/local/lib/python3.11/site-packages"
    info = "printf 'Metadata-Version: 2.1\\nName: {0}\\nVersion: {1}\\n' > {2}/{0}-{1}.dist-info/METADATA"
    steps = " && ".join(
        f"mkdir -p {folder}/{d}-{v}.dist-info && {info.format(d, v, folder)}"
        for d, v in (("triton", "3.7.1"), ("torch", "2.13.0"))
    )
    text = f"FROM {start}\nRUN {steps}\n"
    subprocess.run(["docker", "build", "-q", "-t", name, "-"], input=text.encode(), check=True, capture_output=True)
    return name


def test_an_image_of_ours_says_what_it_is(built: Built, engine: Engine) -> None:
    done = Command("check", "--image", built[1].image, "--shm-size", "16384")
    assert done.code == 0, done.out + done.err
    assert "candidate image of lock" in " ".join(done.out.split())
    changed = "kg-test-moved:v1"
    text = f"FROM {built[1].image}\nENV MOVED=1\n"
    subprocess.run(["docker", "build", "-q", "-t", changed, "-"], input=text.encode(), check=True, capture_output=True)
    assert Command("check", "--image", changed, "--shm-size", "16384").code == 1
    engine.remove(changed)


def test_a_dry_run_prints_everything_and_makes_nothing(world: World, engine: Engine) -> None:
    asked = ("build", world.path, "-t", world.image, "--base", world.base, "--model", EXAMPLE, "--dry-run")
    done = Command(*asked, "--require-level", "import")
    assert done.code == 0, done.err
    assert "AS system" in done.out
    for pin in world.lock.pins:
        assert f"wheels/{'others' if pin.role is Role.KERNEL else 'torch'}/{pin.filename}" in done.out
    assert "without a network" in done.out
    assert not (world.cache / "files").exists()
    document = json.loads(Command(*asked, "--json").out)
    assert document["kind"] == "build-plan"
    assert document["base"]["digest"].startswith("sha256:")
    assert engine.image(world.image) is None


def test_without_a_gpu_the_command_ends_with_3(world: World) -> None:
    done = Command("build", world.path, "-t", world.image, "--base", world.base, "--model", EXAMPLE)
    assert done.code == 3
    assert "fix: " in done.err
    assert "--require-level import" in done.err


@pytest.mark.parametrize(
    ("host", "said", "fix"),
    [
        ("unix:///nowhere/docker.sock", "no Docker engine answers", "systemctl start docker"),
        ("tcp://127.0.0.1:9", "no Docker engine answers", "DOCKER_HOST"),
    ],
)
def test_no_daemon(world: World, host: str, said: str, fix: str) -> None:
    done = Command("build", world.path, "-t", world.image, "--model", EXAMPLE, env={"DOCKER_HOST": host})
    assert done.code == 3
    assert said in done.err
    assert fix in done.err
    # A plan needs no engine.
    dry = Command("build", world.path, "-t", world.image, "--model", EXAMPLE, "--dry-run", env={"DOCKER_HOST": host})
    assert dry.code == 0
    assert "FROM python:3.11-slim-bookworm AS system" in dry.out


def test_no_permission_on_the_socket(base: str) -> None:
    """As another user, because root may talk to every socket."""
    assert base
    socket = Path(os.environ["DOCKER_HOST"].removeprefix("unix://"))
    code = (
        "import os, sys\nsys.path[:0] = sys.argv[1].split(':')\n"
        "from kernelguard.image.engine import connect\nfrom kernelguard.errors import UndeterminedError\n"
        "import docker\nos.setgid(65534); os.setuid(65534)\n"
        "try:\n    connect({'DOCKER_HOST': sys.argv[2]}).__enter__()\n"
        "except UndeterminedError as error:\n    print(error.message, '|', error.hint)\n"
    )
    if os.getuid() != 0:
        pytest.fail("this test needs to become another user")
    mode = socket.parent.stat().st_mode
    socket.parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, ":".join(sys.path), f"unix://{socket}"],
        capture_output=True,
        text=True,
        check=False,
    )
    socket.parent.chmod(mode)
    assert "permission denied on its socket" in done.stdout, done.stderr
    assert "usermod -aG docker" in done.stdout


def test_no_buildx(world: World, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    asked = ("build", world.path, "-t", world.image, "--base", world.base, "--model", EXAMPLE, "--builder", "buildx")
    done = Command(*asked, "--require-level", "import", env={"PATH": str(tmp_path / "bin")})
    assert done.code == 3
    assert "no buildx" in done.err
    assert "--builder legacy" in done.err


def test_a_step_that_is_killed_for_memory(engine: Engine, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does it, in a step that may use 64 MB."""
    assert base
    code = "kept = [bytearray(1 << 24) for _ in range(100)]"
    text = f"FROM {_base_id(engine)}\nRUN python3 -c '{code}'\n".encode()
    order = Order(files=(ContextFile(path="Dockerfile", content=text, size=len(text)),))
    api = engine._client.api
    limits = {"memory": 64 << 20, "memswap": 64 << 20}
    monkeypatch.setattr(api, "build", functools.partial(api.build, container_limits=limits))
    with pytest.raises(ToolError, match="as the kernel does when memory runs out") as raised:
        build(engine, Builder.LEGACY, order, environ=dict(os.environ), timeout=60)
    assert "--max-jobs" in str(raised.value.hint)
    engine.cleanup()
    assert leftovers(engine) == []


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """An engine whose data root is a small file system: a step, and the copying of a file, that do not fit."""
    with _small_engine(tmp_path, megabytes=64) as host, connect({"DOCKER_HOST": host}) as small:
        small._client.api.import_image_from_data(_shell(), repository="tiny", tag="1")
        huge = tmp_path / "huge"
        huge.write_bytes(b"1" * (100 << 20))
        for step in ('RUN ["/bin/sh", "-c", "dd if=/dev/zero of=/x bs=1M count=100"]', "COPY huge /huge"):
            text = f"FROM tiny:1\n{step}\n".encode()
            files = [ContextFile(path="Dockerfile", content=text, size=len(text))]
            if step.startswith("COPY"):
                files.append(ContextFile(path="huge", source=huge, size=huge.stat().st_size))
            with pytest.raises(ToolError, match="disk is full") as raised:
                build(small, Builder.LEGACY, Order(files=tuple(files)), environ={}, timeout=60)
            assert raised.value.exit_code == 4
            small.cleanup()


def _shell() -> bytes:
    """A root file system of a shell and `dd`."""
    programs = [Path("/bin/sh"), Path("/bin/dd")]
    root = io.BytesIO()
    with tarfile.open(fileobj=root, mode="w", dereference=True) as archive:
        for place in dict.fromkeys([*programs, *libraries(programs)]):
            archive.add(place, str(place).lstrip("/"))
    return root.getvalue()


@contextlib.contextmanager
def _small_engine(folder: Path, *, megabytes: int) -> Iterator[str]:
    """A second engine, in a network of its own, for there is one for each."""
    script = (
        'mount -t tmpfs -o size="$2m" none "$1/data" && exec dockerd --data-root "$1/data" --exec-root "$1/exec" '
        '--host "unix://$1/s" --pidfile "$1/pid" --bridge none --iptables=false'
    )
    (folder / "data").mkdir()
    with (folder / "log").open("wb") as log:
        command = ["unshare", "--net", "--mount", "sh", "-c", script, "sh", folder, str(megabytes)]
        engine = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not (folder / "s").exists():
            assert engine.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        yield f"unix://{folder}/s"
    finally:
        engine.terminate()
        engine.wait()


def _base_id(engine: Engine) -> str:
    facts = engine.image("kernelguard-test-base:host")
    assert facts is not None
    return facts.id


def test_an_oom_kill_in_a_container_is_told(engine: Engine, base: str) -> None:
    api = engine._client.api
    host = api.create_host_config(mem_limit="64m", memswap_limit="64m", network_mode="none")
    code = "kept = [bytearray(1 << 24) for _ in range(100)]"
    made = api.create_container(base, ["python3", "-c", code], host_config=host)["Id"]
    try:
        ran = engine.run(made, timeout=60)
    finally:
        api.remove_container(made, force=True)
    assert (ran.code, ran.oom_killed) == (137, True)


def test_a_container_that_hangs_is_ended(engine: Engine, base: str) -> None:
    with engine.container(base, ["python3", "-c", "import time; print('here', flush=True); time.sleep(600)"]) as one:
        ran = engine.run(one, timeout=2.0)
    assert ran.code is None
    assert "here" in ran.output
    assert leftovers(engine) == []


def test_containers_have_no_network_and_no_privileges(engine: Engine, base: str) -> None:
    code = "import os; print(sorted(os.listdir('/sys/class/net')))"
    with engine.container(base, ["python3", "-c", code]) as container:
        ran = engine.run(container, timeout=30)
        host = engine._client.api.inspect_container(container)["HostConfig"]
    assert ran.code == 0
    assert "['lo']" in ran.output
    assert (host["CapDrop"], host["SecurityOpt"]) == (["ALL"], ["no-new-privileges"])


def test_a_folder_with_a_socket_or_a_huge_file_is_refused(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "code"
    folder.mkdir()
    with (folder / "checkpoint.bin").open("wb") as handle:
        os.truncate(handle.fileno(), 10 << 30)
    os.mkfifo(folder / "pipe")
    asked = ("build", world.path, "-t", world.image, "--base", world.base, "--model", EXAMPLE, "--add", folder)
    done = Command(*asked, "--require-level", "import")
    assert done.code == 2
    assert "checkpoint.bin has 10.0 GB" in done.err
    assert "pipe is a pipe" in done.err
    assert ".dockerignore" in done.err


def test_a_file_that_shrinks_while_it_is_sent_is_noticed(tmp_path: Path) -> None:
    place = tmp_path / "x"
    place.write_bytes(b"1" * (3 << 20))
    stream = tar_stream([ContextFile(path="x", source=place, size=3 << 20)])
    next(stream)
    next(stream)
    os.truncate(place, 1 << 20)
    with pytest.raises(InputError, match="changed while it was sent"):
        list(stream)


def test_words_of_engines_that_cannot_be_had_here() -> None:
    """As newer engines and machines with a GPU say it."""
    told: dict[str, Any] = {
        'could not select device driver "" with capabilities: [[gpu]]': UndeterminedError,
        "CDI device injection failed: unresolvable CDI devices nvidia.com/gpu=all": UndeterminedError,
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.8": InputError,
        "ERROR: Attestation is not supported for the docker driver.": UndeterminedError,
        "ERROR: failed to solve: x:3: failed to resolve source metadata for docker.io/library/x:3: failed to do "
        "request: dial tcp: lookup registry-1.docker.io: no such host": UndeterminedError,
    }
    for text, kind in told.items():
        error = build_error(text, "starting")
        assert isinstance(error, kind), text
        assert error.hint
    assert build_error("exec: no such file", "starting") is None
