"""What can go wrong in kernelguard itself: one tree, each class with its exit code and a hint.

A negative answer about a model is data (`judge.Finding`), never an exception. An exception means that the question
could not be answered.
"""

from __future__ import annotations


class KernelguardError(Exception):
    """Base of everything that kernelguard raises on purpose.

    `message` names the input and what was expected; `hint` is the fix, where possible a command that can be pasted.
    """

    exit_code = 70

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class InputError(KernelguardError):
    """The command line or an input file is unusable."""

    exit_code = 2


class OutputError(InputError):
    """The place that the answer was to go to cannot be written."""


class UndeterminedError(KernelguardError):
    """The question is fine, but it cannot be answered on this machine or within the time limit."""

    exit_code = 3


class ToolError(KernelguardError):
    """Another program that was run (docker, pip, ...) failed."""

    exit_code = 4
