"""A Docker engine: what it is asked for, and in which words its errors are passed on.

The SDK is imported only here, and only when an engine is needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import socket
import tarfile
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError, KernelguardError, ToolError, UndeterminedError
from kernelguard.image.labels import RUN, STAGE, content_identity
from kernelguard.image.values import ImageFacts, Layer, Resolved

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TAIL_LINES = 20
_NO_SUCH_IMAGE = ("not found", "manifest unknown", "pull access denied", "does not exist", "invalid reference")
_SLICE_S = 1.0
_PING_S = 20
_COMMIT_S = 2.0
"""From the end of a step's container until its image is there, on a busy machine."""
_CALL_S = 900
"""Without a byte: removing gigabytes on a busy disk takes minutes."""


class GpuRuntimeError(UndeterminedError):
    """The engine cannot hand a GPU to a container."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What became of a container."""

    code: int | None
    """None: the time was up."""
    output: str
    """Its last lines, standard output and error together."""
    oom_killed: bool = False
    files: Mapping[str, bytes] = field(default_factory=dict)
    """By the path that was asked for; what was not there is not in it."""


class Engine:
    """One engine, and everything that this run started on it."""

    def __init__(self, client: Any, *, host: str) -> None:
        self._client = client
        self.host = host
        """How it was reached."""
        self.run_id = _run_id(os.getpid())
        self._temporary: list[str] = []
        self.steps: list[str] = []
        """Ids of the images that the classic builder said to have made, one for each step."""

    # -- images ------------------------------------------------------------------------------------------------------

    def image(self, name: str) -> ImageFacts | None:
        """What is known about an image; None: the engine does not have it."""
        import docker.errors  # noqa: PLC0415

        try:
            found = self._client.api.inspect_image(name)
        except docker.errors.ImageNotFound:
            return None
        except docker.errors.NullResource:
            return None
        except Exception as error:
            raise engine_error(error, f"looking at {name}") from error
        return _facts(found)

    def resolve(self, name: str, *, pull: bool = False, progress: Any = None) -> Resolved:
        """Pin an image name to a digest: what the engine already has, else what the registry says.

        Raises:
            InputError: there is no such image.
            UndeterminedError: it is not here, and the registry cannot be reached.
        """
        facts = None if pull else self.image(name)
        if facts is None:
            try:
                self._pull(name, progress)
            except UndeterminedError:
                # Asking again is a wish; a registry out of reach does not make the image at hand unusable.
                if not pull or self.image(name) is None:
                    raise
            facts = self.image(name)
        if facts is None:
            raise UndeterminedError(f"{name} was pulled, and the engine does not have it")
        repository = _repository(name)
        for known in facts.repo_digests:
            place, _, digest = known.partition("@")
            if _familiar(place) == _familiar(repository):
                return Resolved(name=name, reference=f"{repository}@{digest}", digest=digest)
        return Resolved(name=name, reference=facts.id, digest=facts.id, local=True)

    def _pull(self, name: str, progress: Any) -> None:
        layers: dict[str, tuple[int, int]] = {}
        repository, tag = _split(name)
        try:
            for event in self._client.api.pull(repository, tag=tag, stream=True, decode=True):
                _hold_pull(name, event)
                detail = event.get("progressDetail") or {}
                if progress is not None and detail.get("total") and event.get("status") == "Downloading":
                    layers[event.get("id", "")] = (detail.get("current", 0), detail["total"])
                    progress(sum(c for c, _ in layers.values()), sum(t for _, t in layers.values()))
        except KernelguardError:
            raise
        except Exception as error:
            raise _pull_error(name, str(getattr(error, "explanation", None) or error)) from error

    def tag(self, image_id: str, name: str) -> None:
        """Give an image a name, taking it from whatever had it."""
        repository, tag = _split(name)
        try:
            self._client.api.tag(image_id, repository, tag or "latest", force=True)
        except Exception as error:
            raise engine_error(error, f"tagging {name}") from error

    def tag_for_now(self, image_id: str, purpose: str) -> str:
        """A name that `cleanup` takes away again, for builders that cannot start from an image id."""
        name = f"kernelguard-{purpose}:{self.run_id}"
        self.tag(image_id, name)
        self._temporary.append(name)
        return name

    def remove(self, name: str) -> None:
        """Take a name away, and the image if nothing else uses it. What is not there, or in use, is left."""
        import docker.errors  # noqa: PLC0415

        with contextlib.suppress(docker.errors.ImageNotFound, docker.errors.APIError):
            self._client.api.remove_image(name)

    def layers(self, name: str) -> tuple[Layer, ...]:
        """Layers with their sizes, oldest first; those without bytes are left out."""
        try:
            rows = self._client.api.history(name)
        except Exception as error:
            raise engine_error(error, f"reading the history of {name}") from error
        found = [Layer(size=int(r["Size"]), made_by=_made_by(str(r.get("CreatedBy") or ""))) for r in reversed(rows)]
        return tuple(layer for layer in found if layer.size)

    def build_classic(
        self,
        context: Iterator[bytes],
        *,
        labels: Mapping[str, str],
        target: str = "",
        network: str | None = None,
        no_cache: bool = False,
        timeout: float | None = None,
    ) -> Generator[Mapping[str, Any], None, None]:
        """The events of a build by the engine's classic builder, as they happen; raises for none of them.

        Giving up the iterator stops the build: the engine sees the connection close.
        """
        try:
            yield from self._client.api.build(
                fileobj=context,
                custom_context=True,
                rm=True,
                forcerm=True,
                labels=dict(labels),
                target=target,
                network_mode=network,
                nocache=no_cache,
                decode=True,
                timeout=timeout,
            )
        except KernelguardError:
            raise
        except Exception as error:
            raise engine_error(error, "building") from error

    # -- containers --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def container(
        self,
        image: str,
        command: Sequence[str],
        *,
        gpu: bool = False,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        shm_bytes: int | None = None,
        workdir: str | None = None,
    ) -> Iterator[str]:
        """A created container without a network and without privileges, removed in the end; its id.

        Raises:
            GpuRuntimeError: a GPU was asked for, and the engine can give none.
        """
        api = self._client.api
        devices = _device_requests(api) if gpu else None
        try:
            host = api.create_host_config(
                network_mode="none",
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                init=True,
                device_requests=devices,
                shm_size=shm_bytes,
            )
            made = api.create_container(
                image,
                list(command),
                entrypoint="",
                user=user,
                environment=dict(environment or {}),
                host_config=host,
                labels={RUN: self.run_id},
                working_dir=workdir,
                stdin_open=False,
            )
        except Exception as error:
            raise engine_error(error, f"starting {image}") from error
        try:
            yield str(made["Id"])
        finally:
            self._remove_container(made["Id"])

    def put(self, container: str, folder: str, archive: bytes | Iterator[bytes]) -> None:
        """Unpack a tar into a folder of a container."""
        try:
            self._client.api.put_archive(container, folder, archive)
        except Exception as error:
            raise engine_error(error, "copying into a container") from error

    def run(self, container: str, *, timeout: float, fetch: Sequence[str] = (), line: Any = None) -> Ran:
        """Start a container, wait for it for at most `timeout` seconds, and fetch files out of it."""
        import requests.exceptions  # noqa: PLC0415

        api = self._client.api
        try:
            api.start(container)
        except Exception as error:
            raise engine_error(error, "starting a container") from error
        deadline = time.monotonic() + timeout
        code: int | None = None
        said = 0
        while code is None and time.monotonic() < deadline:
            try:
                code = int(
                    api.wait(container, timeout=min(_SLICE_S, max(deadline - time.monotonic(), 0.1)))["StatusCode"]
                )
            except requests.exceptions.ConnectionError as error:
                if "timed out" not in str(error).lower():
                    raise engine_error(error, "waiting for a container") from error
            except requests.exceptions.ReadTimeout:
                pass
            except Exception as error:
                raise engine_error(error, "waiting for a container") from error
            if line is not None:
                lines = self._logs(container).splitlines()
                for text in lines[said:]:
                    line(text)
                said = len(lines)
        if code is None:
            with contextlib.suppress(Exception):
                api.kill(container)
        state = api.inspect_container(container)["State"]
        return Ran(
            code=code,
            output=self._logs(container, tail=_TAIL_LINES),
            oom_killed=bool(state.get("OOMKilled")),
            files={path: body for path in fetch if (body := self._get(container, path)) is not None},
        )

    def _logs(self, container: str, tail: int | str = "all") -> str:
        raw = self._client.api.logs(container, stdout=True, stderr=True, tail=tail)
        return plain(raw.decode("utf-8", "replace"))

    def output(self, container: str) -> str:
        """Everything that a container printed to standard output."""
        return plain(self._client.api.logs(container, stdout=True, stderr=False).decode("utf-8", "replace"), keep=True)

    def archive(self, container: str, path: str) -> bytes | None:
        """A tar of a file or folder of a container; None: it is not there."""
        import docker.errors  # noqa: PLC0415

        try:
            chunks, _ = self._client.api.get_archive(container, path)
            return b"".join(chunks)
        except docker.errors.NotFound:
            return None
        except Exception as error:
            raise engine_error(error, f"copying {path} out of a container") from error

    def _get(self, container: str, path: str) -> bytes | None:
        body = self.archive(container, path)
        if body is None:
            return None
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            member = next((m for m in archive.getmembers() if m.isfile()), None)
            handle = archive.extractfile(member) if member is not None else None
            return handle.read() if handle is not None else None

    def _remove_container(self, container: str) -> None:
        import docker.errors  # noqa: PLC0415

        with contextlib.suppress(docker.errors.APIError):
            self._client.api.remove_container(container, v=True, force=True)

    # -- leftovers ---------------------------------------------------------------------------------------------------

    def cleanup(self) -> None:
        """Remove what this run made for itself: containers, names, and the stages of its builds."""
        for row in self._client.api.containers(all=True, filters={"label": f"{RUN}={self.run_id}"}):
            self._remove_container(row["Id"])
        for name in self._temporary:
            self.remove(name)
        # Newest first. The engine refuses, and so keeps, what an image that has a name was made from.
        for image_id in reversed(dict.fromkeys(self.steps)):
            facts = self.image(image_id)
            if facts is not None and not facts.tags and not facts.repo_digests:
                self.remove(image_id)
        self._temporary.clear()
        self.steps.clear()

    def adopt_last_step(self, bases: Sequence[str], patience: float = 60.0) -> None:
        """Wait for what the classic builder makes of the step that it was in when it was left, to clean that up too.

        It ends that step after the connection is closed, and tells nobody which image came of it. `bases` are the
        images that the build started from.
        """
        deadline = time.monotonic() + patience
        quiet = time.monotonic() + _COMMIT_S
        while time.monotonic() < deadline:
            # Several quick steps may have ended since the last look, each made from the one before.
            rows = self._client.api.images(all=True, filters={"label": STAGE})
            new: list[str] = []
            for _ in rows:
                ours = (*self.steps, *bases)
                children = [row["Id"] for row in rows if _one_of(row.get("ParentId", ""), ours)]
                more = [image_id for image_id in children if not _one_of(image_id, self.steps)]
                if not more:
                    break
                self.steps += more
                new += more
            ours = (*self.steps, *bases)
            running = self._client.api.containers(filters={"status": "running"})
            if new or any(_one_of(row.get("ImageID", ""), ours) for row in running):
                quiet = time.monotonic() + _COMMIT_S
            elif time.monotonic() > quiet:
                return
            time.sleep(0.2)

    def sweep(self) -> int:
        """Remove the containers and names of runs on this machine that were killed; how many there were."""
        api = self._client.api
        gone = 0
        for row in api.containers(all=True, filters={"label": RUN}):
            if _abandoned((row.get("Labels") or {}).get(RUN, "")):
                self._remove_container(row["Id"])
                gone += 1
        for row in api.images(filters={"reference": "kernelguard-*"}):
            for name in row.get("RepoTags") or ():
                if _abandoned(name.rpartition(":")[2]):
                    self.remove(name)
                    gone += 1
        return gone

    def close(self) -> None:
        """Give the connection back."""
        self._client.close()


