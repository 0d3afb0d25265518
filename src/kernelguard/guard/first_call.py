"""When does the model that trains get its first batch? Seen at the door of every module, for as long as that takes.

Not by hooks: torch.compile would trace them, and warns of those on every module. The door is
`torch.nn.Module.__call__`, and it is the original again before the first call goes on, so that nothing inside the model
ever meets another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# A training that has made so many steps without a model that is known here is none of this guard's business.
_MOST_STEPS = 10


class FirstCall:
    """Waits for the first call, in training, of a module that `wants` accepts, and hands it to `then`."""

    def __init__(
        self, wants: Callable[[Any], bool], then: Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]
    ) -> None:
        self._wants = wants
        self._then = then
        self._rejected: set[int] = set()
        self._steps = 0
        self._original: Any = None
        self._door: Any = None
        self._step_hook: Any = None

    def open(self) -> None:
        """Wait from now on."""
        import torch
        from torch.optim import optimizer

        original = torch.nn.Module.__call__

        def door(module: Any, *args: Any, **kwargs: Any) -> Any:
            if self._door is not door or not self._is_it(module):
                return original(module, *args, **kwargs)
            self.close()
            return self._then(module, args, kwargs, original)

        self._original, self._door = original, door
        torch.nn.Module.__call__ = door
        self._step_hook = optimizer.register_optimizer_step_pre_hook(self._step_without_it)

    def close(self) -> None:
        """Wait no more."""
        self._put_back()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None

    def _put_back(self) -> None:
        import torch

        if self._door is not None and torch.nn.Module.__call__ is self._door:
            torch.nn.Module.__call__ = self._original
        # Where somebody has put another function in its place since, ours only passes calls on.
        self._door = None

    def _is_it(self, module: Any) -> bool:
        import torch

        if not module.training or id(module) in self._rejected or not torch.is_grad_enabled():
            return False
        if self._wants(module):
            return True
        # What a rejected module is made of is called next, part by part.
        self._rejected.update(id(part) for part in module.modules())
        return False

    def _step_without_it(self, *_arguments: Any) -> None:
        self._steps += 1
        # A module that was rejected may be gone, and another one lie where it lay.
        self._rejected.clear()
        if self._steps >= _MOST_STEPS:
            # This hook stays, as it is being run; it does nothing any more.
            self._put_back()
