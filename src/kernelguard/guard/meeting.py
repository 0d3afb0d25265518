"""Where do the ranks meet? A key-value store with a deadline on every wait, so that nothing can hang.

A collective hangs when a rank is not there and names nobody. Here each rank writes keys of its own, and whoever waits
asks for keys by rank and gives up at its deadline. The store is torch's own: the agent's, when torchrun started the
ranks, else one that rank 0 serves until every rank has read the outcome.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from kernelguard.guard.ranks import Place

_POLL_S = 0.05


class MeetingError(Exception):
    """The ranks cannot meet; `taken` says that another program has the port."""

    def __init__(self, message: str, *, taken: bool = False) -> None:
        super().__init__(message)
        self.taken = taken


class Meeting:
    """One rank's end of the store."""

    def __init__(self, place: Place, *, limit_s: float) -> None:
        self._place = place
        self._master = _open_store(place, limit_s)
        import torch.distributed as dist

        self._store = dist.PrefixStore(f"kernelguard/{place.attempt}", self._master)

    def put(self, key: str, document: Mapping[str, Any]) -> None:
        """Write one of this rank's keys.

        Raises:
            MeetingError: the store is gone.
        """
        self._guarded(lambda: self._store.set(key, json.dumps(document)))

    def put_first(self, key: str, document: Mapping[str, Any]) -> None:
        """Write a key unless somebody has: of several answers the first one holds for all.

        Raises:
            MeetingError: the store is gone.
        """
        self._guarded(lambda: self._store.compare_set(key, "", json.dumps(document)))

    def wait_for(self, keys: Iterable[str], *, limit_s: float) -> dict[str, dict[str, Any]]:
        """Those of the keys that are there within `limit_s` seconds, as soon as all are.

        A value that is no JSON object is as good as none.

        Raises:
            MeetingError: the store is gone.
        """
        open_keys = list(keys)
        found: dict[str, dict[str, Any]] = {}
        end = time.monotonic() + limit_s
        while True:
            for key in list(open_keys):
                if self._guarded(lambda k=key: self._store.check([k])):
                    open_keys.remove(key)
                    value = _object(self._guarded(lambda k=key: self._store.get(k)))
                    if value is not None:
                        found[key] = value
            if not open_keys or time.monotonic() >= end:
                return found
            time.sleep(_POLL_S)

    def leave(self, ranks: Iterable[int], *, limit_s: float) -> None:
        """Say goodbye, and go when all `ranks` have; where rank 0 serves the store, it goes first.

        Otherwise a rank that is early could meet this store in place of its training's own at the same address.
        """
        try:
            self.put(f"left/{self._place.rank}", {})
            if self._place.hosts_store or self._place.agent_store:
                self.wait_for([f"left/{rank}" for rank in ranks], limit_s=limit_s)
                return
            end = time.monotonic() + limit_s
            while time.monotonic() < end:
                self._store.check(["left"])
                time.sleep(_POLL_S)
        except (MeetingError, RuntimeError):
            # It is closed: that is what was waited for.
            return

    def _guarded(self, action: Any) -> Any:
        try:
            return action()
        except RuntimeError as error:
            raise MeetingError(f"the store at {_name(self._place)} is gone: {_first_line(error)}") from error


def _open_store(place: Place, limit_s: float) -> Any:
    """Torch's store, or why there is none; opening it is given up after the limit although torch may still wait."""
    import torch.distributed as dist

    opened: list[Any] = []
    problems: list[BaseException] = []

    def attempt() -> None:
        try:
            store = dist.TCPStore(
                host_name=place.address,
                port=place.port,
                world_size=None,
                is_master=place.hosts_store,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
            )
            # A program that accepts and never answers is found out here.
            store.check(["kernelguard"])
            opened.append(store)
        except BaseException as error:  # noqa: BLE001  # carried to the thread that waits
            problems.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit_s + 2.0)
    if opened:
        return opened[0]
    if not problems:
        raise MeetingError(f"{_name(place)} accepts connections and does not answer as a store does", taken=True)
    text = _first_line(problems[0])
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        raise MeetingError(f"port {place.port} on {place.host} is taken by another program", taken=True) from problems[
            0
        ]
    if place.hosts_store:
        raise MeetingError(f"the store at {_name(place)} cannot be opened: {text}") from problems[0]
    raise MeetingError(f"nobody answers at {_name(place)} within {limit_s:g} s ({text})") from problems[0]


def _name(place: Place) -> str:
    return f"{place.address}:{place.port}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
