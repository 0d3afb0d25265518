"""How is the run saved, and how does it go on?

A checkpoint is a folder `step-NNNNNNNN` with the model's and optimizer's shards (torch DCP), the random states and the
position in the data. It is written under another name and renamed when it is complete, so what carries the name can be
read; and should it not be readable all the same, the one before it is used, and that is said.
"""

from __future__ import annotations

import json
import logging
import shutil
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save

from kernelguard_train import guarded
from kernelguard_train.config import Config
from kernelguard_train.configfile import to_dict
from kernelguard_train.errors import CheckpointError
from kernelguard_train.ranks import Ranks
from kernelguard_train.stream import Position

log = logging.getLogger("kernelguard_train")
_ORDER = ("data.path", "data.split", "data.column", "data.streaming", "data.shuffle", "data.shuffle_buffer",
          "data.chat_template", "data.max_length", "data.too_long", "data.bad_rows", "batch.mode", "batch.tokens",
          "batch.window", "train.seed")  # fmt: skip
"""Keys that decide which samples come in which order: a position means something only while they stay."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far the run is: everything about it that is neither a tensor nor the configuration."""

    step: int = 0
    position: Position = field(default_factory=Position)
    done: float = 0.0
    """Part of the run, 0 to 1."""
    tokens: int = 0
    trained: int = 0
    skipped: int = 0


def complete(config: Config) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return sorted(path for path in folder_of(config).glob("step-*") if path.is_dir())


def folder_of(config: Config) -> Path:
    """Where the run's checkpoints are."""
    return Path(config.train.output) / "checkpoints"


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, config: Config, ranks: Ranks, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.config, self.ranks, self.network, self.optimizer = config, ranks, network, optimizer
        self.folder = folder_of(config)
        # Collectives of the thread that writes must not mix with those of the training.
        self.group = dist.new_group(backend="gloo")
        self.pending: tuple[Future[Any], Path] | None = None
        self.problem = ""

    def save(self, progress: Progress, *, wait: bool = False) -> None:
        """Saves the run; in the background, unless told to wait. All ranks call it.

        Raises:
            CheckpointError: when this or the previous save failed.
        """
        self.finish()
        target = self.folder / f"step-{progress.step:08d}"
        if target in complete(self.config):
            return
        partial = target.with_name(f".{target.name}.partial")
        try:
            if self.ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                content = {"config": to_dict(self.config), "world": self.ranks.world, "progress": asdict(progress)}
                (partial / "run.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
        except OSError as error:
            self.problem = str(error)
        self._agree(partial)
        try:
            torch.save(self._random_state(), partial / f"random-{self.ranks.rank:05d}.pt")
        except (OSError, RuntimeError) as error:  # torch reports a full disk as the latter
            self.problem = str(error)
        self._agree(partial)
        # A copy of everything is taken before this returns; from then on training may change it.
        future = async_save(self._state(), checkpoint_id=partial, process_group=self.group)
        self.pending = (future, target)  # type: ignore[assignment]
        if wait or not self.config.checkpoint.background:
            self.finish()

    def poll(self) -> bool:
        """Puts a finished checkpoint in its place; says whether this rank's part of it failed."""
        if self.pending and self.pending[0].done():
            self._settle()
        return bool(self.problem)

    def finish(self) -> None:
        """Waits for a save that is under way. All ranks call it.

        Raises:
            CheckpointError: on all ranks, when it failed on any.
        """
        if self.pending:
            target = self.pending[1]
            self._settle()
            self._agree(target.with_name(f".{target.name}.partial"))

    def raise_failure(self) -> None:
        """Ends the run, after the ranks agreed that a save failed.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"a checkpoint could not be written to {self.folder}: {self.problem or 'on another rank'}"
        )

    def _agree(self, partial: Path) -> None:
        if self.ranks.total(bool(self.problem))[0]:
            if self.ranks.first:
                shutil.rmtree(partial, ignore_errors=True)
            self.raise_failure()

    def _settle(self) -> None:
        """Waits for the pending save and, on rank 0, renames it and removes old ones."""
        if self.pending is None:
            return
        future, target = self.pending
        self.pending = None
        error = future.exception()
        if error is not None:
            self.problem = _first_line(error)
        elif self.ranks.first:
            # DCP writes its metadata after every rank has reported its part, so rank 0 knows that all is there.
            partial = target.with_name(f".{target.name}.partial")
            guarded.attest(partial)
            partial.rename(target)
            for old in complete(self.config)[: -self.config.checkpoint.keep]:
                shutil.rmtree(old)

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.network, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _random_state(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def resume(self) -> Progress | None:
        """Loads the newest checkpoint that can be read; None when there is none yet. All ranks call it.

        Raises:
            CheckpointError: when there are some and none can be read, or the data are in another order now.
        """
        found = complete(self.config)[::-1]
        if self.config.train.resume == "never":
            if found:
                raise CheckpointError(f"{self.folder} has checkpoints; use another train.output or train.resume=auto")
            return None
        for path in found:
            problem, progress = "", None
            try:
                progress = self._load(path)
            except CheckpointError:
                raise
            except (Exception, CheckpointException) as error:  # noqa: BLE001 - the ranks must agree, whatever it is
                problem = _first_line(error)
            if not self.ranks.total(bool(problem))[0]:
                guarded.say_what_changed(path)
                return progress
            log.warning("%s cannot be read (%s); going back to the checkpoint before it", path, problem or "elsewhere")
        if found:
            raise CheckpointError(f"none of the {len(found)} checkpoints in {self.folder} can be read")
        return None

    def _load(self, path: Path) -> Progress:
        run = json.loads((path / "run.json").read_text(encoding="utf-8"))
        before, now = run["config"], to_dict(self.config)
        for key in _ORDER:
            section, name = key.split(".")
            if before[section].get(name) != now[section][name]:
                raise CheckpointError(
                    f"{path} was made with {key} = {before[section].get(name)!r}, now it is {now[section][name]!r}: "
                    "the data would come in another order. Change it back, or use another train.output"
                )
        state = self._state()
        load(state, checkpoint_id=path, process_group=self.group)
        set_state_dict(
            self.network, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        if run["world"] != self.ranks.world:
            log.info("%s was made by %d ranks and is read by %d", path, run["world"], self.ranks.world)
        random = path / f"random-{self.ranks.rank:05d}.pt"
        if random.exists():
            saved = torch.load(random, weights_only=True)
            torch.set_rng_state(saved["cpu"])
            if self.ranks.device.type == "cuda" and "cuda" in saved:
                torch.cuda.set_rng_state(saved["cuda"])
        fields = run["progress"]
        return Progress(**{**fields, "position": Position(**fields["position"])})


def _first_line(error: BaseException) -> str:
    """What went wrong, from the innermost cause that DCP's exception holds."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    return f"{type(error).__name__}: {error}".splitlines()[0]
