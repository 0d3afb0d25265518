"""Does one kernel compute the right output and the right gradients here?

Run by the observed interpreter as `python probe.py request.json result.jsonl`. Standard library, torch and the package
under test only. One process holds one kernel, so that a crash or a hang is a result about that kernel. It measures;
what a measurement means is decided in `verify/`.
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
import itertools
import json
import time
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = "kernelguard_workers"


def load_siblings() -> None:
    """Make this folder importable as a package of its own, without putting it on sys.path."""
    spec = importlib.util.spec_from_file_location(
        _PACKAGE, os.path.join(_HERE, "__init__.py"), submodule_search_locations=[_HERE]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"{_HERE} is not a package")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_PACKAGE] = module
    spec.loader.exec_module(module)


load_siblings()
sibling = importlib.import_module
Recorder = sibling(f"{_PACKAGE}.probes.records").Recorder


def main(request: dict[str, Any], out: Any) -> None:
    """Everything that was asked about one kernel, the most valuable first."""
    began = time.monotonic()
    out.stage("import torch")
    try:
        torch = importlib.import_module("torch")
        torch.backends.cuda.matmul.allow_tf32 = False
    except BaseException as error:
        out.error("import torch", error)
        return
    device = request.get("device", "cuda")
    out.stage("cuda")
    try:
        if device == "cuda":
            torch.cuda.init()
            torch.zeros(1, device="cuda").item()
        out.write("machine", **_machine(torch, device))
    except BaseException as error:
        out.error("cuda", error)
        return
    subject = _subject(request, out)
    if subject is None:
        return
    function, probe = subject
    measure = sibling(f"{_PACKAGE}.probes.measure")
    forcing = _forcing(request, out)
    dispatch = _dispatch(out)
    deadline = began + float(request.get("budget_s", 1e9))
    for number, case in enumerate(request["cases"]):
        one = _Case(request, out, case, forcing=forcing, deadline=deadline)
        one.measure(function, measure, probe)
        if one.cold:
            # Compiling takes too long for one process; whoever asked starts several.
            out.write("cold", case=case["name"])
            return
        if number == 0 and one.measured and request.get("record_kernels") and device == "cuda":
            one.record()
    if dispatch is not None and dispatch.known:
        out.write("backends", found=dispatch.found())


def _machine(torch: Any, device: str) -> dict[str, Any]:
    """What the numbers were measured on, as this process sees it."""
    facts: dict[str, Any] = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "device": device}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts.update(name=properties.name, capability=[properties.major, properties.minor])
        facts["memory_bytes"] = properties.total_memory
    return facts


def _subject(request: dict[str, Any], out: Any) -> Any:
    """(what is called, how), or None after it was written down why nothing can be."""
    if request.get("model"):
        return sibling(f"{_PACKAGE}.probes.layer").prepare(request, out)
    function = _function(request, out)
    if function is None:
        return None
    return function, sibling(f"{_PACKAGE}.probes").load(f"{_PACKAGE}.probes")[request["op"]]


def _function(request: dict[str, Any], out: Any) -> Any:
    out.stage(f"import {request['module']}")
    try:
        module = importlib.import_module(request["module"])
    except BaseException as error:
        missing = getattr(error, "name", "") if isinstance(error, ModuleNotFoundError) else ""
        out.error("import", error, missing=missing or "")
        return None
    if request.get("hub_attention"):
        return _hub_attention(module, request["hub_attention"], out)
    function: Any = module
    for part in request["symbol"].split("."):
        function = getattr(function, part, None)
        if function is None:
            out.write(
                "error",
                where="import",
                type="AttributeError",
                sort="import",
                missing="",
                at="",
                text=f"module {request['module']} has no {request['symbol']}",
            )
            return None
    # The function inside its decorators: where it is written, not where torch wrapped it.
    inner = inspect.unwrap(function)
    code = getattr(inner, "__code__", None)
    out.write(
        "target",
        target=f"{getattr(inner, '__module__', '')}.{getattr(inner, '__qualname__', request['symbol'])}",
        file=code.co_filename if code is not None else str(getattr(module, "__file__", "") or ""),
        triton=_version("triton"),
    )
    return function


def _hub_attention(module: Any, name: str, out: Any) -> Any:
    """The function that transformers calls for this attention implementation, loaded by its own code."""
    out.stage(f"load {name}")
    try:
        kernel = module.load_and_register_attn_kernel(name)
    except BaseException as error:
        out.error("import", error, missing="")
        return None
    function = getattr(kernel, "flash_attn_varlen_func", None)
    if function is None:
        # Older ones keep the module to themselves, and some kernels are called in a way of their own.
        why = f"transformers hands out no flash_attn_varlen_func for {name}, so it cannot be called from here"
        out.write("error", where="reference", type="LookupError", sort="", missing="", at="", text=why)
        return None
    out.write("target", target=f"{name}.flash_attn_varlen_func", file=str(getattr(kernel, "__file__", "")), triton="")
    return function


def _version(name: str) -> str:
    return str(getattr(sys.modules.get(name), "__version__", ""))


def _dispatch(out: Any) -> Any:
    """The hold on what the package hands its calls to; None when it cannot be had."""
    dispatch = sibling(f"{_PACKAGE}.probes.backends").Dispatch()
    try:
        dispatch.take()
    except AttributeError as error:
        out.error("backends", error)
        return None
    return dispatch


def _forcing(request: dict[str, Any], out: Any) -> Any:
    """The hold on Triton's autotuner; None when this kernel does not use Triton at all."""
    if "triton.runtime.autotuner" not in sys.modules:
        return None
    try:
        forcing = sibling(f"{_PACKAGE}.probes.autotune").Forcing()
        forcing.judged = {name: dict(known) for name, known in request.get("judged", {}).items()}
        forcing.take()
    except Exception as error:
        # An autotuner of another shape than any known: the picked configuration is measured, the others are not.
        out.error("autotuner", error)
        return None
    return forcing


