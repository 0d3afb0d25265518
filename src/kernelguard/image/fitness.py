"""Can this image train on its fused kernels, as far as its files tell? Findings from `look.py`'s facts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.judge.values import Finding, Status
from kernelguard.resolve.facts import Drivers

SHM_NEEDED = 1 << 30
"""Bytes. NCCL asks for some 10 MB for each pair of ranks, data loaders for far more."""
_HIDDEN = frozenset({"void", "none", "no"})
AIR = "air"
"""Databricks AI Runtime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Where the image shall run."""

    drivers: Drivers
    driver: Version | None = None
    """Of the machine that will run it; None: not said."""
    gpu_asked: bool = False
    """A GPU was passed in when the facts were taken."""
    ranks: int | None = None
    """Processes on one machine; None: not said."""
    shm_bytes: int | None = None
    """Shared memory that it will be given; None: what the engine gives by itself."""
    platform: str = ""
    """`air`, or empty."""


def image_findings(
    facts: Mapping[str, Any], situation: Situation, *, tags: Sequence[str] = (), working_dir: str = ""
) -> tuple[Finding, ...]:
    """Everything that is wrong with an image, or that cannot be told."""
    found = [
        *_toolchain(facts),
        *_bytecode(facts),
        *_gpu(facts, situation),
        *_compat(facts, situation),
        *_shm(facts, situation),
        *_tags(tags),
        *(_air(facts, working_dir) if situation.platform == AIR else ()),
    ]
    if not any(f.status in {Status.FAIL, Status.UNKNOWN} for f in found):
        triton = facts["triton"]
        text = (
            f"compiler, C headers and Python.h are there for triton {triton}" if triton else "nothing stands against it"
        )
        found.insert(0, _finding("image-fit", Status.PASS, text))
    return tuple(found)


def _toolchain(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Triton compiles a launcher stub for each kernel, the first time that one is called: hours in, if need be."""
    if not facts["torch"]:
        reason = f"{facts['executable']} has no torch: this is not the interpreter that trains, or no image to train in"
        yield _finding("image-no-torch", Status.UNKNOWN, reason, "--python PATH names another interpreter of the image")
    if not facts["triton"]:
        return
    needs = f"triton {facts['triton']} is installed, and compiles a launcher for each kernel at run time"
    if not facts["compiler"]:
        yield _finding(
            "image-no-compiler",
            Status.FAIL,
            f"{needs}; there is no C compiler in the image",
            "apt-get install --no-install-recommends gcc libc6-dev",
        )
    elif not facts["libc_headers"]:
        yield _finding(
            "image-no-compiler", Status.FAIL, f"{needs}; there are no C headers (stdio.h)", "apt-get install libc6-dev"
        )
    if not facts["python_headers"]:
        version = ".".join(facts["python"].split(".")[:2])
        yield _finding(
            "image-no-python-headers",
            Status.FAIL,
            f"{needs}; there is no Python.h in {facts['include']}",
            f"apt-get install python{version}-dev, or an image of python:{version}",
        )


