"""What does a person see while it trains? Console, a JSONL line for every step, TensorBoard, MLflow, a progress bar.

Rank 0 reports; on other ranks everything here does nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TextIO

from kernelguard_train.config import Config
from kernelguard_train.configfile import dump, to_dict
from kernelguard_train.errors import ConfigError

log = logging.getLogger("kernelguard_train")


def setup_logging(*, first: bool) -> None:
    """Messages go to stderr, from rank 0 alone."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.setLevel(logging.INFO if first else logging.CRITICAL)
    log.propagate = True


class Report(AbstractContextManager["Report"]):
    """Where the numbers of each step go."""

    def __init__(self, config: Config, *, first: bool) -> None:
        self.config, self.first = config, first
        self.folder = Path(config.train.output)
        self.lines: TextIO | None = None
        self.board: Any = None
        self.mlflow: Any = None
        self.bar: Any = None
        if not first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.toml").write_text(dump(config), encoding="utf-8")
        if config.report.tensorboard:
            self.board = _tensorboard(self.folder / "tensorboard")
        if config.report.mlflow:
            self.mlflow = _mlflow(config)
        self.lines = (self.folder / "steps.jsonl").open("a", encoding="utf-8")
        if config.report.progress and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - only on a terminal

            form = "{percentage:5.1f}%|{bar}| {elapsed} gone, {remaining} left{postfix}"
            self.bar = tqdm(total=1.0, bar_format=form, leave=True)

    def step(self, number: int, done: float, values: dict[str, Any]) -> None:
        """Reports one step; `done` is the part of the run that is behind, 0 to 1."""
        if self.lines is None:
            return
        self.lines.write(json.dumps({"step": number, "done": round(done, 6), "time": time.time(), **values}) + "\n")
        self.lines.flush()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(name, value, number)
        if self.mlflow is not None:
            self.mlflow.log_metrics(numbers, step=number)
        if self.bar is not None:
            self.bar.set_postfix_str(f"step {number}, loss {values['loss']:.4f}")
            self.bar.update(max(0.0, done - self.bar.n))
        if number == 1 or number % self.config.report.every == 0:
            log.info("%s", _line(number, done, values))

    def summary(self, values: dict[str, Any]) -> None:
        """Writes the run's summary."""
        if self.lines is not None and values:  # a run that had nothing left to do keeps the summary of the one that did
            (self.folder / "summary.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            log.info("summary: %s", json.dumps(values))

    def __exit__(self, *_: object) -> None:
        for sink in (self.lines, self.board, self.bar):
            if sink is not None:
                sink.close()
        if self.mlflow is not None:
            self.mlflow.end_run()


def _line(number: int, done: float, values: dict[str, Any]) -> str:
    parts = [
        f"step {number}",
        f"{100 * done:.1f} %",
        f"loss {values['loss']:.4f}",
        f"norm {values['norm']:.3f}",
        f"lr {values['lr']:.2e}",
        f"{values['tokens_per_s']:.0f} tokens/s/GPU",
        f"{values['step_s']:.2f} s",
    ]
    if "mfu" in values:
        parts.append(f"MFU {100 * values['mfu']:.1f} %")
    if "peak_gib" in values:
        parts.append(f"{values['peak_gib']:.1f} GiB")
    return ", ".join(parts)


def _tensorboard(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(f"report.tensorboard: {error}: pip install tensorboard") from error
    return SummaryWriter(str(folder))


def _mlflow(config: Config) -> Any:
    try:
        import mlflow  # noqa: PLC0415 - optional
    except ImportError as error:
        raise ConfigError(f"report.mlflow: {error}: pip install mlflow") from error
    mlflow.start_run()
    mlflow.log_params({f"{s}.{k}": v for s, keys in to_dict(config).items() for k, v in keys.items()})
    return mlflow
