"""One rung in a process of its own: imports while the one before still measures, then waits for its turn.

    python benchmarks/rung.py GO OUT -- ARGUMENT...      the trainer's own command line
    python benchmarks/rung.py GO OUT --loop SCRIPT -- ARGUMENT...   that of another loop (yardstick.py, beside_trl.py)

It starts when the file GO exists, and writes to OUT what a person would have to look up: seconds to the end of the
first step, graph recompilations and kernel tunings after it, and when the trainer said what. With --reuse, kernels take
the tuning of other shapes (warm.py).
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from pathlib import Path
from runpy import run_path
from typing import Any

BEGUN = time.time()


def preload(*, loop: bool) -> None:
    """Imports what takes seconds, on the CPU: the GPU belongs to the rung that measures."""
    import torch
    import torch._dynamo
    import torch.distributed.fsdp  # noqa: F401
    import transformers

    transformers.AutoModelForCausalLM  # noqa: B018 - a lazy attribute: this imports it
    if not loop:
        for name in ("transformers.models.qwen3_5.modeling_qwen3_5", "liger_kernel.transformers.monkey_patch",
                     "fla.ops.gated_delta_rule", "torch._inductor.compile_fx"):  # fmt: skip
            try:
                importlib.import_module(name)
            except ImportError:
                continue  # the rung itself says so, if it needs it
        import kernelguard_train.cli
        import kernelguard_train.train  # noqa: F401


def watch() -> dict[str, Any]:
    """Counts kernel tunings; graphs are counted by torch itself."""
    counts: dict[str, Any] = {"tunings": []}
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return counts
    whole = Autotuner._bench  # noqa: SLF001 - nothing public counts

    def counted(self: Any, *arguments: Any, **options: Any) -> Any:
        counts["tunings"].append((time.time(), self.base_fn.__name__))
        return whole(self, *arguments, **options)

    Autotuner._bench = counted  # noqa: SLF001
    return counts


class Told(logging.Handler):
    """Keeps what the trainer says, with the seconds since the process began."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((round(record.created - BEGUN, 2), record.getMessage()))


def graphs() -> int:
    """Graphs that torch.compile made so far."""
    import torch._dynamo.utils as dynamo

    return int(dynamo.counters["stats"]["unique_graphs"])


def main() -> int:
    go, out = Path(sys.argv[1]), Path(sys.argv[2])
    loop = "--loop" in sys.argv[3:4]
    arguments = sys.argv[sys.argv.index("--") + 1 :]
    preload(loop=loop)
    ready = time.time()
    while not go.exists():
        time.sleep(0.02)
    turn = time.time()
    # While another rung computes, imports are slower than they would be alone, so this errs on the long side.
    found: dict[str, Any] = {"imports_s": ready - BEGUN}
    if "--reuse" in sys.argv[3 : sys.argv.index("--")]:
        run_path(str(Path(__file__).with_name("warm.py")))["reuse"]()
    if loop:
        run_path(str(Path(__file__).with_name(sys.argv[4])))["main"](arguments, out.with_suffix(".loop.json"))
        code = 0
    else:
        counts = watch()
        told = Told()
        # The root: the trainer makes its own logger's handlers anew.
        logging.getLogger().addHandler(told)
        from kernelguard_train.cli import main as train
        from kernelguard_train.report import Report

        first: dict[str, Any] = {}
        report = Report.step

        def step(self: Any, number: int, done: float, values: dict[str, Any]) -> None:
            if not first:
                first.update(at=time.time(), graphs=graphs(), loss=values.get("loss"))
            found["last_loss"] = values.get("loss")
            report(self, number, done, values)

        Report.step = step  # type: ignore[method-assign]
        code = train(arguments)
        found["told"] = told.lines
        if first:
            found["start_to_first_step_s"] = found["imports_s"] + first["at"] - turn
            found["turn_to_first_step_s"] = first["at"] - turn
            found["first_loss"] = first["loss"]
            found["graphs"] = first["graphs"]
            found["recompiles_after_step_1"] = graphs() - first["graphs"]
            found["tunings"] = len(counts["tunings"])
            late = [name for at, name in counts["tunings"] if at > first["at"]]
            found["tunings_after_step_1"] = len(late)
            found["tuned_late"] = sorted(set(late))
    found["seconds"] = time.time() - turn
    out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main())