def _bytecode(facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Without it each new container compiles what it imports: torch and transformers took 14.0 s instead of 5.7 s."""
    names = facts["uncompiled"]
    if names:
        yield _finding(
            "image-no-bytecode",
            Status.WARN,
            f"{', '.join(names)}: no bytecode in the image, so each new container compiles them before its first step "
            "(seconds), and every process does where it cannot write there",
            "RUN python -m compileall -q -j 0 $(python -c 'import site; print(*site.getsitepackages())')",
        )


def _gpu(facts: Mapping[str, Any], situation: Situation) -> Iterator[Finding]:
    """An old driver and a container without a GPU raise the same words in CUDA, and need different fixes."""
    cuda, seen = _version(facts["torch_cuda"]), _version(facts["driver"])
    visible = facts["environment"].get("NVIDIA_VISIBLE_DEVICES", "")
    hidden = facts["environment"].get("CUDA_VISIBLE_DEVICES")
    if visible in _HIDDEN:
        reason = f"the image sets NVIDIA_VISIBLE_DEVICES={visible}: the runtime gives its containers no GPU"
        yield _finding("image-hides-gpus", Status.FAIL, reason, "ENV NVIDIA_VISIBLE_DEVICES=all")
    if hidden is not None and hidden.strip() in {"", "-1"}:
        reason = f"the image sets CUDA_VISIBLE_DEVICES={hidden!r}: torch sees no GPU in its containers"
        yield _finding("image-hides-gpus", Status.FAIL, reason, "set it only in the RUN that needs it")
    capabilities = facts["environment"].get("NVIDIA_DRIVER_CAPABILITIES", "")
    if cuda is not None and capabilities and not {"compute", "all"} & set(capabilities.split(",")):
        reason = f"the image sets NVIDIA_DRIVER_CAPABILITIES={capabilities}: libcuda is not put into its containers"
        yield _finding("image-hides-gpus", Status.FAIL, reason, "ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    if situation.gpu_asked and not (facts["devices"] and facts["libcuda"]):
        lacks = "no /dev/nvidia* device" if not facts["devices"] else "no libcuda.so.1"
        known = f" (driver {facts['driver']} is loaded on the host)" if facts["driver"] else ""
        yield _finding(
            "image-no-gpu-passed",
            Status.FAIL,
            f"there is {lacks} in the container{known}: the container runtime put no GPU in, whatever the driver is",
            "docker run --gpus all, with nvidia-container-toolkit installed",
        )
        return
    yield from driver_finding(cuda, situation.driver or seen, situation.drivers, "torch")


def driver_finding(cuda: Version | None, driver: Version | None, drivers: Drivers, who: str) -> Iterator[Finding]:
    """Whether a driver runs what was built for this CUDA."""
    floor = drivers.floor(cuda) if cuda is not None else None
    if cuda is None or driver is None or floor is None or newest_of(driver) >= floor:
        return
    runs = supported(driver, drivers)
    supports = f"supports up to CUDA {runs[-1]}" if runs else "supports no CUDA that is known"
    yield _finding(
        "image-driver-too-old",
        Status.FAIL,
        f"{who} wants CUDA {cuda}, which needs driver >= {drivers.floor_text(cuda)}; driver {driver} {supports}",
        f"a newer driver, or lock for the older one: kernelguard lock MODEL --target h100,driver={driver}",
    )


def newest_of(driver: Version) -> Version:
    """A driver that was given by its branch alone (`550`) may be any release of it."""
    return driver if len(driver.release) > 1 else Version(f"{driver}.999")


def supported(driver: Version, drivers: Drivers) -> list[Version]:
    """The CUDA releases whose own driver this is, or an older one, oldest first."""
    return [cuda for cuda, needed in sorted(drivers.toolkit.items()) if Version(needed) <= newest_of(driver)]


def _compat(facts: Mapping[str, Any], situation: Situation) -> Iterator[Finding]:
    if not facts["compat"]:
        return
    driver = situation.driver or _version(facts["driver"])
    cuda = _version(facts["torch_cuda"])
    yield from compat_finding(", ".join(facts["compat"]), cuda, driver, situation.drivers)


def compat_finding(where: str, cuda: Version | None, driver: Version | None, drivers: Drivers) -> Iterator[Finding]:
    """cuda-compat brings the libcuda of an older driver: on a newer one that is error 803."""
    floor = drivers.floor(cuda) if cuda is not None else None
    fix = "leave cuda-compat out, or take its folder out of LD_LIBRARY_PATH and /etc/ld.so.conf.d"
    if driver is not None and floor is not None and newest_of(driver) < floor:
        return
    newer = driver is not None and floor is not None
    yield _finding(
        "image-cuda-compat",
        Status.FAIL if newer else Status.WARN,
        f"cuda-compat's libcuda ({where}) is found before the driver's own"
        + (
            f"; driver {driver} is new enough without it, and then CUDA fails with error 803"
            if newer
            else ": on a driver that is newer than it CUDA fails with error 803"
        ),
        fix,
    )


def _shm(facts: Mapping[str, Any], situation: Situation) -> Iterator[Finding]:
    if not facts["torch"]:
        return
    yield from shm_finding(
        situation.shm_bytes if situation.shm_bytes is not None else int(facts["shm_bytes"]), situation.ranks
    )


def shm_finding(size: int, ranks: int | None) -> Iterator[Finding]:
    """Whether NCCL's ranks of one machine find room in /dev/shm."""
    if size >= SHM_NEEDED or ranks == 1:
        return
    count = f"{ranks} ranks" if ranks else "several ranks on one machine"
    yield _finding(
        "image-shm",
        Status.FAIL if ranks else Status.WARN,
        f"/dev/shm is {size / 2**20:.0f} MB, NCCL and data loaders of {count} need 1 GB or more",  # noqa: S108 - that is where NCCL puts it
        "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory on /dev/shm",
    )


def _tags(tags: Sequence[str]) -> Iterator[Finding]:
    for tag in tags:
        if tag.endswith(":latest"):
            reason = f"{tag}: what `latest` names changes under whoever uses it"
            yield _finding("image-latest", Status.WARN, reason, f"docker tag {tag} {tag.removesuffix('latest')}v1")


def _air(facts: Mapping[str, Any], working_dir: str) -> Iterator[Finding]:
    """What Databricks AI Runtime asks of an image."""
    if not facts["databricks_python"]:
        yield _finding(
            "image-air",
            Status.FAIL,
            "AI Runtime looks for Python at /databricks/python/bin/python, and there is none",
            "RUN mkdir -p /databricks/python/bin && ln -sf $(command -v python) /databricks/python/bin/python",
        )
    environment = facts["environment"]
    for name, value in (("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")):
        if not environment.get(name):
            yield _finding("image-air", Status.FAIL, f"AI Runtime needs {name} in the image", f"ENV {name}={value}")
    if facts["os"] == "ubuntu 24.04" and environment.get("OPENSSL_FORCE_FIPS_MODE") != "0":
        reason = "Ubuntu 24.04 on AI Runtime's kernel needs OPENSSL_FORCE_FIPS_MODE=0"
        yield _finding("image-air", Status.WARN, reason, "ENV OPENSSL_FORCE_FIPS_MODE=0")
    if working_dir not in {"", "/"}:
        reason = f"AI Runtime ignores WORKDIR ({working_dir}): a relative path in the command is not found"
        yield _finding("image-air", Status.WARN, reason, f"python {working_dir.rstrip('/')}/train.py, by absolute path")


def _version(text: str) -> Version | None:
    try:
        return Version(text) if text else None
    except InvalidVersion:
        return None


def _finding(code: str, status: Status, reason: str, fix: str = "") -> Finding:
    return Finding(code=code, status=status, reason=reason, fix=fix)
