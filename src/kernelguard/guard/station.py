"""One rank's part in the preflight, in a process of its own: `python station.py DESCRIPTOR`.

The training process waits for what is written to DESCRIPTOR and imports nothing meanwhile. If this process crashes or
hangs, the training process says so and ends; it is never taken along.
"""
# The same few path calls as in the workers, without pathlib.
# ruff: noqa: PTH120, E402

from __future__ import annotations

import os
import sys

_FOLDER = os.path.dirname(os.path.realpath(__file__))
# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == _FOLDER:
    del sys.path[0]
# Last, so that it hides nothing: kernelguard itself, wherever the training process has it from.
sys.path.append(os.path.dirname(os.path.dirname(_FOLDER)))

import json
import signal
import threading
from pathlib import Path
from typing import Any

from kernelguard.guard import attest, attestation
from kernelguard.guard.checks import run_checks
from kernelguard.guard.children import Stopwatch, end_all
from kernelguard.guard.collectives import check_collectives
from kernelguard.guard.fingerprint import Report, read_fingerprint
from kernelguard.guard.meeting import Meeting, MeetingError
from kernelguard.guard.outcome import (
    Outcome,
    RankState,
    describe,
    from_document,
    publish,
    to_document,
    write_json,
)
from kernelguard.guard.ranks import Place, read_place, visible_device
from kernelguard.guard.ticket import (
    CODE_CONFIGURATION,
    CODE_NODE,
    CODE_UNKNOWN,
    VARIABLE,
    Deadlines,
    Ticket,
    load_ticket,
)
from kernelguard.guard.verdict import Arrival, judge

_SLACK_S = 2.0


