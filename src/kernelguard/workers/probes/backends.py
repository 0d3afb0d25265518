"""Which implementation did a package really run? fla hands some calls to tilelang or flash-qla where those can be used.

fla's registry (`fla.backends`, in 0.5 `fla.ops.backends`) decides at each call. What it was asked for is noted, and
afterwards each implementation it could have taken has one answer: `ran`, `not installed`, `switched off` (by its
environment variable or its default), `not usable here`, or why it declined.
"""

# What is asked has no public name in the package; a registry of another shape is an error that is written down.
# ruff: noqa: SLF001

from __future__ import annotations

import importlib.util
import logging
import re
import sys
from typing import Any

_PLACES = ("fla.backends", "fla.ops.backends")
_DECLINED = re.compile(r"^\[FLA Backend\] (?P<place>\S+) -> (?P<name>\S+) rejected: (?P<why>.*)$", re.DOTALL)


class Dispatch:
    """Notes every registry that a call of this process asks."""

    def __init__(self) -> None:
        self._asked: dict[str, Any] = {}
        self._declined = _Declined()
        self.known = False
        """The package has such a registry."""

    def take(self) -> None:
        """Stand between every dispatched call and its registry, for good.

        Raises:
            AttributeError: the registry has another shape than any known.
        """
        module = next((sys.modules[name] for name in _PLACES if name in sys.modules), None)
        registry = getattr(module, "BackendRegistry", None)
        if registry is None:
            return
        original = registry._get_sorted_backends
        asked = self._asked

        def sorted_backends(self: Any) -> Any:
            asked[self.operation_name] = self
            return original(self)

        registry._get_sorted_backends = sorted_backends
        logger = logging.getLogger(registry.__module__)
        logger.addHandler(self._declined)
        if logger.getEffectiveLevel() > logging.INFO:
            logger.setLevel(logging.INFO)
            # The reasons are wanted here, not on the terminal of whoever runs this.
            logger.propagate = False
        self.known = True

    def found(self) -> dict[str, str]:
        """By `operation/backend`: what became of it in the calls so far."""
        answers = {}
        for operation, registry in self._asked.items():
            for name, backend in registry._backends.items():
                answers[f"{operation}/{name}"] = self._answer(operation, registry, name, backend)
        return answers

    def _answer(self, operation: str, registry: Any, name: str, backend: Any) -> str:
        logged = [key for key in registry._logged if key.startswith(f"{operation}:")]
        if any(key.endswith(f":{name}") for key in logged):
            return "ran"
        package = backend.package_name
        if package and not _installed(package):
            return "not installed"
        if not backend.is_available():
            return "not usable here"
        if not backend.is_enabled():
            return "switched off"
        why = self._declined.reasons.get((operation, name), "")
        if why or any(key.endswith(f":{name}:fail") for key in logged):
            return f"declined: {why}"
        return "not asked"


class _Declined(logging.Handler):
    """The reasons, which the package only logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.reasons: dict[tuple[str, str], str] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Keep what says that a backend declined a call."""
        found = _DECLINED.match(record.getMessage())
        if found:
            operation = found["place"].rpartition(".")[0]
            self.reasons[operation, found["name"]] = found["why"][:300]


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # a submodule of what is not there
        return False