def _one_of(image_id: str, known: Iterable[str]) -> bool:
    """Whether an id is among ids that may be cut short."""
    plain = image_id.removeprefix("sha256:")
    return any(plain.startswith(one.removeprefix("sha256:")[:12]) for one in known if one and plain)


@contextlib.contextmanager
def connect(environ: Mapping[str, str]) -> Iterator[Engine]:
    """The engine that DOCKER_HOST or the current Docker context names.

    Raises:
        UndeterminedError: the SDK is not installed, no engine answers, or this user may not talk to it.
    """
    try:
        import docker  # noqa: PLC0415
        import docker.errors  # noqa: PLC0415
    except ImportError as error:
        raise UndeterminedError(
            "the Docker SDK is not installed, so no engine can be asked",
            hint="pip install 'kernelguard-preflight[image]'",
        ) from error
    host = environ.get("DOCKER_HOST") or "the default engine"
    try:
        client = docker.from_env(environment=dict(environ), timeout=_PING_S)
    except (docker.errors.DockerException, OSError) as error:
        raise _unreachable(error, host) from error
    engine = Engine(client, host=host)
    try:
        client.ping()
        client.api.timeout = _CALL_S
        yield engine
    except (docker.errors.DockerException, OSError) as error:
        raise engine_error(error, "asking") from error
    finally:
        engine.close()


