"""What runs on each node: torchrun, watched. Forwards signals, keeps deadlines, and ends with the ranks' own code.

torchrun turns every worker's exit code into 1, restarts what must not be restarted, and waits for ever for a node that
never comes. This process starts it, and exits with the code that the ranks agreed on (`outcome.json`), else with the
trainer's own. Standard library, Python 3.9 or newer; run as
`python supervisor.py --ticket RUN/ticket.json [--node-rank 0 --nnodes 1] -- COMMAND...`.
"""
# Runs where kernelguard's own command line does not: it is its own command line.
# ruff: noqa: T201

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

# Run by its path: the folder that holds the package is what has to be importable, not this one.
_SITE = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[0] = str(_SITE)

from kernelguard.guard import ticket as tickets  # noqa: E402
from kernelguard.launch import processes  # noqa: E402
from kernelguard.launch.outcome import (  # noqa: E402
    Outcome,
    OutcomeFile,
    Stderr,
    failure_outcome,
    first_code,
    report_node,
    told_ranks,
)

STAGED = ".kernelguard-site"
"""Marks a folder that holds nothing but a copy of this package, so that it may be put on PYTHONPATH."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_POLL_S = 0.1
_LOOK_S = 0.5
_START_MARGIN_S = 60.0
"""For interpreters to import torch from a cold disk, before and after they have a rank."""
_END_GRACE_S = 45.0
"""torchrun itself gives workers 30 s between SIGTERM and SIGKILL."""
_KILL_GRACE_S = 10.0


@dataclass
class Settings:
    """What one node is told on the command line."""

    ticket: tickets.Ticket
    ticket_path: Path
    command: Sequence[str]
    node: int = 0
    nodes: int = 1
    stop_within_s: float = 600.0
    """After a SIGTERM or SIGINT, how long ranks may go on to save what they have."""
    environ: Mapping[str, str] = field(default_factory=dict)


class Supervisor:
    """One node's torchrun from start to end."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.run_dir = Path(settings.ticket.run_dir)
        self.file = OutcomeFile(self.run_dir / "outcome.json")
        self.stderr = Stderr()
        self.outcome: Outcome | None = None
        self.signals: deque[int] = deque()
        self.ranks: dict[int, int] = {}
        self.signalled: set[int] = set()
        self.stop_by: float | None = None
        self.stopping = False
        self.ending = False
        """torchrun was told to end, by this process's own decision."""
        self.kill_at: float | None = None
        self.end_by: float | None = None
        self.preflight_by: float | None = None
        self.began = time.monotonic()
        self.next_look = 0.0

    def run(self) -> int:
        """Start, watch, clean up; returns the exit code."""
        deadlines = self.settings.ticket.deadlines
        self.file.remove()
        report_node(self.run_dir, self.settings.node, socket.gethostname())
        for number in FORWARDED:
            signal.signal(number, lambda received, _: self.signals.append(received))
        adopted = processes.adopt_orphans()
        try:
            torchrun = subprocess.Popen(
                list(self.settings.command),
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=dict(self.settings.environ),
                # Ctrl-C reaches the whole foreground group: torchrun shall hear of it once, from here.
                start_new_session=True,
                preexec_fn=processes.end_with_parent,  # noqa: PLW1509 - no thread has been started yet
            )
        except OSError as error:
            say(f"{self.settings.command[0]} cannot be started: {error.strerror}")
            return 4
        self.stderr.start(torchrun)
        self.preflight_by = self.began + 2 * deadlines.rendezvous_s + _START_MARGIN_S
        while torchrun.poll() is None:
            self._watch(torchrun)
            time.sleep(_POLL_S)
        self._read_outcome()
        left = processes.end_all(os.getpid(), grace_s=5.0) if adopted else []
        if left:
            say(f"processes {left} do not end, not even when killed")
        self.stderr.finish()
        self._read_outcome()
        code = self._code(torchrun.returncode)
        report_node(self.run_dir, self.settings.node, socket.gethostname(), code=code, stopped=self.stopping)
        return code

    def _watch(self, torchrun: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        while self.signals:
            self._forward(self.signals.popleft(), torchrun, now)
        if now >= self.next_look:
            self.next_look = now + _LOOK_S
            self._look(torchrun, now)
        self._read_outcome()
        if self.outcome is not None and self.outcome.code != 0 and self.end_by is None:
            self.end_by = now + _END_GRACE_S
        if self.end_by is not None and now > self.end_by:
            self._end(torchrun, now)
        if self.stop_by is not None and now > self.stop_by:
            say(f"the ranks did not end within {self.settings.stop_within_s:g} s")
            self.stop_by = None
            self._end(torchrun, now)
        if self.outcome is None and self.preflight_by is not None and now > self.preflight_by:
            self._too_late(torchrun, now)
        if self.kill_at is not None and now > self.kill_at:
            self._kill(torchrun)

    def _look(self, torchrun: subprocess.Popen[bytes], now: float) -> None:
        """Note the ranks; new ones are a new attempt, of which no outcome is known yet."""
        found = processes.ranks(torchrun.pid)
        if found and not set(found) & set(self.ranks):
            if self.ranks:
                self._restarted(torchrun, now)
            self.preflight_by = now + self.settings.ticket.deadlines.total_s + _START_MARGIN_S
        self.ranks.update(found)

    def _restarted(self, torchrun: subprocess.Popen[bytes], now: float) -> None:
        """The ranks were started anew: what the earlier ones said is over, and a no stays a no."""
        if self.stopping or (self.outcome is not None and self.outcome.code != 0):
            self._end(torchrun, now)
        self.file.expect_new()
        self.stderr.outcome = None
        self.outcome = None if self.outcome is None or self.outcome.code == 0 else self.outcome

    def _forward(self, number: int, torchrun: subprocess.Popen[bytes], now: float) -> None:
        """Pass a signal on to the ranks themselves: torchrun would kill them 30 s after it heard of one."""
        name = signal.Signals(number).name
        running = processes.ranks(torchrun.pid)
        # What is told to stop is no restart when it is looked at next.
        self.ranks.update(running)
        if number in (signal.SIGTERM, signal.SIGINT):
            if self.stopping:
                say(f"{name} again: ending at once")
                self._kill(torchrun)
                return
            self.stopping = True
            self.stop_by = now + self.settings.stop_within_s
            if not running:
                self._end(torchrun, now)
        told = []
        for pid, rank in running.items():
            # Without a handler it would die of a signal that only asks it to do something.
            asks = number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
            if asks and not processes.catches(pid, number):
                continue
            if processes.send(pid, number):
                told.append(rank)
        ranks = ", ".join(map(str, sorted(told))) or "none"
        say(f"{name} passed on to ranks: {ranks}")

    def _too_late(self, torchrun: subprocess.Popen[bytes], now: float) -> None:
        """The preflight's own deadlines were not kept: say who is missing, and end."""
        self.preflight_by = None
        waited = f"{now - self.began:.0f} s"
        ticket_ranks = told_ranks(self.run_dir)
        if not self.ranks:
            missing = self.file.missing_nodes(self.settings.nodes)
            who = ", ".join(f"node {n}" for n in missing) or "a node"
            text = f"no rank was started within {waited}: torchrun waited for {who}"
            self.outcome = failure_outcome(tickets.CODE_NODE if missing else tickets.CODE_UNKNOWN, text, missing)
        else:
            silent = sorted(set(self.ranks.values()) - set(ticket_ranks))
            text = f"no verdict within {waited}" + (
                f"; rank {', '.join(map(str, silent))} said nothing" if silent else ""
            )
            nodes = [socket.gethostname()] if silent else []
            self.outcome = failure_outcome(tickets.CODE_NODE if silent else tickets.CODE_UNKNOWN, text, nodes)
        say(text)
        self.file.write(self.outcome)
        self._end(torchrun, now)

    def _end(self, torchrun: subprocess.Popen[bytes], now: float) -> None:
        if not self.ending:
            self.ending = True
            self.kill_at = now + _KILL_GRACE_S
            processes.send(torchrun.pid, signal.SIGTERM)

    def _kill(self, torchrun: subprocess.Popen[bytes]) -> None:
        self.kill_at = None
        for pid in (*processes.descendants(torchrun.pid), torchrun.pid):
            processes.send(pid, signal.SIGKILL)

    def _read_outcome(self) -> None:
        if self.outcome is not None and self.outcome.code != 0:
            return
        found = self.file.read() or self.stderr.outcome
        if found is not None:
            self.outcome = found

    def _code(self, returned: int) -> int:
        """The code that this node ends with, and one line that says why."""
        outcome, failure = self.outcome, self.stderr.failure
        if outcome is not None and outcome.code != 0:
            say(f"exit {outcome.code}: {outcome.summary}")
            return outcome.code
        own = returned if returned >= 0 else 128 - returned
        if returned == 0:
            if outcome is None:
                say("every rank ended well, but no outcome of the preflight could be read on this node")
            return 0
        if failure.exit_code is not None:
            own = failure.exit_code if failure.exit_code >= 0 else 128 - failure.exit_code
        who = f"rank {failure.rank} on {failure.host} " if failure.exit_code is not None else "torchrun "
        how = f"was killed by signal {own - 128}" if own > 128 else f"ended with code {own}"
        if outcome is None and not self.stopping:
            if own in (tickets.CODE_CONFIGURATION, tickets.CODE_NODE, tickets.CODE_UNKNOWN):
                say(f"exit {own}: {who}{how}; the outcome of the preflight could not be read on this node")
                return own
            if failure.exit_code is not None and failure.exit_code < 0:
                text = f"{who}{how} before there was a verdict"
                self.file.write(failure_outcome(tickets.CODE_NODE, text, [failure.host]))
                say(f"exit {tickets.CODE_NODE}: {text}")
                return tickets.CODE_NODE
            say(f"exit {own}: {who}{how} before there was a verdict")
            return own
        say(f"exit {own}: {who}{how}")
        return own


def say(text: str) -> None:
    """One line of talk."""
    print(f"kernelguard: {text}", file=sys.stderr, flush=True)


def rank_environment(
    environ: Mapping[str, str], ticket_path: Path, site: Path, ticket: tickets.Ticket
) -> dict[str, str]:
    """What the ranks see: this process's environment, the ticket, and the guard of the kernelguard that launched."""
    found = {**environ, **ticket.variables, tickets.VARIABLE: str(ticket_path)}
    if (site / STAGED).exists():
        found["PYTHONPATH"] = os.pathsep.join([str(site), *filter(None, [environ.get("PYTHONPATH", "")])])
    return found


def main(arguments: Sequence[str]) -> int:
    """Read the command line and supervise."""
    parser = argparse.ArgumentParser(prog="kernelguard-supervisor", description="torchrun on one node, watched.")
    parser.add_argument("--ticket", required=True, type=Path)
    parser.add_argument("--node-rank", default=0, type=int)
    parser.add_argument("--nnodes", default=1, type=int)
    parser.add_argument("--stop-within", default=600.0, type=float, help="seconds that ranks may take after SIGTERM")
    parser.add_argument("--settle", type=int, help="run nothing: end with the run's outcome, else with this code")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- torchrun ...")
    given = parser.parse_args(list(arguments))
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command and given.settle is None:
        parser.error("no command after --")
    path = given.ticket.absolute()
    try:
        ticket = tickets.load_ticket(str(path))
    except tickets.TicketError as error:
        say(str(error))
        return 2
    if given.settle is not None:
        outcome = OutcomeFile(Path(ticket.run_dir) / "outcome.json").read()
        agreed = outcome.code if outcome is not None else 0
        return agreed or (first_code(Path(ticket.run_dir)) if given.settle else 0) or int(given.settle)
    settings = Settings(
        ticket=ticket,
        ticket_path=path,
        command=command,
        node=given.node_rank,
        nodes=given.nnodes,
        stop_within_s=given.stop_within,
        environ=rank_environment(os.environ, path, _SITE, ticket),
    )
    return Supervisor(settings).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
