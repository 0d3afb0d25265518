"""What does a person see while it trains? Console, a JSONL line for every step, TensorBoard, MLflow, a progress bar.

Rank 0 reports; on other ranks everything here does nothing.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TextIO

from kernelguard_train.config import Config
from kernelguard_train.configfile import dump, to_dict
from kernelguard_train.errors import ConfigError, OutputError

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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "config.toml").write_text(dump(config), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"train.output: {error}") from error
        if config.report.tensorboard:
            self.board = _tensorboard(self.folder / "tensorboard")
        if config.report.mlflow:
            self.mlflow = _mlflow(config)
        self.lines = (self.folder / "steps.jsonl").open("a", encoding="utf-8")
        if config.report.progress and sys.stderr.isatty():
            from tqdm import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415 - only on a terminal

            form = "{percentage:5.1f}%|{bar}| {elapsed} gone, {remaining} left{postfix}"
            self.bar = tqdm(total=1.0, bar_format=form, leave=True)

    def built(self, facts: dict[str, Any]) -> None:
        """Writes which layers the model has and what they run on to `built.json`, for whoever reads the run later."""
        if self.lines is None:
            return
        try:
            (self.folder / "built.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"train.output: {error}") from error

    def step(self, number: int, done: float, values: dict[str, Any]) -> None:
        """Reports one step; `done` is the part of the run that is behind, 0 to 1.

        Raises:
            OutputError: when the run's own log cannot be written; checkpoints would fare no better.
        """
        if self.lines is None:
            return
        line = json.dumps({"step": number, "done": round(done, 6), "time": time.time(), **values})
        try:
            self.lines.write(line + "\n")
            self.lines.flush()
        except OSError as error:
            raise OutputError(f"train.output: {self.folder / 'steps.jsonl'} cannot be written: {error}") from error
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self.board is not None:
            self._tell("board", lambda: [self.board.add_scalar(n, value, number) for n, value in numbers.items()])
        if self.mlflow is not None:
            self._tell("mlflow", lambda: self.mlflow.log_metrics(numbers, step=number))
        if self.bar is not None:
            self.bar.set_postfix_str(f"step {number}, loss {values['loss']:.4f}")
            self.bar.update(max(0.0, done - self.bar.n))
        if number == 1 or number % self.config.report.every == 0:
            log.info("%s", _line(number, done, values))

    def _tell(self, sink: str, action: Callable[[], object]) -> None:
        """Tells TensorBoard or MLflow; one that fails is not told any more."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a log server that is away must not end a week of training
            log.warning("%s is not told any more: %s: %s", sink, type(error).__name__, error)
            setattr(self, sink, None)

    def summary(self, values: dict[str, Any]) -> None:
        """Writes the run's summary."""
        if self.lines is not None and values:  # a run that had nothing left to do keeps the summary of the one that did
            (self.folder / "summary.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
            log.info("summary: %s", json.dumps(values))

    def __exit__(self, *_: object) -> None:
        if self.board is not None:
            self._tell("board", self.board.close)
        if self.mlflow is not None:
            self._tell("mlflow", self.mlflow.end_run)
        for sink in (self.bar, self.lines):
            if sink is not None:
                with suppress(OSError):  # what could not be written has been reported
                    sink.close()


def _line(number: int, done: float, values: dict[str, Any]) -> str:
    parts = [
        f"step {number}",
        f"{100 * done:.1f} %",
        f"loss {values['loss']:.4f}",
        f"norm {values['norm']:.3f}",
        f"lr {values['lr']:.2e}",
        f"{values['tokens_per_s']:.0f} tokens/s/{'GPU' if 'peak_gib' in values else 'rank'}",
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
    try:
        mlflow.start_run()
        mlflow.log_params({f"{s}.{k}": v for s, keys in to_dict(config).items() for k, v in keys.items()})
    except Exception as error:  # MLflow raises its own, its server's and its transport's errors
        raise ConfigError(f"report.mlflow: {type(error).__name__}: {error}") from error
    return mlflow