def _unreachable(error: Exception, host: str) -> UndeterminedError:
    told = _told(error)
    if "PermissionError" in told or "Permission denied" in told:
        return UndeterminedError(
            f"this user may not talk to the Docker engine at {host}: permission denied on its socket",
            hint="sudo usermod -aG docker $USER and log in again, or use a rootless engine: DOCKER_HOST=unix://...",
        )
    if any(word in told for word in ("FileNotFoundError", "ConnectionRefused", "Connection refused", "No such file")):
        return UndeterminedError(
            f"no Docker engine answers at {host}", hint="sudo systemctl start docker, or set DOCKER_HOST"
        )
    return UndeterminedError(f"the Docker engine at {host} does not answer: {told}", hint="docker version")


def engine_error(error: Exception, doing: str) -> KernelguardError:
    """What an engine's error means, with the fix."""
    if isinstance(error, KernelguardError):
        return error
    text = _told(error)
    return build_error(text, doing) or ToolError(f"{doing}: the engine said: {text}", hint="docker info")


def build_error(text: str, doing: str) -> KernelguardError | None:
    """The errors that have a cause of their own, wherever they come up; None: not one of those."""
    low = text.lower()
    if "could not select device driver" in low or (
        "cdi" in low and ("unresolvable" in low or "device injection" in low)
    ):
        return GpuRuntimeError(
            f"the engine cannot give a GPU to a container: {text}",
            hint="install nvidia-container-toolkit and restart docker; or --require-level import here, then "
            "`kernelguard verify --image` and `kernelguard promote` on a GPU machine",
        )
    if "requirement error" in low and "cuda" in low:
        return InputError(
            f"the driver of this machine is too old for the image: {text.strip().splitlines()[-1]}",
            hint="a newer driver, or lock for an older CUDA: --target h100,driver=<this driver>",
        )
    if "no space left on device" in low:
        return ToolError(f"{doing}: the engine's disk is full", hint="docker system df; docker system prune")
    if "permission denied" in low and "connect" in low:
        return _unreachable(PermissionError(text), "its socket")
    if any(word in low for word in ("connection aborted", "connection refused", "connection reset", "broken pipe")):
        return ToolError(f"{doing}: the engine went away: {text}", hint="journalctl -u docker; then build again")
    return None


