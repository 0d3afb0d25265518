"""Which images is a lock built on? Names out of `docker/base-images.toml`; digests are asked for later."""

from __future__ import annotations

import tomllib

from packaging.version import Version

from kernelguard import data
from kernelguard.errors import InputError
from kernelguard.image.values import Base
from kernelguard.lock.values import Lock


def base_of(lock: Lock, given: str = "") -> Base:
    """The base of a lock, `given` in place of the table's runtime image.

    Raises:
        InputError: there is none: the glibc of the runtime image is too old for a wheel, or its CUDA is not known.
    """
    document = tomllib.loads((data.docker() / "base-images.toml").read_text("utf-8"))
    runtime = given or lock.base_image or document["runtime"]["name"].format(python=lock.target.python)
    glibc = Version(document["runtime"]["glibc"])
    if not (given or lock.base_image) and Version(lock.target.glibc) > glibc:
        raise InputError(
            f"the wheels of this lock need glibc {lock.target.glibc}, {runtime} has {glibc}",
            hint="name a newer base: --base IMAGE",
        )
    wanted = toolkit_version(lock)
    if wanted is None:
        return Base(cuda=None, runtime=runtime, toolkit="", glibc=glibc, driver=None, compatible=None)
    for row in document["cuda"]:
        if Version(row["version"]) == wanted:
            return Base(
                cuda=wanted,
                runtime=runtime,
                toolkit=row["toolkit"],
                glibc=glibc,
                driver=Version(row["driver"]),
                compatible=Version(row["compatible"]),
            )
    if needs_toolkit(lock):
        known = ", ".join(row["version"] for row in document["cuda"])
        raise InputError(
            f"no image with nvcc {wanted} is known, and the lock builds from source (known: {known})",
            hint="add a row to docker/base-images.toml, or lock for another torch",
        )
    return Base(cuda=wanted, runtime=runtime, toolkit="", glibc=glibc, driver=None, compatible=None)


def toolkit_version(lock: Lock) -> Version | None:
    """major.minor of the CUDA that torch was built for, which is the nvcc that extensions need; None: a CPU torch."""
    if not lock.torch.cuda:
        return None
    version = Version(lock.torch.cuda)
    return Version(f"{version.major}.{version.minor}")


def needs_toolkit(lock: Lock) -> bool:
    """Whether an nvcc is needed while building."""
    return any(pin.nvcc for pin in lock.sources) or keeps_toolkit(lock)


def keeps_toolkit(lock: Lock) -> bool:
    """Whether the product needs an nvcc: only tilelang compiles with it at run time."""
    return any(pin.name == "tilelang" for pin in lock.pins)
