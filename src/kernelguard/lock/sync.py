"""Make an environment exactly what a lock says, then look whether it is."""

from __future__ import annotations

import hashlib
import sys
import tempfile
from pathlib import Path

from kernelguard.errors import InputError, UndeterminedError
from kernelguard.judge.values import Finding
from kernelguard.lock.check import Inventory, check_lock, hub_place, take_inventory
from kernelguard.lock.files import requirements
from kernelguard.lock.tools import Tools, make_tools, run
from kernelguard.lock.values import HubPin, Lock
from kernelguard.sources.http import write_whole
from kernelguard.sources.hub import Hub, HubFile

_KEPT = frozenset({"pip"})
_REPAIRED = frozenset(
    {"lock-missing", "file-changed", "lock-other-build", "lock-record", "torch-moved", "lock-version"}
)


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
    if not keep_extra and _prefix_of(python) == Path(sys.prefix).resolve():
        raise InputError(
            f"{python} is the environment that kernelguard itself runs in; making it exactly the lock would remove it",
            hint="give the training environment with --python, or keep what is there with --keep-extra",
        )
    inventory = take_inventory(python, None)
    if f"{inventory.python.major}.{inventory.python.minor}" != lock.target.python:
        raise InputError(
            f"{python} is Python {inventory.python}, the lock is for {lock.target.python}",
            hint=f"python{lock.target.python} -m venv env, then --python env/bin/python",
        )
    wrong = _wrong(lock, python, inventory)
    unwanted = set() if keep_extra else _extra(lock, inventory)
    if wrong or unwanted:
        tools = make_tools(cache, Path(sys.executable))
        # pip takes a damaged distribution for an installed one, so it goes first.
        gone = sorted((wrong | unwanted) & set(inventory.distributions))
        if gone:
            _pip(tools, python, "uninstall", "--yes", *gone, timeout=timeout)
        if wrong:
            _install(lock, tools, python, timeout)
    for pin in lock.hub:
        _place(pin, inventory.prefix, hub)
    return check_lock(lock, python, timeout=timeout)


def _prefix_of(python: Path) -> Path:
    return Path(run([str(python), "-c", "import sys; print(sys.prefix)"], timeout=60).strip()).resolve()


def _extra(lock: Lock, inventory: Inventory) -> set[str]:
    """What is installed and not in the lock."""
    known = {pin.name for pin in lock.pins} | {pin.name for pin in lock.sources} | _KEPT
    return set(inventory.distributions) - known


def _wrong(lock: Lock, python: Path, inventory: Inventory) -> set[str]:
    """Pins that are missing, damaged, of another build, or share a file with something."""
    pinned = {pin.name for pin in lock.pins}
    told = [f.reason for f in check_lock(lock, python) if f.code in _REPAIRED]
    named = {name for name in pinned for reason in told if reason.startswith((f"{name}:", f"{name} "))}
    return named | {owner for _, owners in inventory.shared for owner in owners if owner in pinned}


def _install(lock: Lock, tools: Tools, python: Path, timeout: float) -> None:
    with tempfile.TemporaryDirectory(prefix="kernelguard-") as folder:
        listed = Path(folder, "requirements.txt")
        listed.write_text(requirements(lock), encoding="utf-8")
        options = ["--require-hashes", "--no-deps", "--only-binary=:all:", "--no-input"]
        _pip(tools, python, "install", *options, "-r", str(listed), timeout=timeout)


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
