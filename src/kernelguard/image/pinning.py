"""Write the resolved base image into the lock, so that the next machine starts from the same bytes."""

from __future__ import annotations

from dataclasses import replace

from kernelguard.errors import InputError
from kernelguard.image.bases import base_of
from kernelguard.image.engine import Engine
from kernelguard.image.plan import Request
from kernelguard.lock import write_lock


def pinned(request: Request, engine: Engine) -> Request:
    """The request with the base in its lock; the lock file is written anew, and has a new digest.

    Raises:
        InputError: the base is only on this engine, so no other machine could start from it.
    """
    resolved = engine.resolve(base_of(request.lock, request.base).runtime, pull=request.refresh_base)
    if resolved.local:
        raise InputError(
            f"{resolved.name} has no registry digest, only an id of this engine: a lock with it is of no use elsewhere",
            hint="push it to a registry, and name it from there with --base",
        )
    lock = replace(request.lock, base_image=resolved.reference)
    write_lock(lock, request.path)
    return replace(request, lock=lock, subject=replace(request.subject, lock=lock), base="")
