"""Make an environment exactly what a lock says, then look whether it is."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kernelguard.errors import InputError, UndeterminedError
from kernelguard.judge.values import Finding
from kernelguard.lock.check import Inventory, check_lock, hub_place, take_inventory
from kernelguard.lock.files import requirements
from kernelguard.lock.tools import Tools, make_tools
from kernelguard.lock.values import HubPin, Lock
from kernelguard.sources.http import write_whole
from kernelguard.sources.hub import Hub, HubFile

_KEPT = frozenset({"pip"})
_DAMAGED = frozenset({"file-changed", "lock-other-build", "lock-record", "torch-moved", "lock-version"})


def sync(
    lock: Lock,
    python: Path,
    *,
    cache: Path,
    hub: Hub | None = None,
    keep_extra: bool = False,
    timeout: float = 3600.0,
) -> tuple[Finding, ...]:
    """Install what is missing, reinstall what differs, remove what is not in the lock; then `check_lock`.

    pip itself stays. What has to be built from source is left to the image's build stage.

    Raises:
        InputError: `python` is another Python than the lock's, or the environment that kernelguard runs in.
        ToolError: pip failed; a hash that does not match is one reason.
        UndeterminedError: a hub kernel is not there yet, and no hub was given, or it does not answer.
    """
    inventory = take_inventory(python, lock)
    if f"{inventory.python.major}.{inventory.python.minor}" != lock.target.python:
        raise InputError(
            f"{python} is Python {inventory.python}, the lock is for {lock.target.python}",
            hint=f"python{lock.target.python} -m venv env, then --python env/bin/python",
        )
    if not keep_extra and inventory.prefix.resolve() == Path(sys.prefix).resolve():
        raise InputError(
            f"{python} is the environment that kernelguard itself runs in; making it exactly the lock would remove it",
            hint="give the training environment with --python, or keep what is there with --keep-extra",
        )
    tools = make_tools(cache, Path(sys.executable))
    unwanted = _to_remove(lock, python, inventory, keep_extra=keep_extra)
    if unwanted:
        _pip(tools, python, "uninstall", "--yes", *unwanted, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="kernelguard-") as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text(requirements(lock), encoding="utf-8")
        options = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--no-input"]
        _pip(tools, python, "install", *options, "-r", str(listed), timeout=timeout)
    for pin in lock.hub:
        _place(pin, inventory.prefix, hub)
    return check_lock(lock, python, timeout=timeout)


def _to_remove(lock: Lock, python: Path, inventory: Inventory, *, keep_extra: bool) -> Sequence[str]:
    """What is not in the lock, and what is but not as it should be; pip would take the latter for installed."""
    known = {pin.name for pin in lock.pins} | {pin.name for pin in lock.sources} | _KEPT
    unwanted = set() if keep_extra else set(inventory.distributions) - known
    pinned = {pin.name for pin in lock.pins}
    damaged = {
        name
        for finding in check_lock(lock, python)
        if finding.code in _DAMAGED
        for name in pinned
        if finding.reason.startswith((f"{name}:", f"{name} "))
    }
    damaged |= {owner for _, owners in inventory.shared for owner in owners if owner in pinned}
    return sorted(unwanted | (damaged & set(inventory.distributions)))


def _pip(tools: Tools, python: Path, *arguments: str, timeout: float) -> None:
    tools.run("pip", "--python", str(python), "--disable-pip-version-check", *arguments, timeout=timeout)


def _place(pin: HubPin, prefix: Path, hub: Hub | None) -> None:
    """Put the files of a hub variant where they belong, each only after its hash was found right."""
    folder = hub_place(prefix, pin) / "build" / pin.variant
    for file in pin.files:
        place = folder / file.path
        wanted = HubFile(path=file.path, sha256=file.sha256, size=file.size)
        if _is(place, file.sha256):
            continue
        if hub is None:
            raise UndeterminedError(
                f"{pin.repository} {pin.variant}/{file.path} is not there yet, and no hub was given to fetch it from",
                hint="sync once with network",
            )
        write_whole(place, hub.fetch(pin.repository, pin.commit, pin.variant, wanted))
    wanted_places = {(folder / file.path).resolve() for file in pin.files}
    build = hub_place(prefix, pin) / "build"
    for place in sorted(build.rglob("*")):
        if place.is_file() and place.resolve() not in wanted_places:
            place.unlink()


def _is(place: Path, sha256: str) -> bool:
    return place.is_file() and hashlib.sha256(place.read_bytes()).hexdigest() == sha256
