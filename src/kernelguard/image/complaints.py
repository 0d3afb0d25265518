"""What does an engine's error mean, and what mends it?"""

from __future__ import annotations

import re

from kernelguard.errors import InputError, KernelguardError, ToolError, UndeterminedError

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_OUT_OF_REACH = ("no such host", "connection refused", "i/o timeout", "network is unreachable", "name resolution")
_NO_SUCH_IMAGE = ("not found", "manifest unknown", "pull access denied", "does not exist", "invalid reference")


class GpuRuntimeError(UndeterminedError):
    """The engine cannot hand a GPU to a container."""


def unreachable(error: Exception, host: str) -> UndeterminedError:
    """No engine answers, or not to this user."""
    text = told(error)
    if "PermissionError" in text or "Permission denied" in text:
        return UndeterminedError(
            f"this user may not talk to the Docker engine at {host}: permission denied on its socket",
            hint="sudo usermod -aG docker $USER and log in again, or use a rootless engine: DOCKER_HOST=unix://...",
        )
    if any(word in text for word in ("FileNotFoundError", "ConnectionRefused", "Connection refused", "No such file")):
        return UndeterminedError(
            f"no Docker engine answers at {host}", hint="sudo systemctl start docker, or set DOCKER_HOST"
        )
    return UndeterminedError(f"the Docker engine at {host} does not answer: {text}", hint="docker version")


def engine_error(error: Exception, doing: str) -> KernelguardError:
    """What an engine's error means, with the fix."""
    if isinstance(error, KernelguardError):
        return error
    text = told(error)
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
    if "attestation is not supported" in low:
        return UndeterminedError(
            "this engine keeps no SBOM and no provenance: its image store is the classic one",
            hint='{"features": {"containerd-snapshotter": true}} in /etc/docker/daemon.json and restart docker; or do '
            "without --sbom",
        )
    if "failed to resolve source metadata" in low and any(word in low for word in _OUT_OF_REACH):
        (asked,) = re.findall(r"failed to resolve source metadata for (\S+?):? ", text)[:1] or ("an image",)
        return UndeterminedError(
            f"{doing}: {asked} is not here, and its registry cannot be reached",
            hint=f"docker pull {asked} where there is a network",
        )
    if "permission denied" in low and "connect" in low:
        return unreachable(PermissionError(text), "its socket")
    if any(word in low for word in ("connection aborted", "connection refused", "connection reset", "broken pipe")):
        return ToolError(f"{doing}: the engine went away: {text}", hint="journalctl -u docker; then build again")
    return None


def pull_error(name: str, text: str) -> KernelguardError:
    """What it means that an image cannot be pulled."""
    low = text.lower()
    known = build_error(text, f"pulling {name}")
    if isinstance(known, ToolError) and "disk is full" in known.message:
        return known
    if any(word in low for word in _NO_SUCH_IMAGE):
        return InputError(
            f"there is no image {name} that this engine may pull: {text}",
            hint="docker login, or another name: --base IMAGE",
        )
    return UndeterminedError(
        f"the image {name} is not here, and its registry cannot be reached: {text}",
        hint=f"docker pull {name} where there is a network, or name an image that is here: --base IMAGE",
    )


def push_error(name: str, text: str) -> KernelguardError:
    """What it means that an image cannot be sent to its registry; it is tagged here all the same."""
    low = text.lower()
    known = build_error(text, f"pushing {name}")
    if isinstance(known, ToolError) and "disk is full" in known.message:
        return known
    if any(word in low for word in ("denied", "unauthorized", "no basic auth", "authentication required")):
        return ToolError(
            f"the registry does not let this user push {name}: {text}",
            hint=f"docker login {name.partition('/')[0]}, then docker push {name}",
        )
    if any(word in low for word in ("no such host", "connection refused", "i/o timeout", "http response to https")):
        return UndeterminedError(f"the registry of {name} cannot be reached: {text}", hint=f"docker push {name}")
    return ToolError(f"{name} was not pushed: {text}", hint=f"docker push {name}")


def plain(text: str, *, keep: bool = False) -> str:
    """With plain line ends, and without terminal colours unless they are to be kept."""
    return (text if keep else _ANSI.sub("", text)).replace("\r\n", "\n")


def told(error: Exception) -> str:
    """In its own words."""
    explanation = getattr(error, "explanation", None)
    return plain(str(explanation or f"{type(error).__name__}: {error}")).strip()
