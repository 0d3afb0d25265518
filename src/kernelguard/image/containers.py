"""What a command in a container of an engine does: without a network and without privileges, and gone afterwards."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kernelguard.image.complaints import engine_error, plain
from kernelguard.image.labels import RUN
from kernelguard.image.runs import id_of

_TAIL_LINES = 20
_SLICE_S = 1.0


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


class Containers:
    """The containers of one run on an engine."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.run_id = id_of(os.getpid())

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


def _device_requests(api: Any) -> list[Mapping[str, Any]]:
    """CDI where the engine knows NVIDIA's devices by it and has no other driver for them; else `--gpus all`."""
    info = api.info()
    devices = [str(d.get("ID", "")) for d in info.get("DiscoveredDevices") or () if d.get("Source") == "cdi"]
    if any(name.startswith("nvidia.com/gpu") for name in devices) and "nvidia" not in (info.get("Runtimes") or {}):
        return [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}]
    return [{"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}]