def _hold_pull(name: str, event: Mapping[str, Any]) -> None:
    if "error" in event:
        raise _pull_error(name, str(event["error"]))


def _pull_error(name: str, text: str) -> KernelguardError:
    low = text.lower()
    known = build_error(text, f"pulling {name}")
    if isinstance(known, ToolError) and "disk is full" in known.message:
        return known
    if any(
        word in low
        for word in ("not found", "manifest unknown", "pull access denied", "does not exist", "invalid reference")
    ):
        return InputError(
            f"there is no image {name} that this engine may pull: {text}",
            hint="docker login, or another name: --base IMAGE",
        )
    return UndeterminedError(
        f"the image {name} is not here, and its registry cannot be reached: {text}",
        hint=f"docker pull {name} where there is a network, or name an image that is here: --base IMAGE",
    )


def plain(text: str, *, keep: bool = False) -> str:
    """With plain line ends, and without terminal colours unless they are to be kept."""
    return (text if keep else _ANSI.sub("", text)).replace("\r\n", "\n")


def _told(error: Exception) -> str:
    explanation = getattr(error, "explanation", None)
    return plain(str(explanation or f"{type(error).__name__}: {error}")).strip()


def _device_requests(api: Any) -> list[Mapping[str, Any]]:
    """CDI where the engine knows NVIDIA's devices by it and has no other driver for them; else `--gpus all`."""
    info = api.info()
    devices = [str(d.get("ID", "")) for d in info.get("DiscoveredDevices") or () if d.get("Source") == "cdi"]
    if any(name.startswith("nvidia.com/gpu") for name in devices) and "nvidia" not in (info.get("Runtimes") or {}):
        return [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]
    return [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]