class Station:
    """What one rank does between its start and the outcome."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._watch = Stopwatch()
        ticket_path = os.environ.get(VARIABLE, "")
        self.ticket: Ticket | None = load_ticket(ticket_path) if ticket_path else None
        self.place: Place = read_place(os.environ)
        self.limits = self.ticket.deadlines if self.ticket is not None else Deadlines()
        self.run_dir = self.ticket.run_dir if self.ticket is not None else ""
        self.report = Report(rank=self.place.rank, host=self.place.host, node=self.place.node)

    def say(self, **record: Any) -> None:
        """One line to the training process."""
        os.write(self._descriptor, (json.dumps(record) + "\n").encode())

    def run(self) -> Outcome:
        """Find out, tell the others, and return what holds for all."""
        looking = threading.Thread(target=self._look, daemon=True)
        looking.start()
        if self.place.world == 1:
            self._finish_looking(looking)
            reports, arrivals = {0: self.report}, {0: Arrival(host=self.place.host, node=self.place.node)}
            return self._judge(arrivals, reports)
        self.say(stage="import torch")
        try:
            import torch.distributed  # noqa: F401
        except ImportError as error:
            return self._alone(CODE_CONFIGURATION, f"torch cannot be imported: {error}")
        self.say(stage="meet the other ranks")
        try:
            meeting = Meeting(self.place, limit_s=self.limits.rendezvous_s)
            meeting.put(f"arrived/{self.place.rank}", {"host": self.place.host, "node": self.place.node})
            self.report.timings["meet"] = self._watch.seconds
            self._finish_looking(looking)
            self.say(stage="tell the other ranks")
            meeting.put(f"report/{self.place.rank}", self.report.to_document())
            outcome, here, together = self._agree(meeting)
            if together:
                self.say(stage="collectives")
                try:
                    outcome, here = self._together(meeting, outcome)
                except MeetingError as error:
                    # As for a rank that is silent then: every rank had reported, so no node is known to be at fault.
                    whose = "the launcher's agent" if self.place.agent_store else "rank 0"
                    return self._alone(CODE_UNKNOWN, f"collectives: {error}; {whose}, which serves it, has ended")
            self._tell(outcome)
            self.say(stage="leave the other ranks")
            meeting.leave(here, limit_s=self.limits.verdict_s)
        except MeetingError as error:
            host = self.place.host if self.place.hosts_store else self.place.address
            return self._alone(CODE_NODE, str(error), nodes=(host,))
        return outcome

    def _look(self) -> None:
        """Everything that child processes find out about this rank."""
        environ = dict(os.environ)
        if self.ticket is None or self.ticket.device == "cuda":
            environ["CUDA_VISIBLE_DEVICES"] = visible_device(environ, self.place.local_rank)
        watch = Stopwatch()
        try:
            read_fingerprint(self.report, self.ticket, environ, limit_s=self.limits.fingerprint_s)
            self.report.timings["fingerprint"] = watch.seconds
            if self.ticket is not None:
                watch = Stopwatch()
                run_checks(self.report, self.ticket, environ, limit_s=self.limits.probe_s)
                self.report.timings["probes"] = watch.seconds
        except Exception as error:  # noqa: BLE001  # one rank's surprise must not leave the others waiting
            self.report.unknown.append(f"kernelguard failed: {type(error).__name__}: {error}")

    def _finish_looking(self, thread: threading.Thread) -> None:
        self.say(stage="read the fingerprint and run the probes")
        limit = self.limits.fingerprint_s + self.limits.probe_s + _SLACK_S
        thread.join(self._watch.left(limit))
        if thread.is_alive():
            end_all()
            thread.join(_SLACK_S)
        if thread.is_alive():
            self.report = Report(rank=self.place.rank, host=self.place.host, node=self.place.node)
            self.report.unknown.append(f"the fingerprint and the probes were not done within {limit:g} s")
        write_json(Path(self.run_dir or os.devnull) / "ranks" / f"{self.place.rank}.json", self.report.to_document())

    def _agree(self, meeting: Meeting) -> tuple[Outcome, list[int], bool]:
        """The outcome that the first of the ranks to decide has written, and who has reported and will read it.

        The last value: every rank may start as far as it alone is concerned, and collectives are still to be tried.
        """
        if self.place.rank != 0:
            # Rank 0 decides. When it does not, everybody may: the first answer holds.
            patience = self._watch.left(self.limits.alone_s)
            found = meeting.wait_for(["outcome"], limit_s=patience)
            if found:
                return self._read(found["outcome"])
        ranks = range(self.place.world)
        left = self._watch.left(self.limits.rendezvous_s)
        arrived = meeting.wait_for([f"arrived/{rank}" for rank in ranks], limit_s=left)
        arrivals = {
            rank: Arrival(host=str(row.get("host", "?")), node=int(row.get("node", 0)))
            for rank in ranks
            if (row := arrived.get(f"arrived/{rank}")) is not None
        }
        # A rank that came last has as long as this one had.
        left = self.limits.fingerprint_s + self.limits.probe_s + self.limits.verdict_s / 2
        if self.place.rank != 0 or len(arrivals) < self.place.world:
            left = self._watch.left(self.limits.rendezvous_s + left)
        told = meeting.wait_for([f"report/{rank}" for rank in arrivals], limit_s=left)
        reports: dict[int, Report] = {}
        for rank, arrival in arrivals.items():
            document = told.get(f"report/{rank}")
            if document is not None:
                try:
                    reports[rank] = Report.from_document(document)
                except (ValueError, TypeError) as error:
                    reports[rank] = Report(rank=rank, host=arrival.host, node=arrival.node)
                    reports[rank].unknown.append(f"its report makes no sense: {error}")
        judged = self._judge(arrivals, reports)
        # Without a ticket nothing of the training is known, its backend included.
        together = judged.code == 0 and self.ticket is not None and self.limits.collective_s > 0
        meeting.put_first("outcome", {**to_document(judged), "here": sorted(reports), "together": together})
        found = meeting.wait_for(["outcome"], limit_s=self.limits.verdict_s)
        if not found:
            raise MeetingError("the outcome that was written to the store is not there")
        return self._read(found["outcome"])

    def _together(self, meeting: Meeting, go: Outcome) -> tuple[Outcome, list[int]]:
        device = self.ticket.device if self.ticket is not None else "cpu"
        return check_collectives(meeting, self.place, go, device=device, limits=self.limits, since=self._watch)

    def _read(self, document: dict[str, Any]) -> tuple[Outcome, list[int], bool]:
        here = [int(rank) for rank in document.get("here", ())]
        return from_document(document), here, document.get("together") is True

    def _judge(self, arrivals: dict[int, Arrival], reports: dict[int, Report]) -> Outcome:
        return judge(
            self.place.world,
            arrivals,
            reports,
            self.ticket,
            waited_s=self.limits.rendezvous_s,
            seconds=self._watch.seconds,
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", "0") or 0),
        )

    def _alone(self, code: int, why: str, nodes: tuple[str, ...] = ()) -> Outcome:
        """The outcome of a rank that cannot speak with the others."""
        end_all()
        place = self.place
        state = RankState(rank=place.rank, host=place.host, state="fault", detail=why)
        outcome = Outcome(
            code=code,
            summary=f"rank {place.rank} of {place.world} on {place.host}: {why}",
            nodes_at_fault=nodes,
            ranks=(state,),
            seconds=round(self._watch.seconds, 3),
        )
        self._tell(outcome, first=True)
        return outcome

    def _tell(self, outcome: Outcome, *, first: bool = False) -> None:
        """To the files and, once, to a person."""
        here = [state.rank for state in outcome.ranks if state.state not in {"missing", "silent"}]
        if first or self.place.rank == min(here, default=self.place.rank):
            print(describe(outcome), file=sys.stderr, flush=True)
        if outcome.code == 0 and self.ticket is not None and self.place.rank == 0:
            fields = {**self.report.fields, **self.report.hardware}
            document = attest.current(self.ticket, stage="preflight", fields=fields, outcome=outcome)
            attestation.write(document, self.run_dir)
        # Where no disk is shared, each node's supervisor has to hear of it.
        loud = self.ticket is not None and outcome.code != 0 and (first or self.place.local_rank == 0)
        publish(outcome, self.run_dir, speak=loud)


def main(descriptor: int) -> None:
    """Run, hand over the outcome, and leave without waiting for anything."""
    signal.signal(signal.SIGTERM, _stop)
    station = Station(descriptor)
    outcome = station.run()
    if station.place.world == 1:
        station._tell(outcome)  # noqa: SLF001
    station.say(outcome=to_document(outcome))
    sys.stderr.flush()
    end_all()
    # The store's threads may be waiting for somebody who will never come.
    os._exit(0)


def _stop(_number: int, _frame: object) -> None:
    end_all()
    os._exit(143)


if __name__ == "__main__":
    main(int(sys.argv[1]))
