"""Where a worker's findings go: one JSON object a line, written at once, so that a crash loses nothing before it."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any

_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "std::bad_alloc",
    "failed to allocate",
)
_NO_DRIVER = (
    "found no nvidia driver",
    "no cuda-capable device",
    "no cuda gpus are available",
    "driver version is insufficient",
    "driver on your system is too old",
    "torch not compiled with cuda",
    "0 active drivers",
)
# `kernels` and transformers say it in a sentence of their own, with nothing at the bottom.
_OFFLINE = ("hub is in offline mode", "we couldn't connect to")
_NO_NETWORK = frozenset(
    {
        "ConnectError",
        "ConnectTimeout",
        "ConnectionError",
        "LocalEntryNotFoundError",
        "NetworkError",
        "OfflineModeIsEnabled",
        "TimeoutException",
        "gaierror",
    }
)
"""Exceptions, by the name of a class, with which huggingface_hub, requests, httpx and Python say that a host cannot be
reached, or that nothing may be asked and nothing is in the cache."""


class Recorder:
    """Appends records to the result file and says which stage comes next."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)  # noqa: PTH100  # as in every worker, without pathlib

    def write(self, kind: str, **values: Any) -> None:
        """One record."""
        self._append({"kind": kind, **values})

    def stage(self, name: str) -> None:
        """What is about to happen; if the process dies, this is where."""
        self._append({"stage": name})

    def done(self) -> None:
        """Nothing more will come."""
        self._append({"done": True})

    def error(self, where: str, error: BaseException, **values: Any) -> str:
        """An exception, word for word, and which of the sorts that need different answers it is; returns the sort."""
        frames = traceback.extract_tb(error.__traceback__)
        sort = sort_of(error)
        self.write(
            "error",
            where=where,
            type=type(error).__name__,
            text=_words(error)[:4000],
            sort=sort,
            at=f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "",
            **values,
        )
        return sort

    def _append(self, record: dict[str, Any]) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(descriptor, (json.dumps(record, default=str) + "\n").encode("utf-8"))
        finally:
            os.close(descriptor)


def _words(error: BaseException) -> str:
    """The message, and those of what caused it: transformers wraps the reason of a failed import."""
    words = [str(error)]
    cause = error.__cause__
    while cause is not None and len(words) < 6:
        words.append(f"caused by {type(cause).__name__}: {cause}")
        cause = cause.__cause__
    return "; ".join(words)


def sort_of(error: BaseException) -> str:
    """`memory`, `driver`, `network`, `not-implemented`, `import` or `raised`."""
    text = str(error).lower()
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "memory"
    if any(words in text for words in _OUT_OF_MEMORY) and isinstance(error, RuntimeError):
        return "memory"
    if any(words in text for words in _NO_DRIVER):
        return "driver"
    if _is_about_the_network(error):
        return "network"
    if isinstance(error, NotImplementedError):
        return "not-implemented"
    return "import" if isinstance(error, ImportError) else "raised"


def _is_about_the_network(error: BaseException) -> bool:
    """Whether a host that cannot be reached is at the bottom of it; libraries put words of their own on top."""
    current: Any = error
    for _ in range(12):
        if current is None:
            return False
        kinds = {kind.__name__ for kind in type(current).__mro__}
        text = str(current).lower()
        if kinds & _NO_NETWORK or any(words in text for words in _OFFLINE):
            return True
        status = getattr(getattr(current, "response", None), "status_code", None)
        if isinstance(status, int) and (status == 429 or status >= 500):
            # The host answered that it cannot answer now.
            return True
        current = current.__cause__ or current.__context__
    return False