def _facts(inspected: Mapping[str, Any]) -> ImageFacts:
    config = inspected.get("Config") or {}
    return ImageFacts(
        id=str(inspected["Id"]),
        tags=tuple(inspected.get("RepoTags") or ()),
        content=content_identity(inspected),
        labels=dict(config.get("Labels") or {}),
        layers=tuple((inspected.get("RootFS") or {}).get("Layers") or ()),
        size=int(inspected.get("Size") or 0),
        user=str(config.get("User") or ""),
        environment=tuple(config.get("Env") or ()),
        working_dir=str(config.get("WorkingDir") or ""),
        repo_digests=tuple(inspected.get("RepoDigests") or ()),
        architecture=str(inspected.get("Architecture") or ""),
    )


def _split(name: str) -> tuple[str, str]:
    """Repository and tag; a digest counts as the tag."""
    repository, at, digest = name.partition("@")
    if at:
        return repository, digest
    head, colon, tag = repository.rpartition(":")
    return (head, tag) if colon and "/" not in tag else (repository, "latest")


def _repository(name: str) -> str:
    return _split(name)[0]


def _familiar(repository: str) -> str:
    return repository.removeprefix("docker.io/").removeprefix("library/")


def _made_by(text: str) -> str:
    shape = re.sub(r"^/bin/sh -c (#\(nop\)\s+)?", "", text)
    return re.sub(r"\s+", " ", shape).strip()


def _run_id(pid: int) -> str:
    """This machine, process and moment, so that a later run can tell whether its owner still lives."""
    return f"{_machine()}-{pid}-{_started(pid)}"


def _abandoned(run_id: str) -> bool:
    """Whether this is the id of a run on this machine whose process is gone."""
    machine, _, rest = run_id.partition("-")
    pid, _, started = rest.partition("-")
    return machine == _machine() and pid.isdigit() and _started(int(pid)) != started


def _machine() -> str:
    # A host name is nobody else's business, and may hold what a tag cannot.
    boot = Path("/proc/sys/kernel/random/boot_id")
    text = f"{socket.gethostname()} {boot.read_text('utf-8') if boot.is_file() else ''}"
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; empty: there is none. Tells a new process with an old number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
