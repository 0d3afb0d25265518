"""Is the model that trains the one that was admitted? Looked at when it is built and after step 1, then never again.

Hooks wait for the first forward of a model in training, whatever starts it: a Trainer, TRL, axolotl, a plain loop. The
live model is read, its first batch is looked at, the first step is traced and its kernels' calls are counted; after the
first optimizer step everything is read once more and every hook is taken away.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from kernelguard.guard import attest, attestation, live_functions, steptrace
from kernelguard.guard.expectation import Expectation, Finding, expectation
from kernelguard.guard.eyes import Eyes, Hooks
from kernelguard.guard.first_call import FirstCall
from kernelguard.guard.live_model import LiveModel
from kernelguard.guard.outcome import Outcome, RankState, describe, publish, write_json
from kernelguard.guard.ranks import PlaceError, read_place
from kernelguard.guard.shards import ShardWatch
from kernelguard.guard.ticket import CODE_CONFIGURATION, CODE_UNKNOWN, VARIABLE, Ticket, load_ticket

_LOG = logging.getLogger("kernelguard")
# A step of so many micro-batches without an optimizer that torch knows is over all the same.
_MOST_FORWARDS = 512


class Refused(SystemExit):
    """This run must not go on; `code` is 78 or 3, `findings` say why."""

    def __init__(self, code: int, findings: tuple[Finding, ...]) -> None:
        super().__init__(code)
        self.findings = findings

    def __str__(self) -> str:
        return "; ".join(f.what for f in self.findings)


_active: list[Watch] = []


class Watch:
    """One training run, from before its model is there until after its first step."""

    def __init__(self, ticket: Ticket | None, *, on_refusal: str = "exit") -> None:
        self.expected: Expectation = expectation(ticket)
        self.ticket = ticket
        self.findings: list[Finding] = []
        self.state = "waiting"
        """`waiting`, `first-step`, `done`."""
        self._on_refusal = on_refusal
        self._hooks = Hooks()
        self._step_hooks = Hooks()
        self._optimizer: Any = None
        self.live: LiveModel | None = None
        self._eyes = Eyes()
        self._recorder = steptrace.Recorder()
        self._counter: steptrace.CallCounter | None = None
        self._shards = ShardWatch(self._got_a_shard)
        self._trace: steptrace.StepTrace | None = None
        self._forwards = 0
        self._compiled = False
        self._wanted: Any = None
        self._first_call = FirstCall(self._is_training, self._first)

    # --- when -----------------------------------------------------------------------------------------------------

    def wait_for_any_model(self) -> None:
        """Start with the first model that trains in this process. torch has been imported."""
        self._take_over()
        self._first_call.open()

    def wait_for(self, model: Any, optimizer: Any = None) -> None:
        """Start with the first call of this model, whatever it is wrapped in by then."""
        self._wanted, self._optimizer = model, optimizer
        self.wait_for_any_model()

    def _wait_for_the_step(self) -> None:
        """The end of step 1 is the first step of the given optimizer, or of any."""
        if self._optimizer is not None and hasattr(self._optimizer, "register_step_post_hook"):
            self._step_hooks.add(self._optimizer.register_step_pre_hook(self._before_step))
            self._step_hooks.add(self._optimizer.register_step_post_hook(self._stepped))
            return
        from torch.optim import optimizer

        self._step_hooks.add(optimizer.register_optimizer_step_pre_hook(self._before_step))
        self._step_hooks.add(optimizer.register_optimizer_step_post_hook(self._stepped))

    def _take_over(self) -> None:
        """Of several guards in one process (a wrapper's and a callback's) the last one looks."""
        for other in _active:
            if other.state != "done":
                other.close()
        _active[:] = [self]

    def _is_training(self, module: Any) -> bool:
        if self._wanted is not None:
            return any(part is self._wanted for part in module.modules())
        known = {path.module for path in self.expected.paths}
        ours = any(
            type(part).__module__ in known or any(base.__name__ == "PreTrainedModel" for base in type(part).__mro__)
            for part in module.modules()
        )
        return ours and any(parameter.requires_grad for parameter in module.parameters())

    def _first(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Any) -> Any:
        """The first call of the model in training."""
        self.state = "first-step"
        self._wait_for_the_step()
        self._guarded(lambda: self._begin(model, args, kwargs))
        try:
            output = call(model, *args, **kwargs)
        except RuntimeError as error:
            self._shards.explain(error)
            raise
        if self.state == "first-step":
            # The batch has gone through every layer: a leak is told before anything is learned from it.
            self._guarded(self._judge_batch)
        return output

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is built, and its first step begins."""
        self.live = live = LiveModel(model, self.expected)
        self._compiled = live_functions.is_compiled(model)
        # A profiler that still records when the interpreter ends takes the process with it.
        atexit.register(self.close)
        self._add(live.read(), "when the model was built")
        self._end_if_refused()
        self._eyes.saw_the_call(args, kwargs, live_functions.owners_of(model, live.bound), whole=self._compiled)
        if not self._compiled:
            self._eyes.look(model, live.bound, self._hooks)
            self._counter = steptrace.CallCounter(live.bound)
            self._shards.look(model)
        self._record()

    def _record(self) -> None:
        problem = self._recorder.start()
        self._trace = steptrace.StepTrace(problem=problem) if problem else None

    def _judge_batch(self) -> None:
        if self.live is None:
            return
        self._add(self.live.judge_batch(self._eyes.seen), "in the first batch")
        self._eyes = Eyes()
        self._end_if_refused()
        self._hooks.remove()
        if not self._compiled:
            self._hooks.add(self.live.model.register_forward_pre_hook(self._next_forward))

    def _next_forward(self, _module: Any, _args: Any) -> None:
        """Another micro-batch of the first step: one is enough to trace."""
        self._forwards += 1
        self._stop_recording()
        if self._forwards >= _MOST_FORWARDS:
            self._guarded(self._end_of_step)

    def _next_step_begins(self, _module: Any, _args: Any) -> None:
        """Nothing of the guard is left when step 2 begins."""
        self.close()

    def _before_step(self, *_arguments: Any) -> None:
        if self.state == "first-step":
            self._stop_recording()

    def _stop_recording(self) -> None:
        if self._recorder.running:
            self._guarded(self._take_trace)

    def _take_trace(self) -> None:
        self._trace = self._recorder.stop()

    def _stepped(self, *_arguments: Any) -> None:
        # A discriminator or a probe may step before the model that is watched has had its backward.
        if self.state == "first-step" and (self._trace is not None or self._recorder.running):
            self._stop_recording()
            self._guarded(self._end_of_step)

    def end_of_step(self) -> None:
        """The first step is over, whoever says so."""
        self._stop_recording()
        self._guarded(self._end_of_step)

    def _end_of_step(self) -> None:
        """The first step is over: judge it, read everything again, and go away."""
        self._let_go()
        counts = self._counter.counts if self._counter is not None else {}
        self._add(steptrace.judge_trace(self._trace or steptrace.StepTrace(), counts, self.expected), "in step 1")
        if self.live is not None:
            self._add(self.live.read_again(), "after step 1")
            self._write()
            if self.ticket is not None:
                self._add(self.live.unlike_others(Path(self.ticket.run_dir) / "ranks"), "after step 1")
            self.live.model = None
        self._end_if_refused()
        if attest.is_first():
            print(self.summary(), file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take every hook away and put every kernel back."""
        self._let_go()
        self._hooks.remove()
        self._step_hooks.remove()
        atexit.unregister(self.close)

    def _let_go(self) -> None:
        """The same, but for the optimizer's hooks: one of them may be running, and its list must not change now.

        The next forward takes them away; a compiled model's forward must meet no hook, so two that do nothing stay.
        """
        self.state = "done"
        self._first_call.close()
        self._hooks.remove()
        self._shards.restore()
        if self.live is not None and self.live.model is not None and not self._compiled:
            self._hooks.add(self.live.model.register_forward_pre_hook(self._next_step_begins))
        if self._counter is not None:
            self._counter.restore()
        if self._recorder.running:
            self._trace = self._recorder.stop()

    def _got_a_shard(self, finding: Finding) -> None:
        """A function that is running now was given a part of a weight."""
        self._add([finding], "in step 1")
        self._end_if_refused()

    # --- and then -------------------------------------------------------------------------------------------------

    def _add(self, findings: Iterable[Finding], when: str) -> None:
        for finding in findings:
            if not any(f.row == finding.row and f.what.startswith(finding.what) for f in self.findings):
                self.findings.append(Finding(finding.row, finding.status, f"{finding.what} ({when})", finding.fix))

    def _guarded(self, action: Callable[[], None]) -> None:
        """A surprise in here must not look like one of the training's own, and is no pass either."""
        try:
            action()
        except Refused:
            raise
        except Exception as error:  # noqa: BLE001  # reported word for word, as "cannot tell"
            _LOG.exception("kernelguard could not look at the model")
            self.findings.append(
                Finding("cannot-read", "unknown", f"kernelguard failed: {type(error).__name__}: {error}")
            )
            self.close()
            self._write()
            self._end_if_refused()

    def refused(self) -> int:
        """The exit code that the findings come to."""
        statuses = {finding.status for finding in self.findings}
        if "fail" in statuses:
            return CODE_CONFIGURATION
        # Without a ticket nobody has promised anything: what cannot be told is said, and the run goes on.
        return CODE_UNKNOWN if "unknown" in statuses and self.expected.ticketed else 0

    def _end_if_refused(self) -> None:
        code = self.refused()
        if not code:
            return
        self.close()
        findings = tuple(f for f in self.findings if f.status != "warn")
        if self._on_refusal == "raise":
            raise Refused(code, findings)
        self._publish(code, findings)
        sys.stdout.flush()
        # Not an exception: another rank waits in a collective, and this one's own threads may never end.
        os._exit(code)

    def _publish(self, code: int, findings: tuple[Finding, ...]) -> None:
        try:
            place = read_place(os.environ)
            rank, host = place.rank, place.host
        except PlaceError:
            rank, host = 0, ""
        fixes = tuple(f"{f.what}. {f.fix}" if f.fix else f.what for f in findings)
        outcome = Outcome(
            code=code,
            summary=f"rank {rank}: {findings[0].what}",
            ranks=(RankState(rank=rank, host=host, state="drifted", detail=", ".join(f.row for f in findings)),),
            phase="training",
            causes=fixes,
        )
        print(describe(outcome), file=sys.stderr, flush=True)
        publish(outcome, self.ticket.run_dir if self.ticket is not None else "", speak=self.ticket is not None)

    def document(self) -> dict[str, Any]:
        """What was found, for the run's files."""
        bound = self.live.bound if self.live is not None else ()
        return {
            "schema": 1,
            "state": self.state,
            "findings": [{"row": f.row, "status": f.status, "what": f.what, "fix": f.fix} for f in self.findings],
            "bound": {f"{e.module}.{e.symbol}": e.value for e in bound},
            "hub": self.live.hub if self.live is not None else {},
            "chosen": self.live.chosen() if self.live is not None else {},
            "kernels": dict(self._trace.kernels) if self._trace is not None else {},
        }

    def _write(self) -> None:
        if self.ticket is None:
            return
        path = Path(self.ticket.run_dir) / "ranks" / f"{os.environ.get('RANK', '0')}.training.json"
        problems = [write_json(path, self.document())]
        if attest.is_first() and not self.refused():
            bound = self.live.named() if self.live is not None else {}
            document = attest.current(self.ticket, stage="step 1", bound=bound, kernels=self._launched())
            problems.append(attestation.write(document, self.ticket.run_dir))
        for problem in filter(None, problems):
            _LOG.warning("%s", problem)

    def _launched(self) -> dict[str, tuple[str, ...]]:
        """Kernels of step 1 by the fast path that they were promised for."""
        seen = {steptrace.base_name(name) for name in self._trace.kernels} if self._trace is not None else set()
        return {symbol: tuple(sorted(seen.intersection(names))) for symbol, names in self.expected.kernels.items()}

    def summary(self) -> str:
        """One line and what to know, for a person."""
        entries = self.live.bound if self.live is not None else ()
        bound = ", ".join(f"{e.symbol}: {e.mechanism}" for e in entries) or "no kernels declared"
        claim = "the model is as it was admitted" if self.expected.ticketed else "nothing is wrong with the model"
        if any(f.status == "unknown" for f in self.findings):
            claim = "not everything about the model could be told"
        lines = [f"kernelguard: after step 1 {claim} ({bound})"]
        lines += [f"  note: {f.what}" for f in self.findings]
        return "\n".join(lines)


def current_ticket() -> Ticket | None:
    """The ticket of the launcher that started this process, if one did.

    Raises:
        TicketError: it cannot be used.
    """
    path = os.environ.get(VARIABLE, "")
    return load_ticket(path) if path else None