class _Case:
    """One set of inputs: every configuration, then the call as it is, and again for determinism."""

    def __init__(self, request: dict[str, Any], out: Any, case: Any, *, forcing: Any, deadline: float) -> None:
        self.request = request
        self.out = out
        self.case = case
        self.name = case["name"]
        self.forcing = forcing
        self.deadline = deadline
        self.backward = bool(request.get("backward", True))
        self.function: Any = None
        self.sample: Any = None
        self.step = ""
        self.sort = ""
        self.error = ""
        self.cold = False
        """Its first configuration took longer than `patience_s`: nothing is compiled yet."""
        self.always = False
        """It raised the same with two configurations: it is not the configuration."""
        self.measured = False

    def measure(self, function: Any, measure: Any, probe: Any) -> None:
        """Write down everything about this case."""
        began = time.monotonic()
        if began > self.deadline:
            reason = "the time for this kernel was used up by earlier cases"
            self.out.write("left-out", case=self.name, reason=reason)
            return
        self.function = function
        if self.forcing is not None:
            # Another case has other tuning keys: only what this one launches counts.
            self.forcing.candidates, self.forcing.picked = {}, {}
        self.out.stage(f"{self.name}: reference")
        device, seed = self.request.get("device", "cuda"), self.request.get("seed", 0)
        try:
            self.sample = measure.Sample(probe, self.case, self.request["dtype"], device, seed)
        except BaseException as error:
            self.out.error("reference", error, case=self.name)
            return
        # First what can be pinned: once all of it is compiled, the autotuner's own choice takes seconds.
        if self.forcing is not None and self.case.get("force"):
            self._force()
        if not self.cold and not self.case.get("only_forced"):
            self._as_it_is(measure, began)

    def record(self) -> None:
        """Write down which GPU kernels the call launches."""
        recording = sibling(f"{_PACKAGE}.probes.recording").Recording()
        self.out.stage(f"{self.name}: profiler")
        try:
            self.sample.run(self.function, recording.stage, backward=self.backward)
            recording.close()
        except BaseException as error:
            # That the kernel raises was told before; that the profiler does not work says nothing about the kernel.
            self.out.error("profiler", error)
            return
        self.out.write("kernels", case=self.name, **recording.kernels)

    def _as_it_is(self, measure: Any, began: float) -> None:
        if self.forcing is not None:
            # A pinned choice is no tuning at all; the verdict records what was pinned. What raises with every
            # configuration need not be tuned first to raise again.
            self.forcing.row, self.forcing.pins = 0 if self.always else self.case.get("pin"), {}
        first = self._attempt()
        if first is None:
            return
        seconds = time.monotonic() - began
        self.out.write("case", case=self.name, tensors=self.sample.compare(first), seconds=seconds)
        repeats = int(self.case.get("repeats", 3))
        differing: dict[str, float] = {}
        unstable: list[Any] = []
        warm = 0.0
        for _ in range(1, repeats):
            again = time.perf_counter()
            other = self._run()
            if other is None:
                return
            warm = time.perf_counter() - again
            differing.update(measure.same_bits(first, other))
            unstable += [t for t in self.sample.compare(other) if t["state"] != "right"]
        if self.forcing is not None:
            chosen = {"candidates": self.forcing.candidates, "picked": self.forcing.picked}
            self.out.write("picked", case=self.name, **chosen)
        self.out.write("repeat", case=self.name, runs=repeats, differing=differing, tensors=unstable, warm=warm)
        self.measured = True

    def _attempt(self, label: str = "") -> Any:
        """As `_run`; a kernel that says that it has no backward gets a second run for its output alone."""
        asked = self.backward
        found = self._run(label)
        return self._run(label) if found is None and asked and not self.backward else found

    def _run(self, label: str = "") -> Any:
        """Outputs and gradients, or None after the exception was written down."""

        def stage(step: str) -> None:
            self.step = step
            self.out.stage(f"{self.name}: {label}{step}")

        try:
            return self.sample.run(self.function, stage, backward=self.backward)
        except BaseException as error:
            self.sort = self.out.error(self.step, error, case=self.name, label=label)
            self.error = f"{type(error).__name__} in {self.step}: {error}"
            if isinstance(error, NotImplementedError) and self.step == "backward":
                self.backward = False
            if "CUDA error" in str(error) or type(error).__name__ == "AcceleratorError":
                # Nothing works in this process any more; another one goes on after this stage.
                os._exit(86)
            return None

    def _force(self) -> None:
        """Run row after row; row r pins every autotuned kernel to its configuration number r.

        Where a row is wrong, each of its kernels is pinned alone, beside a row that was right, to name the guilty one.
        """
        forcing = self.forcing
        index, count = self.request.get("shard", (0, 1))
        skip = set(self.request.get("skip_rows", ()))
        states: dict[int, str] = {}
        # Nothing has been launched yet: the first row tells what there is.
        began = time.monotonic()
        first = next(row for row in itertools.count(index, count) if row not in skip)
        states[first] = self._row(first)
        patience = float(self.request.get("patience_s", 1e9))
        first_error = self.error if states[first] == "error" else ""
        for row in range(forcing.rows):
            if row % count != index or row in skip or row == first or time.monotonic() > self.deadline:
                continue
            if time.monotonic() - began > patience:
                self.cold = True
                break
            states[row] = self._row(row)
            if first_error and len(states) == 2 and states[row] == "error" and self.error == first_error:
                self.always = True
                break
        good = next((row for row, state in states.items() if state == "right"), None)
        suspects = [] if self.cold else [row for row, state in states.items() if state == "wrong"]
        if suspects and good is None:
            # This shard has no row to stand on: another shard's will do.
            others = (row for row in range(forcing.rows) if row not in states and row not in skip)
            good = next((row for row in others if time.monotonic() < self.deadline and self._row(row) == "right"), None)
        for row in suspects if good is not None else ():
            for kernel, configs in forcing.candidates.items():
                swept = len(configs) > 1 and forcing.settled(kernel) is None
                if swept and time.monotonic() < self.deadline:
                    self._row(good, {kernel: row})
        forcing.row, forcing.pins = None, {}
        self.out.write(
            "configurations",
            case=self.name,
            candidates=forcing.candidates,
            # What a row pins is not what the autotuner would take.
            picked={},
            refused={kernel: sorted(rows) for kernel, rows in forcing.refused.items()},
            rows=forcing.rows,
            measured=sorted(states),
            whole=count == 1 and not self.cold,
        )
        forcing.learn(states)
        forcing.picked = {}

    def _row(self, row: Any, pins: Any = None) -> str:
        """`right`, `wrong` or `error`, also written down with everything measured."""
        forcing = self.forcing
        forcing.row, forcing.pins, forcing.used = row, pins or {}, {}
        alone = next(iter(forcing.pins), "")
        label = f"configuration {row}" + (f" with {alone} {forcing.pins[alone]}" if alone else "")
        found = self._attempt(f"{label}: ")
        tensors = [] if found is None else self.sample.compare(found)
        if found is None:
            # Too little memory for one more run says nothing about the configuration.
            state = "untold" if self.sort in {"memory", "driver"} else "error"
        else:
            state = "right" if all(t["state"] == "right" for t in tensors) else "wrong"
        used = {kernel: forcing.candidates[kernel][i] for kernel, i in forcing.used.items()}
        self.out.write("configuration", case=self.name, row=row, alone=alone, used=used, state=state, tensors=tensors)
        return state


if __name__ == "__main__":
    _out = Recorder(sys.argv[2])
    with open(sys.argv[1], encoding="utf-8") as _handle:  # noqa: PTH123  # as in every worker, without pathlib
        _request = json.load(_handle)
    main(_request, _out)
    _out.done()
