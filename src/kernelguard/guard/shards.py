"""Does a fused function get a weight of which fully_shard has left only this rank's part?

A loss that reads `lm_head.weight` itself goes around the hooks that gather it, when the head is a unit of its own. It
then raises deep in DTensor's dispatch or, where it takes the local part, computes with a fraction of the vocabulary and
says nothing. Watched through the first step, at the one door of all functions with a backward of their own,
`torch.autograd.Function.apply`.
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kernelguard.guard.expectation import Finding

_MIXED = re.compile(r"mixed torch\.Tensor and DTensor")
_FIX = "leave it to the unit that reads it (the root's, with the decoder layers as units of their own), or pass "
_FIX += "weight.full_tensor()"


@dataclass(frozen=True)
class _Shard:
    name: str
    here: tuple[int, ...]
    """The shape of this rank's part."""
    whole: tuple[int, ...]

    def __str__(self) -> str:
        return f"{list(self.here)} of {self.name} {list(self.whole)}"


class ShardWatch:
    """Sees which functions get a sharded parameter, from `look` to `restore`; tells each at once."""

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self._tell = tell
        self._shards: dict[int, _Shard] = {}
        """By the address of the part that lies on this rank."""
        self._gathered: list[set[int]] = []
        """For each function that is running with a shard, the shards that have been gathered meanwhile."""
        self._original: Any = None
        self._aliases: list[tuple[Any, str, Any]] = []

    def look(self, model: Any) -> None:
        """Watch from now on, if fully_shard has split this model between several ranks."""
        fsdp, tensor = sys.modules.get("torch.distributed.fsdp"), sys.modules.get("torch.distributed.tensor")
        if fsdp is None or tensor is None or not any(isinstance(m, fsdp.FSDPModule) for m in model.modules()):
            return
        for name, parameter in model.named_parameters():
            if isinstance(parameter, tensor.DTensor):
                here = _local(parameter)
                if 0 < here.numel() < parameter.numel():
                    self._shards[_address(here)] = _Shard(name, tuple(here.shape), tuple(parameter.shape))
        if self._shards:
            self._open()

    def restore(self) -> None:
        """Watch no more."""
        if self._original is not None:
            import torch

            torch.autograd.Function.apply = self._original
            self._original = None
            for module, name, value in self._aliases:
                setattr(module, name, value)
            self._aliases = []
        self._shards = {}

    def explain(self, error: BaseException) -> None:
        """Say what an exception of the model's own call comes from, if it is this."""
        if self._shards and _MIXED.search(str(error)):
            heads = [str(shard) for shard in self._shards.values() if re.search(r"head|embed|output", shard.name)]
            which = f"; sharded are {' and '.join(heads[:3])}" if heads else ""
            what = f"the model's call mixes a sharded weight with plain tensors ({_first_line(error)}){which}"
            self._tell(Finding("sharded-weight", "fail", what, _FIX))

    def _open(self) -> None:
        import torch

        watch, original = self, torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return watch._called(original.__func__, cls, args, kwargs)  # it stands for a method

        self._original = original
        torch.autograd.Function.apply = classmethod(apply)
        # `fused_loss = FusedLoss.apply` at the top of a module has the original already.
        for module in list(sys.modules.values()):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                # Not isinstance: that asks every value for its class, and deprecated ones answer with a warning.
                if type(value) is types.MethodType and value.__func__ is original.__func__:
                    self._aliases.append((module, name, value))
                    setattr(module, name, types.MethodType(apply, value.__self__))

    def _called(self, original: Any, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import torch

        found = {address: s for address in self._addresses(args, kwargs) if (s := self._shards.get(address))}
        own = cls.__module__.partition(".")[0] == "torch"
        if own and cls.__name__ == "Redistribute":
            for gathered in self._gathered:
                gathered.update(found)
        # What fully_shard itself does with a shard, float8 casts among it, needs no gradient.
        if own or not found or not torch.is_grad_enabled():
            return original(cls, *args, **kwargs)
        gathered = set[int]()
        self._gathered.append(gathered)
        function = f"{cls.__module__}.{cls.__qualname__}"
        try:
            output = original(cls, *args, **kwargs)
        except Exception as error:
            shard = next(iter(found.values()))
            what = f"{function} was given {shard}, as fully_shard left it, and raised {type(error).__name__}: "
            self._tell(Finding("sharded-weight", "fail", what + _first_line(error), _FIX))
            raise
        finally:
            self._gathered.pop()
        for address, shard in found.items():
            if address not in gathered:
                what = f"{function} was given only this rank's {shard}: it computes without the rest"
                self._tell(Finding("sharded-weight", "fail", what, _FIX))
        return output

    def _addresses(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[int]:
        import torch
        from torch.distributed.tensor import DTensor

        for value in (*args, *kwargs.values()):
            for item in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(item, DTensor):
                    yield _address(_local(item))
                elif type(item) in {torch.Tensor, torch.nn.Parameter} and item.layout is torch.strided:
                    yield _address(item)


def _local(tensor: Any) -> Any:
    """This rank's part; without gradients, as otherwise that is a function of autograd's too."""
    import torch

    with torch.no_grad():
        return tensor.to_local()


def _address(tensor: Any) -> int:
    """Where the memory begins that a tensor is a view of; 0 for one that has none."""
    return int(tensor.untyped_storage().data_ptr())


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
