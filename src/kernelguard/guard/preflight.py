"""May this rank's group start? Asks in a child process, and waits for the answer with a deadline.

Standard library only: nothing of the training is imported before the training script does it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernelguard.guard.children import Stopwatch, kill_group, leashed
from kernelguard.guard.outcome import Outcome, RankState, describe, from_document, publish
from kernelguard.guard.ranks import PlaceError, read_place
from kernelguard.guard.ticket import (
    CODE_CONFIGURATION,
    CODE_NODE,
    CODE_UNKNOWN,
    VARIABLE,
    Deadlines,
    TicketError,
    load_ticket,
)

DONE = "KERNELGUARD_PREFLIGHT_DONE"
"""Holds the process id of a rank whose preflight is over."""
_STATION = Path(__file__).resolve().parent / "station.py"
# What starting a process and ending it may take beside the deadlines of its steps.
_SLACK_S = 30.0


def preflight(environ: Mapping[str, str] | None = None) -> Outcome:
    """The outcome that all ranks agreed on; it has been written and said already.

    Never raises and never hangs: whatever goes wrong here is an outcome as well.
    """
    environ = os.environ if environ is None else environ
    watch = Stopwatch()
    path = environ.get(VARIABLE, "")
    try:
        ticket = load_ticket(path) if path else None
        place = read_place(environ)
    except (TicketError, PlaceError) as error:
        rank = environ.get("RANK", "0")
        return _refused(CODE_CONFIGURATION, str(error), rank=int(rank) if rank.isdigit() else 0, run_dir="", heard=path)
    limits = ticket.deadlines if ticket is not None else Deadlines()
    found, how = _ask(limits.total_s + _SLACK_S, limits.verdict_s, environ)
    if found is not None:
        return found
    # A process that died or hangs is a node's fault; an exception in kernelguard itself says nothing about the node.
    code = CODE_UNKNOWN if how.startswith("ended with exit code") else CODE_NODE
    return _refused(
        code,
        f"the preflight of rank {place.rank} on {place.host} {how}",
        rank=place.rank,
        run_dir=ticket.run_dir if ticket is not None else "",
        host=place.host,
        seconds=watch.seconds,
        heard=path,
    )


def _ask(limit_s: float, leave_s: float, environ: Mapping[str, str]) -> tuple[Outcome | None, str]:
    """What the station said; None: how it ended."""
    watch = Stopwatch()
    reading, writing = os.pipe()
    argv = [*leashed(str(_STATION)), str(writing)]
    # Its warnings about hosts that do not answer yet are not what a person needs to read.
    child_environ = {"TORCH_CPP_LOG_LEVEL": "FATAL", **environ}
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            env=child_environ,
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        with _ended_with_us(process):
            try:
                outcome, stage = _listen(pipe.fileno(), watch, limit_s)
                timed_out = outcome is None and watch.left(limit_s) == 0.0
                if outcome is not None:
                    _wait(process, leave_s)
                elif not timed_out:
                    _wait(process, 5.0)
            finally:
                returncode = process.poll()
                _end(process)
    if outcome is not None:
        return outcome, ""
    at = f" at stage '{stage}'" if stage else ""
    if timed_out:
        return None, f"did not end within {limit_s:g} s{at}"
    if returncode is not None and returncode < 0:
        return None, f"was killed by {signal.Signals(-returncode).name}{at}"
    return None, f"ended with exit code {returncode} and said nothing{at}"


def _listen(descriptor: int, watch: Stopwatch, limit_s: float) -> tuple[Outcome | None, str]:
    """The outcome, if one comes before the deadline, and the last stage that was announced."""
    buffer, stage = b"", ""
    while True:
        ready, _, _ = select.select([descriptor], [], [], watch.left(limit_s))
        if not ready:
            return None, stage
        chunk = os.read(descriptor, 65_536)
        if not chunk:
            return None, stage
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            record: dict[str, Any] = json.loads(line)
            stage = str(record.get("stage", stage))
            if "outcome" in record:
                return from_document(record["outcome"]), stage


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # It is ended by the caller.
        return


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the station and the children it still has; they lead groups of their own."""
    if process.poll() is None:
        process.terminate()
        _wait(process, 2.0)
    kill_group(process.pid)
    process.wait()


@contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """While inside, SIGTERM and SIGINT end the station before they end this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: object) -> None:
        _end(process)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _refused(
    code: int, why: str, *, rank: int, run_dir: str, heard: str, host: str = "", seconds: float = 0.0
) -> Outcome:
    """`heard`: the ticket of a launcher that listens; empty: there is none."""
    outcome = Outcome(
        code=code,
        summary=why,
        nodes_at_fault=(host,) if host and code == CODE_NODE else (),
        ranks=(RankState(rank=rank, host=host, state="fault", detail=why),),
        seconds=round(seconds, 3),
    )
    print(describe(outcome), file=sys.stderr, flush=True)
    publish(outcome, run_dir, speak=bool(heard))
    return outcome
