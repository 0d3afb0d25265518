"""What is handed to an engine, and the one command that every node runs. Values and text only."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kernelguard.errors import InputError

_PLAIN = re.compile(r"[A-Za-z0-9_.,:/@=+%-]+")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """A shell variable that only the node knows the value of."""

    name: str


Word = str | Variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training job that was admitted."""

    name: str
    """Lower case letters, digits and hyphens: what every engine takes."""
    script: tuple[str, ...]
    """`train.py ARGS` or `-m MODULE ARGS`."""
    python: str
    """The interpreter that trains, as its nodes see it."""
    run_dir: str
    """As the submitting machine sees it."""
    workdir: str
    nodes: int = 1
    processes: int = 1
    """Ranks on each node."""
    max_restarts: int = 0
    stop_within_s: float = 600.0
    rendezvous_s: float = 90.0
    image: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of the engine itself, passed through: `partition=gpu`, `namespace=ml`."""
    bundle: bytes = b""
    """A zip of what ranks need of kernelguard, for engines whose nodes share no disk with this machine."""
    ticket: str = ""
    """The ticket's text, for the same engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What would be submitted, exactly."""

    files: tuple[tuple[str, str], ...]
    """Name and text of each file, written into the run directory."""
    argv: tuple[str, ...]
    """The command that submits it."""
    runs_here: bool = False
    """The command is the job itself."""


class Engine(Protocol):
    """Something that starts jobs already, and keeps doing so."""

    name: str
    program: str
    """What has to be on PATH to submit; empty: nothing."""
    shares_disk: bool
    """Its nodes see the run directory under the same path."""
    needs_image: bool

    def render(self, job: Job) -> Submission:
        """Everything that would be submitted. Raises InputError for an option that it cannot take."""


def node_command(job: Job, *, site: str, ticket: str, node: Word, address: Word = "", port: Word = "") -> list[Word]:
    """What each node runs: the supervisor, and under it torchrun with the guard in front of the script."""
    supervisor: list[Word] = [job.python, f"{site}/kernelguard/launch/supervisor.py", "--ticket", ticket]
    supervisor += ["--node-rank", node, "--nnodes", str(job.nodes), "--stop-within", f"{job.stop_within_s:g}"]
    torchrun: list[Word] = [job.python, "-m", "torch.distributed.run", "--nproc-per-node", str(job.processes)]
    torchrun += ["--max-restarts", str(job.max_restarts)]
    if job.nodes == 1 and not port:
        torchrun.append("--standalone")
    else:
        wait = max(int(job.rendezvous_s), 30)
        torchrun += ["--nnodes", str(job.nodes), "--node-rank", node, "--rdzv-backend", "static"]
        torchrun += ["--master-addr", address or "127.0.0.1", "--master-port", port, "--rdzv-conf", f"timeout={wait}"]
    return [*supervisor, "--", *torchrun, "-m", "kernelguard.guard", "--", *job.script]


def shell(words: Sequence[Word]) -> str:
    """One line of shell: every text is quoted, only variables are looked up."""
    return " ".join(f'"${word.name}"' if isinstance(word, Variable) else shlex.quote(word) for word in words)


def plain(value: str, *, what: str) -> str:
    """A value that may stand in a comment that an engine reads.

    Raises:
        InputError: it holds anything that could be read as more than a value.
    """
    if not _PLAIN.fullmatch(value):
        raise InputError(f"{what} is {value!r}; letters, digits and _.,:/@=+%- can be passed on")
    return value


def check_name(name: str) -> str:
    """The job's name.

    Raises:
        InputError: an engine would refuse it.
    """
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name for a job", hint="lower case letters, digits and hyphens, at most 63")
    return name


def take(options: Mapping[str, str], known: Sequence[str], *, engine: str) -> dict[str, str]:
    """The options of an engine.

    Raises:
        InputError: one is not among those that it has.
    """
    strange = sorted(set(options) - set(known))
    if strange:
        raise InputError(f"--on {engine} has no option {', '.join(strange)}", hint=f"it has {', '.join(sorted(known))}")
    return dict(options)
