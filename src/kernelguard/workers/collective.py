"""Do this rank's collectives give the right numbers, and how fast is an all-reduce?

Run by the observed interpreter as `python collective.py request.json result.jsonl`, one for each rank at the same time.
Standard library and torch only. The ranks meet in a store that somebody else serves, so that it outlives any of them.

A collective waits for every rank and names none. So each rank leaves a mark in the store before each step and once it
has begun it, and when its time is up a thread of its own reads who has not left the mark that this rank left last.
Timeouts of torch and NCCL are longer than that and never decide: they differ between backends, and NCCL's ends the
process.
"""
# The same few path calls in every worker, without pathlib.
# ruff: noqa: PTH100, PTH118, PTH120

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

import importlib
import importlib.util
import inspect
import json
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
# Elements of one rank's part in the small checks: more than one thread block, and no power of two.
_PART = 4099
_WARM_UPS = 3
_TIMED = 5
# What torch itself may wait for, beside the time that this worker has.
_LONGER_S = 600.0
_GPU_BYTES = 256 * 2**20
_CPU_BYTES = 4 * 2**20


def _recorder(path: str) -> Any:
    """What writes records to this file; `probes/records.py`, loaded by path."""
    spec = importlib.util.spec_from_file_location("kernelguard_records", os.path.join(_HERE, "probes", "records.py"))
    if spec is None or spec.loader is None:
        raise ImportError(f"{_HERE} has no probes/records.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Recorder(path)


class Marks:
    """How far each rank is, as keys in the store."""

    def __init__(self, request: Any, out: Any) -> None:
        self._rank, self._world = int(request["rank"]), int(request["world"])
        self._request = request
        self._out = out
        self._last = ""
        self.store: Any = None
        self._reading: Any = None

    def open(self, dist: Any, limit_s: float) -> None:
        """Connect to the store; twice, because a wait on one connection keeps everybody else from using it."""
        host, port = self._request["host"], int(self._request["port"])
        patience = timedelta(seconds=limit_s)
        self._reading = dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)
        self.store = dist.TCPStore(host, port, None, False, patience, wait_for_workers=False)

    def reach(self, step: str) -> None:
        """This rank is about to do that."""
        self._out.stage(step)
        self.store.set(f"mark/{step}/{self._rank}", "1")
        self._last = step

    def behind(self) -> list[int]:
        """The ranks that have not come as far as this one; none where the store is gone."""
        try:
            return self._without_mark(list(range(self._world))) if self._last else []
        except RuntimeError:
            return []

    def _without_mark(self, ranks: list[int]) -> list[int]:
        # By halves: in a large group few are behind, and each question is a round trip.
        if self._reading.check([f"mark/{self._last}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        middle = len(ranks) // 2
        return self._without_mark(ranks[:middle]) + self._without_mark(ranks[middle:])

    def is_first_to_fail(self) -> bool:
        """Whether no other rank had failed before; what comes later is often only its consequence."""
        try:
            found = b"" if self._reading is None else self._reading.compare_set("failed", "", str(self._rank))
            return int(found) == self._rank
        except (RuntimeError, ValueError):
            return False

    def wait_for_all(self) -> None:
        """Until every rank has come here: one that leaves earlier breaks the others' connections to it."""
        if self.store.add("leaving", 1) == self._world:
            self.store.set("all are leaving", "1")
        self.store.wait(["all are leaving"])


class Deadline:
    """Ends this process when its time is up, wherever it waits, and writes down whom it waited for."""

    def __init__(self, limit_s: float, out: Any, marks: Marks) -> None:
        self._limit_s, self._out, self._marks = limit_s, out, marks
        self._lock = threading.Lock()
        thread = threading.Timer(limit_s, self._late)
        thread.daemon = True
        thread.start()

    def _late(self) -> None:
        behind = self._marks.behind()
        with self._lock:
            self._out.write("late", behind=behind, limit_s=self._limit_s)
            os._exit(0)

    def leave(self) -> None:
        """It is all done. Taking a process group apart can hang as well, and the process ends anyway."""
        with self._lock:
            self._out.done()
            os._exit(0)


class Checks:
    """The collectives of one rank, compared exactly."""

    def __init__(self, torch: Any, device: Any, request: Any, out: Any, marks: Marks) -> None:
        self._torch, self._device, self._out, self._marks = torch, device, out, marks
        self._rank, self._world = int(request["rank"]), int(request["world"])
        self._bytes = _GPU_BYTES if device.type == "cuda" else _CPU_BYTES

    def _numbers(self, count: int) -> Any:
        # Every sum of whole numbers below 2**53 is exact, in whatever order it is made.
        return self._torch.arange(count, device=self._device, dtype=self._torch.float64)

    def _run(self, step: str, collective: Any, *tensors: Any) -> None:
        """Begin it, say so, and wait: a rank that never gets into it is then not among those that wait in it."""
        work = collective(*tensors, async_op=True)
        self._marks.reach(f"{step} begun")
        work.wait()

    def _compare(self, step: str, found: Any, expected: Any, part: int = 0) -> None:
        wrong = found != expected
        count, text, parts = int(wrong.sum()), "", []
        if count:
            one = int(wrong.to(self._torch.uint8).argmax())
            text = f"{count} of {found.numel()} numbers are wrong, one is {float(found[one]):g}"
            text += f" and should be {float(expected[one]):g}"
            parts = sorted({index // part for index in wrong.nonzero().flatten().tolist()}) if part else []
        self._out.write("check", step=step, wrong=text, parts=parts)

    def all_reduce(self, dist: Any) -> None:
        """Rank r gives i + r + 1."""
        n = self._world
        found = self._numbers(_PART) + (self._rank + 1)
        self._run("all-reduce", dist.all_reduce, found)
        self._compare("all-reduce", found, self._numbers(_PART) * n + n * (n + 1) // 2)

    def all_gather(self, dist: Any) -> None:
        """Rank r gives the numbers from r * _PART on."""
        everything = self._numbers(_PART * self._world)
        found = self._torch.full_like(everything, -1.0)
        mine = self._numbers(_PART) + self._rank * _PART
        self._run("all-gather", dist.all_gather_into_tensor, found, mine)
        self._compare("all-gather", found, everything, part=_PART)

    def reduce_scatter(self, dist: Any) -> None:
        """Rank r gives i + r + 1 for the whole, and gets the sum of its own part."""
        n = self._world
        found = self._torch.full_like(self._numbers(_PART), -1.0)
        mine = self._numbers(_PART * n) + (self._rank + 1)
        self._run("reduce-scatter", dist.reduce_scatter_tensor, found, mine)
        self._compare("reduce-scatter", found, (self._numbers(_PART) + self._rank * _PART) * n + n * (n + 1) // 2)

    def bandwidth(self, dist: Any) -> None:
        """A large all-reduce: its numbers the first time, then its time.

        Each element is 1 in one rank and 0 in the others, so the sum is exact in bf16 too, and a rank that is left out
        or counted twice shows. Large buffers take other algorithms than small ones.
        """
        torch, on_gpu = self._torch, self._device.type == "cuda"
        dtype = torch.bfloat16 if on_gpu else torch.float32
        values = torch.zeros(self._bytes // dtype.itemsize, device=self._device, dtype=dtype)
        values[self._rank :: self._world] = 1.0
        self._run("large all-reduce", dist.all_reduce, values)
        self._compare("large all-reduce", values, torch.ones(1, device=self._device, dtype=dtype).expand_as(values))
        # Zeros stay zeros, whatever is added up. The first warm-up was the one above.
        values.zero_()
        seconds = [self._timed(dist, values) for _ in range(_WARM_UPS - 1 + _TIMED)][-_TIMED:]
        size = values.numel() * values.element_size()
        self._out.write("bandwidth", bytes=size, seconds=statistics.median(seconds), times=seconds)

    def _timed(self, dist: Any, values: Any) -> float:
        if self._device.type != "cuda":
            began = time.perf_counter()
            dist.all_reduce(values)
            return time.perf_counter() - began
        # On the GPU's clock: what the host takes to start it is hidden in training.
        first, last = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        dist.all_reduce(values)
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def _device(torch: Any, request: Any) -> Any:
    """The GPU that the training takes too.

    `CUDA_VISIBLE_DEVICES` stays as the training finds it: what a process sees of other GPUs can decide how NCCL reaches
    them.
    """
    if request.get("device", "cuda") != "cuda":
        return torch.device("cpu")
    local = int(request.get("local_rank", 0))
    # A launcher may show each rank only its own GPU.
    device = torch.device("cuda", local if local < torch.cuda.device_count() else 0)
    torch.cuda.set_device(device)
    return device


def _join(dist: Any, device: Any, request: Any, store: Any) -> str:
    backend = "nccl" if device.type == "cuda" else "gloo"
    options: dict[str, Any] = {"store": store, "rank": int(request["rank"]), "world_size": int(request["world"])}
    options["timeout"] = timedelta(seconds=float(request["budget_s"]) + _LONGER_S)
    # Where torch can, NCCL connects now, so that a rank which cannot is seen at this step and not at the next.
    if device.type == "cuda" and "device_id" in inspect.signature(dist.init_process_group).parameters:
        options["device_id"] = device
    dist.init_process_group(backend, **options)
    return backend


def main(request: dict[str, Any], out: Any) -> None:
    """Join the others, compare, measure, and leave; never returns."""
    marks = Marks(request, out)
    deadline = Deadline(float(request["budget_s"]), out, marks)
    step = "import torch"
    try:
        out.stage(step)
        torch = importlib.import_module("torch")
        dist = importlib.import_module("torch.distributed")
        step = "device"
        out.stage(step)
        device = _device(torch, request)
        step = "store"
        out.stage(step)
        marks.open(dist, float(request["budget_s"]))
        step = "join"
        marks.reach(step)
        out.write("group", backend=_join(dist, device, request, marks.store))
        checks = Checks(torch, device, request, out, marks)
        steps = (
            ("all-reduce", checks.all_reduce),
            ("all-gather", checks.all_gather),
            ("reduce-scatter", checks.reduce_scatter),
            ("large all-reduce", checks.bandwidth),
        )
        for name, action in steps:
            step = name
            marks.reach(step)
            # Numbers that are wrong end nothing here: the others would wait for this rank.
            action(dist)
        step = "leave"
        marks.reach(step)
        marks.wait_for_all()
    except BaseException as error:
        out.error(step, error, first=marks.is_first_to_fail())
    deadline.leave()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as _handle:  # noqa: PTH123  # as in every worker, without pathlib
        _request = json.load(_handle)
    main(_request, _recorder(sys.argv[2]))
