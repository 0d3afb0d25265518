"""What can go wrong that a person can mend, each with the exit code of the process.

Messages name the input and what was expected. Rank 0 prints them; every rank exits with the same code.
"""

from __future__ import annotations


class TrainError(Exception):
    """Training cannot start or go on, and the message says what to change."""

    exit_code = 1


class ConfigError(TrainError):
    """The configuration is unusable; the message lists every problem found."""

    exit_code = 2


class DataError(TrainError):
    """A data source or a row is unusable; the message names it."""


class ModelError(TrainError):
    """The model cannot be built, loaded or bound to what it needs."""


class CheckpointError(TrainError):
    """A checkpoint could not be written or read."""


class OutputError(TrainError):
    """The run's folder cannot be written to."""


class NonFiniteError(TrainError):
    """Loss or gradients were not finite for too many steps in a row."""


class Interrupted(TrainError):  # noqa: N818 - not a fault: the run was asked to stop, and saved
    """The run was asked to stop (SIGTERM) and saved a checkpoint first."""

    exit_code = 143
