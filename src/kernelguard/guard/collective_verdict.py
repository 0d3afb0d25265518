"""What do the ranks' collectives say about the group? Pure: what each rank found in, one outcome for all of them out.

A collective that is wrong, fails or does not end is "could not tell" (3), never 78 and never 75. There is no second
group to compare with: a wrong sum can come from any rank, any link between them or NCCL itself, so no node is named as
at fault. The rank that showed it, or did not come, is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kernelguard.guard.children import ChildResult
from kernelguard.guard.outcome import Outcome, RankState, ranks_text
from kernelguard.guard.ticket import CODE_UNKNOWN

STATES = frozenset({"right", "wrong", "failed", "late", "ended"})
STEPS = ("all-reduce", "all-gather", "reduce-scatter", "large all-reduce")
# What a rank does before the others can see it.
_ALONE = frozenset({"", "import torch", "device", "store"})


@dataclass(frozen=True)
class Finding:
    """What one rank says of its collectives."""

    rank: int
    state: str
    """`right`, `wrong`, `failed` (an exception), `late` (its time was up), `ended` (it died or had to be ended)."""
    text: str = ""
    step: str = ""
    behind: tuple[int, ...] = ()
    """Ranks that had not come as far as this one when its time was up."""
    first: bool = False
    """No rank had failed before this one."""
    backend: str = ""
    bytes: int = 0
    seconds: float = 0.0
    """The median all-reduce of so many bytes."""
    took_s: float = 0.0
    """Everything, the worker's start included."""

    def to_document(self) -> dict[str, Any]:
        """As JSON values."""
        return {**asdict(self), "behind": list(self.behind)}

    @classmethod
    def from_document(cls, document: Mapping[str, Any], *, rank: int) -> Finding:
        """What a rank wrote to the store; what makes no sense is no answer of that rank."""
        try:
            numbers = {"took_s": float(document["took_s"]), "behind": tuple(int(r) for r in document["behind"])}
            found = cls(**{**document, **numbers, "rank": rank})
            if found.state == "right":
                _bus_gb_per_s(2, found.bytes, found.seconds)
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            return cls(rank=rank, state="ended", text=f"left a report that makes no sense: {error}")
        if found.state not in STATES:
            return cls(rank=rank, state="ended", text=f"left a report that makes no sense: state {found.state!r}")
        return found


def read_finding(rank: int, result: ChildResult, *, took_s: float = 0.0) -> Finding:
    """What a run of `workers/collective.py` found; a result that cannot be read is `ended`."""
    try:
        return replace(_read(rank, result), took_s=round(took_s, 3))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Finding(rank=rank, state="ended", text=f"left a result that makes no sense: {error}")


def _read(rank: int, result: ChildResult) -> Finding:
    step = result.died_at
    if result.unreadable:
        return Finding(rank=rank, state="ended", text=result.ending(), step=step)
    checks = {str(r["step"]): r for r in result.of_kind("check")}
    wrong = "; ".join(_wrong(name, row) for name, row in checks.items() if row["wrong"])
    if wrong:
        return Finding(rank=rank, state="wrong", text=wrong, step=step)
    late = next(result.of_kind("late"), None)
    if late is not None:
        behind = tuple(int(r) for r in late["behind"])
        return Finding(rank=rank, state="late", text=f"{late['limit_s']:.0f} s", step=step, behind=behind)
    error = next(result.of_kind("error"), None)
    if error is not None:
        text = f"{error['where']}: {error['type']}: {last_said(str(error['text']))}"
        return Finding(rank=rank, state="failed", text=text, step=str(error["where"]), first=error.get("first") is True)
    _, ended_by, last = result.output.partition("what():")
    if result.signal == "SIGABRT" and ended_by:
        # Torch ends a process like this when NCCL fails, also where it was another rank that died.
        return Finding(rank=rank, state="failed", text=f"{step}: {last_said(last)}", step=step)
    if not result.finished:
        return Finding(rank=rank, state="ended", text=result.ending(), step=step)
    group, measured = next(result.of_kind("group"), None), next(result.of_kind("bandwidth"), None)
    left_out = [name for name in STEPS if name not in checks]
    if group is None or measured is None or left_out:
        return Finding(rank=rank, state="ended", text=f"did not measure {', '.join(left_out) or 'the bandwidth'}")
    return Finding(
        rank=rank,
        state="right",
        backend=str(group["backend"]),
        bytes=int(measured["bytes"]),
        seconds=float(measured["seconds"]),
    )


def _wrong(name: str, row: Mapping[str, Any]) -> str:
    parts = tuple(int(part) for part in row.get("parts", ()))
    return f"{name}: {row['wrong']}" + (f", in the part of {ranks_text(parts)}" if parts else "")


def last_said(text: str) -> str:
    """The line of an exception's message that says most: NCCL's own last error, else the first line."""
    lines = [line.strip() for line in text.partition("Exception raised from")[0].splitlines() if line.strip()]
    if not lines:
        return "(no message)"
    if any("nccl" in line.lower() for line in lines):
        lines = [line for line in lines if line.lower() != "last error:"]
        return lines[-1][:300]
    return lines[0][:300]


