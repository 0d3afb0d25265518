"""Who am I among the processes of this run, and what do we all agree on?"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Self

import torch
import torch.distributed as dist

from kernelguard_train.config import Config
from kernelguard_train.errors import ConfigError, TrainError

_ERROR_KEY = "kernelguard_train/error/0"
_PATIENCE = timedelta(seconds=5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def total(self, *numbers: int) -> tuple[int, ...]:
        """Each number summed over all ranks, through the CPU: the GPU is not asked and does not wait."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor)
        return tuple(int(number) for number in tensor)

    def worst(self, numbers: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks."""
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return [int(number) for number in tensor]

    def gather(self, numbers: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        """Equally many numbers of each rank, in the order of ranks, on all of them; through the CPU too."""
        own = torch.tensor(numbers, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own)
        return tuple(tuple(tensor.tolist()) for tensor in found)


def start(config: Config) -> Ranks:
    """Joins the run that torchrun describes in the environment; without torchrun, a run of one.

    Raises:
        ConfigError: when CUDA is asked for and there is none.
    """
    wanted = config.train.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device = cuda, but torch finds no CUDA device")
    device = torch.device("cpu")
    if wanted != "cpu" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    options: dict[str, Any] = {
        "backend": "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        "timeout": timedelta(seconds=config.parallel.timeout),
    }
    if device.type == "cuda":
        options["device_id"] = device
    if "RANK" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined] # exported by the C++ part
        options |= {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(**options)
    return Ranks(rank=dist.get_rank(), world=dist.get_world_size(), device=device)


def should_print(error: TrainError) -> bool:
    """Whether this rank is the one to print an error: rank 0, or one that is alone with it.

    An error that all ranks meet is printed once. A rank whose error rank 0 does not share must speak for itself.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return True
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no public accessor
    if dist.get_rank() == 0:
        store.set(_ERROR_KEY, str(error))
        return True
    try:
        store.wait([_ERROR_KEY], _PATIENCE)
    except dist.DistError:
        return True
    return False


class StopRequest(AbstractContextManager["StopRequest"]):
    """Remembers a SIGTERM, so that the step that is under way can be finished and saved."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.asked = True
