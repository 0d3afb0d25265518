"""A Docker engine: what it is asked for, and in which words its errors are passed on.

The SDK is imported only here, and only when an engine is needed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kernelguard.errors import KernelguardError, UndeterminedError
from kernelguard.image.complaints import engine_error, pull_error, push_error, unreachable
from kernelguard.image.containers import Containers
from kernelguard.image.labels import RUN, STAGE, content_identity
from kernelguard.image.runs import abandoned
from kernelguard.image.values import ImageFacts, Layer, Resolved

_PING_S = 20
_COMMIT_S = 2.0
"""From the end of a step's container until its image is there, on a busy machine."""
_CALL_S = 900
"""Without a byte: removing gigabytes on a busy disk takes minutes."""
_Bytes = dict[str, tuple[int, int]]
"""By layer: how many bytes went over the wire, and how many there are."""


class Engine(Containers):
    """One engine, and everything that this run started on it."""

    def __init__(self, client: Any, *, host: str) -> None:
        super().__init__(client)
        self.host = host
        """How it was reached."""
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
        layers: _Bytes = {}
        repository, tag = _split(name)
        try:
            for event in self._client.api.pull(repository, tag=tag, stream=True, decode=True):
                _hold(event, name, pull_error)
                _tell(event, "Downloading", layers, progress)
        except KernelguardError:
            raise
        except Exception as error:
            raise pull_error(name, str(getattr(error, "explanation", None) or error)) from error

    def push(self, name: str, progress: Any = None) -> str:
        """Send an image to the registry in its name; the digest that it has there.

        Raises:
            ToolError: the registry does not take it.
            UndeterminedError: it does not answer.
        """
        layers: _Bytes = {}
        repository, tag = _split(name)
        digest = ""
        try:
            for event in self._client.api.push(repository, tag=tag, stream=True, decode=True):
                _hold(event, name, push_error)
                digest = (event.get("aux") or {}).get("Digest") or digest
                _tell(event, "Pushing", layers, progress)
        except KernelguardError:
            raise
        except Exception as error:
            raise push_error(name, str(getattr(error, "explanation", None) or error)) from error
        facts = None if digest else self.image(name)
        if facts is not None:
            # With containerd's image store an engine tells nothing; there an image's id is its digest everywhere.
            digest = next((d for d in (k.partition("@")[2] for k in facts.repo_digests) if d == facts.id), "")
        if not digest:
            raise UndeterminedError(f"{name} was pushed, and the engine told no digest", hint=f"docker push {name}")
        return digest

    def talks_plainly(self, name: str) -> bool:
        """Whether the registry in an image's name is spoken to without TLS: as the engine is configured."""
        host = name.partition("/")[0]
        machine = host.partition(":")[0]
        known = self._client.api.info().get("RegistryConfig") or {}
        if (known.get("IndexConfigs") or {}).get(host, {}).get("Secure") is False:
            return True
        try:
            address = ipaddress.ip_address({"localhost": "127.0.0.1"}.get(machine, machine))
        except ValueError:
            return False
        return any(address in ipaddress.ip_network(net) for net in known.get("InsecureRegistryCIDRs") or ())

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
            if abandoned((row.get("Labels") or {}).get(RUN, "")):
                self._remove_container(row["Id"])
                gone += 1
        for row in api.images(filters={"reference": "kernelguard-*"}):
            for name in row.get("RepoTags") or ():
                if abandoned(name.rpartition(":")[2]):
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
        raise unreachable(error, host) from error
    engine = Engine(client, host=host)
    try:
        client.ping()
        client.api.timeout = _CALL_S
        yield engine
    except (docker.errors.DockerException, OSError) as error:
        raise engine_error(error, "asking") from error
    finally:
        engine.close()


def _hold(event: Mapping[str, Any], name: str, meaning: Callable[[str, str], KernelguardError]) -> None:
    if "error" in event:
        raise meaning(name, str(event["error"]))


def _tell(event: Mapping[str, Any], status: str, layers: _Bytes, progress: Any) -> None:
    """Pass on the bytes of all layers, when an event has news of one."""
    detail = event.get("progressDetail") or {}
    if progress is not None and detail.get("total") and event.get("status") == status:
        layers[event.get("id", "")] = (detail.get("current", 0), detail["total"])
        progress(sum(done for done, _ in layers.values()), sum(total for _, total in layers.values()))


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
