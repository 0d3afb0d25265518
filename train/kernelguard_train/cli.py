"""The command line. It prints and decides the exit code; everything else is elsewhere."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import NoReturn

from kernelguard_train import configfile
from kernelguard_train.config import Config
from kernelguard_train.errors import Interrupted, TrainError


def parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    made = argparse.ArgumentParser(
        prog="kernelguard_train",
        description="Supervised fine-tuning of causal transformers models with FSDP2. Run it alone or under torchrun.",
        epilog="exit codes: 0 done; 1 cannot go on; 2 unusable configuration; 143 stopped by SIGTERM, after saving",
    )
    made.add_argument(
        "settings", nargs="*", metavar="FILE|section.key=value", help="a TOML file (see --print-config), and overrides"
    )
    made.add_argument(
        "--print-config", action="store_true", help="print the whole configuration, with every key explained"
    )
    made.add_argument(
        "--warm-up",
        action="store_true",
        help="compile what the first steps need, on random weights and made-up samples, and train nothing",
    )
    made.add_argument("--audit-data", nargs="?", type=int, const=5, metavar="N", help="show N samples with their masks")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    grammar = parser()
    options = grammar.parse_args(arguments)
    if options.audit_data is not None and options.audit_data < 1:
        grammar.error(f"--audit-data {options.audit_data}: expected 1 or more samples")
    overrides = list(options.settings)
    path = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    try:
        if options.print_config and path is None and not overrides:
            sys.stdout.write(configfile.dump(Config()))
            return 0
        config = configfile.load(path, overrides)
        if options.print_config:
            sys.stdout.write(configfile.dump(config))
            return 0
        if options.audit_data is not None:
            return _audit(config, options.audit_data)
        if options.warm_up:
            return _warm_up(config)
    except TrainError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    return _train(config)


def _warm_up(config: Config) -> int:
    from kernelguard_train import compiled  # noqa: PLC0415 - --help and --print-config answer without torch
    from kernelguard_train.warmup import shortened  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="kernelguard-train-") as folder:

        def leave(_number: int, _frame: FrameType | None) -> NoReturn:
            # Not an exception: this may interrupt what takes any exception for its own.
            shutil.rmtree(folder, ignore_errors=True)
            os.write(2, b"error: asked to stop; nothing is kept\n")
            os._exit(Interrupted.exit_code)

        signal.signal(signal.SIGTERM, leave)
        short = shortened(config, Path(folder))
        code = _train(short, saves=False)
    if code:
        return code
    sys.stderr.write(f"warm: {compiled.save(short)}\n")
    return 0


def _audit(config: Config, count: int) -> int:
    from kernelguard_train.audit import audit  # noqa: PLC0415 - --help and --print-config answer without torch
    from kernelguard_train.model import text_config  # noqa: PLC0415

    colour = (sys.stdout.isatty() and "NO_COLOR" not in os.environ) or "FORCE_COLOR" in os.environ
    for line in audit(config, text_config(config).vocab_size, count, colour=colour):
        sys.stdout.write(line + "\n")
    return 0


def _train(config: Config, *, saves: bool = True) -> int:
    """Trains; `saves`: a SIGTERM is for it, and what was trained so far is saved."""
    import torch.distributed as dist  # noqa: PLC0415

    from kernelguard_train import ranks  # noqa: PLC0415
    from kernelguard_train.report import Report, setup_logging  # noqa: PLC0415
    from kernelguard_train.train import train  # noqa: PLC0415

    setup_logging(first=os.environ.get("RANK", "0") == "0")
    try:
        own = ranks.start(config)
        stop = ranks.StopRequest()
        with Report(config, first=own.first) as report, stop if saves else nullcontext():
            train(config, own, report, stop)
    except TrainError as error:
        if ranks.should_print(error):
            sys.stderr.write(f"error: {error}\n")
        if dist.is_initialized() and dist.get_world_size() > 1:
            # Other ranks may wait in a collective that this one will never join: leave without a farewell.
            sys.stderr.flush()
            os._exit(error.exit_code)
        code = error.exit_code
    else:
        code = 0
    if dist.is_initialized():
        dist.destroy_process_group()
    return code