def judge_collectives(go: Outcome, findings: Mapping[int, Finding], *, seconds: float) -> Outcome:
    """The outcome of a group that may start as far as each rank alone is concerned."""
    world = len(go.ranks)
    causes, about = _causes(findings, {state.rank: state.host for state in go.ranks})
    took = max((finding.took_s for finding in findings.values()), default=0.0)
    changed = replace(go, seconds=round(seconds, 3), timings={**go.timings, "collectives": took})
    if not causes:
        collectives = _measured(findings, world)
        return replace(changed, collectives=collectives, noted=(*go.noted, *_notes(collectives)))
    states = (_state(state, findings, about) for state in go.ranks)
    summary = f"{ranks_text(tuple(sorted(about)))} of {world}: not known to be right: collectives: {causes[0]}"
    return replace(changed, code=CODE_UNKNOWN, summary=summary, causes=tuple(causes), ranks=tuple(states))


def _causes(findings: Mapping[int, Finding], hosts: Mapping[int, str]) -> tuple[list[str], dict[int, str]]:
    """Why not, the surest first; and the ranks that it is about, with a word on each."""
    causes: list[str] = []
    about: dict[int, str] = {}

    def name(rank: int) -> str:
        return f"rank {rank} on {hosts.get(rank, '?')}"

    def add(ranks: Iterable[int], cause: str, detail: str) -> None:
        causes.append(cause)
        about.update({rank: detail for rank in ranks if rank not in about})

    def of(state: str) -> list[Finding]:
        return [finding for _, finding in sorted(findings.items()) if finding.state == state]

    for found in of("wrong"):
        add([found.rank], f"{name(found.rank)} got wrong numbers: {found.text}", "wrong numbers")
    if causes:
        causes.append("which rank, link or library made them cannot be told from here")
    for rank in hosts:
        if rank not in findings:
            add([rank], f"{name(rank)} did not report in time: it died or hangs", "silent")
    for found in of("ended"):
        add([found.rank], f"{name(found.rank)} {found.text}", "ended")
    for found in sorted(of("failed"), key=lambda found: not found.first):
        add([found.rank], f"{name(found.rank)} failed at {found.text}", "failed")
    late = of("late")
    for found in late:
        if found.step in _ALONE:
            add([found.rank], f"{name(found.rank)} was still at '{found.step or 'start'}' after {found.text}", "late")
    waited: dict[tuple[int, str, str], list[int]] = {}
    for found in late:
        for rank in found.behind:
            if rank not in about:
                waited.setdefault((rank, found.step, found.text), []).append(found.rank)
    for (rank, step, limit), waiting in waited.items():
        cause = (
            f"{name(rank)} did not get as far as '{step}' in {limit}, where {ranks_text(tuple(waiting))} waited for it"
        )
        add([rank], cause, "late")
    if late and not causes:
        for step, limit in dict.fromkeys((found.step, found.text) for found in late):
            ranks = tuple(found.rank for found in late if found.step == step)
            add(ranks, f"all came to '{step}', and {ranks_text(ranks)} did not get through it in {limit}", "late")
    return list(dict.fromkeys(causes)), about


def _state(state: RankState, findings: Mapping[int, Finding], about: Mapping[int, str]) -> RankState:
    if state.rank not in findings:
        return replace(state, state="silent")
    if state.rank in about:
        return replace(state, state="unknown", detail=f"collectives: {about[state.rank]}")
    return state


def _measured(findings: Mapping[int, Finding], world: int) -> dict[str, Any]:
    rates = [_bus_gb_per_s(world, found.bytes, found.seconds) for found in findings.values()]
    first = next(iter(findings.values()))
    return {
        "world_size": world,
        "backend": first.backend,
        "bytes": first.bytes,
        "seconds": round(max(found.seconds for found in findings.values()), 6),
        "bus_gb_per_s": {"slowest": round(min(rates), 3), "fastest": round(max(rates), 3)},
    }


def _bus_gb_per_s(world: int, size: int, seconds: float) -> float:
    """What each link carried, whatever the number of ranks, if the all-reduce was a ring."""
    return size * 2 * (world - 1) / world / seconds / 1e9


def _notes(collectives: Mapping[str, Any]) -> list[str]:
    """What is slow depends on the machine, so the figure is said and refuses nothing; on a CPU it says nothing."""
    if collectives["backend"] != "nccl":
        return []
    rates = collectives["bus_gb_per_s"]
    size = f"{collectives['bytes'] / 2**20:g} MiB"
    measured = f"{rates['slowest']:.1f} GB/s in the slowest rank, {rates['fastest']:.1f} in the fastest"
    return [f"an all-reduce of {size} over {collectives['world_size']} ranks has a bus bandwidth of {measured}"]
