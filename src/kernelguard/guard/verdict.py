"""May the group start? Pure: what the ranks reported in, one outcome for all of them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kernelguard.guard.fingerprint import ABSENT, Report, bound_field
from kernelguard.guard.outcome import Differing, Outcome, RankState, ranks_text
from kernelguard.guard.ticket import CODE_CONFIGURATION, CODE_NODE, CODE_UNKNOWN, Ticket

# Faults that somebody's settings have, on whichever node they show.
_CHOSEN = frozenset({"Triton cache"})
_HARDWARE = frozenset({"GPU", "capability", "driver"})
_NOT_SET = "not set"
# What every rank may have for itself, and nobody wants to read about.
_MOST_NOTES = 12


@dataclass(frozen=True)
class Arrival:
    """A rank that came to the meeting place."""

    host: str
    node: int


def judge(
    world: int,
    arrivals: Mapping[int, Arrival],
    reports: Mapping[int, Report],
    ticket: Ticket | None,
    *,
    waited_s: float,
    seconds: float,
    local_world: int = 0,
) -> Outcome:
    """The outcome of a group of `world` ranks.

    78 beats 75 beats 3: a difference in what is installed stays when a node is replaced, and a definite no says more
    than "could not tell".
    """
    missing = [rank for rank in range(world) if rank not in arrivals]
    silent = [rank for rank in arrivals if rank not in reports]
    differing, software, hardware, causes = _differences(reports, ticket)
    faults, fault_causes = _faults(reports, software)
    causes += fault_causes
    config_ranks = set(software) | {rank for rank, where in faults.items() if where == "configuration"}
    # On another node it would be another GPU; a GPU that no rank has as it should be is the configuration's fault.
    everywhere = bool(hardware) and set(hardware) == set(reports)
    if everywhere:
        config_ranks |= set(hardware)
    node_ranks = {rank for rank, where in faults.items() if where == "node"} | (set() if everywhere else set(hardware))
    unknown = {rank: report.unknown for rank, report in sorted(reports.items()) if report.unknown}
    for rank in missing:
        causes.append(f"rank {rank}{_where(rank, arrivals, local_world)} did not come within {waited_s:g} s")
    for rank in silent:
        causes.append(f"rank {rank} on {arrivals[rank].host} came, and did not report in time: it died or hangs")
    causes += [f"rank {rank}: could not tell: {text}" for rank, texts in unknown.items() for text in texts[:4]]
    if config_ranks:
        code, about = CODE_CONFIGURATION, sorted(config_ranks)
    elif node_ranks or missing or silent:
        code, about = CODE_NODE, sorted({*node_ranks, *missing, *silent})
    elif unknown:
        code, about = CODE_UNKNOWN, sorted(unknown)
    else:
        code, about = 0, []
    return Outcome(
        code=code,
        summary=_summary(code, about, causes, world, ticket),
        nodes_at_fault=_nodes({*node_ranks, *missing, *silent}, arrivals, local_world) if code == CODE_NODE else (),
        differing=tuple(differing),
        ranks=tuple(
            _state(rank, arrivals, reports, software=software, hardware=hardware, faults=faults)
            for rank in range(world)
        ),
        seconds=round(seconds, 3),
        causes=tuple(dict.fromkeys(causes)),
        noted=tuple(_notes(reports, ticket)),
        timings=_slowest(reports.values()),
    )


def _expected(ticket: Ticket | None) -> dict[str, str]:
    """Field -> the value that the verdict was measured with."""
    if ticket is None:
        return {}
    wanted = ticket.expected
    versions = (
        ("python", wanted.python),
        ("torch", wanted.torch),
        ("CUDA of torch", wanted.cuda),
        ("version of triton", wanted.triton),
        ("version of transformers", wanted.transformers),
    )
    found = {name: value for name, value in versions if value}
    if wanted.capability is not None:
        found["capability"] = ".".join(str(n) for n in wanted.capability)
    for name, dist in wanted.distributions.items():
        found[f"version of {name}"] = dist.version
        if dist.record_sha256:
            found[f"RECORD of {name}"] = dist.record_sha256
        for path, digest in dist.binaries.items():
            found[f"binary {path}"] = digest
    for path_ in ticket.fast_paths:
        if path_.training and path_.bound_to:
            found[bound_field(path_.module, path_.symbol)] = f"{path_.mechanism} {path_.bound_to}"
    for name, value in ticket.variables.items():
        found[f"variable {name}"] = value
    return found


def _differences(
    reports: Mapping[int, Report], ticket: Ticket | None
) -> tuple[list[Differing], dict[int, list[str]], dict[int, list[str]], list[str]]:
    """The table; the ranks that deviate by software and by hardware, with the fields; and why."""
    expected = _expected(ticket)
    names: list[str] = []
    for report in reports.values():
        names += [name for name in (*report.hardware, *report.fields) if name not in names]
    table: list[Differing] = []
    software: dict[int, list[str]] = {}
    hardware: dict[int, list[str]] = {}
    causes: list[str] = []
    for name in sorted(names, key=_importance):
        values: dict[str, list[int]] = {}
        for rank, report in sorted(reports.items()):
            value = _value(report, name)
            if value is not None:
                values.setdefault(value, []).append(rank)
        right = _right(name, values, expected)
        if name == "driver":
            values = {v: r for v, r in values.items() if _too_old(v, ticket)}
            right = ""
        if not values or set(values) <= {right}:
            continue
        table.append(
            Differing(
                field=name,
                values={value: tuple(ranks) for value, ranks in values.items()},
                expected=expected.get(name, ""),
            )
        )
        for value, ranks in values.items():
            if value == right:
                continue
            for rank in ranks:
                (hardware if name in _HARDWARE else software).setdefault(rank, []).append(name)
            why = dict.fromkeys(reports[rank].causes.get(name, "") for rank in ranks)
            reason = "; ".join(w for w in why if w)
            if name == "driver" and ticket is not None:
                should = f", at least {_lowest_driver(ticket)} is needed"
            elif name in expected:
                should = f", {right} was verified"
            else:
                should = f", {right} elsewhere" if right else ""
            causes.append(f"{ranks_text(tuple(ranks))}: {name} is {value}{should}" + (f": {reason}" if reason else ""))
    return table, software, hardware, causes


def _lowest_driver(ticket: Ticket | None) -> str:
    """The floor of the CUDA runtime, or the branch of the verdict's driver unless an older one was accepted."""
    if ticket is None:
        return ""
    floor, branch = ticket.expected.driver_floor, ticket.expected.driver.partition(".")[0]
    if not branch or "accept-older-driver-branch" in ticket.admission.overrides or _below(branch, floor):
        return floor
    return branch


def _too_old(driver: str, ticket: Ticket | None) -> bool:
    return _below(driver, _lowest_driver(ticket))


def _below(driver: str, floor: str) -> bool:
    """Whether a driver is older than the lowest that the CUDA runtime works with; `not found` is."""
    if not floor:
        return False
    try:
        return [int(n) for n in driver.split(".")] < [int(n) for n in floor.split(".")]
    except ValueError:
        return True


def _value(report: Report, name: str) -> str | None:
    """A report's value of a field; None where the rank could not tell, which is no difference."""
    found = report.hardware.get(name, report.fields.get(name))
    if found is None and name.startswith(("version of ", "RECORD of ", "binary ")) and report.fields:
        told = not any("inventory" in text for text in report.unknown)
        return ABSENT if told else None
    if found is None and name.startswith("files of "):
        return "as installed"
    return found


def _right(name: str, values: Mapping[str, Sequence[int]], expected: Mapping[str, str]) -> str:
    """The value that a field should have: the verdict's, else the usual one, else the most frequent; of equals none."""
    if name in expected:
        return expected[name]
    if name.startswith("files of "):
        return "as installed"
    if name.startswith("variable ") and _NOT_SET in values:
        return _NOT_SET
    counts = Counter({value: len(ranks) for value, ranks in values.items()}).most_common(2)
    if len(counts) == 2 and counts[0][1] == counts[1][1]:
        return ""
    return counts[0][0] if counts else ""


def _importance(name: str) -> tuple[int, str]:
    """What is bound first, then versions, then the rest."""
    order = ("version of ", "files of ", "RECORD of ", "binary ", "variable ")
    first = 0 if " in modeling_" in name else next((i for i, p in enumerate(order, 2) if name.startswith(p)), 1)
    return first, name


def _faults(reports: Mapping[int, Report], software: Mapping[int, object]) -> tuple[dict[int, str], list[str]]:
    """Rank -> `node` or `configuration`; a fault that other ranks with equal software do not have is the node's."""
    found: dict[int, str] = {}
    causes: list[str] = []
    for rank, report in sorted(reports.items()):
        for name, text in report.faults.items():
            right_elsewhere = any(name in other.passed for other in reports.values() if other is not report)
            on_node = right_elsewhere and rank not in software and name not in _CHOSEN
            where = "node" if on_node else "configuration"
            found[rank] = "configuration" if "configuration" in {where, found.get(rank)} else "node"
            causes.append(f"rank {rank} on {report.host}: {name}: {text}")
    return found, causes


def _nodes(ranks: Iterable[int], arrivals: Mapping[int, Arrival], local_world: int) -> tuple[str, ...]:
    names = []
    for rank in sorted(ranks):
        if rank in arrivals:
            names.append(arrivals[rank].host)
            continue
        node = rank // local_world if local_world else None
        beside = next((a.host for a in arrivals.values() if node is not None and a.node == node), "")
        names.append(beside or (f"node {node}" if node is not None else f"the node of rank {rank}"))
    return tuple(dict.fromkeys(names))


def _where(rank: int, arrivals: Mapping[int, Arrival], local_world: int) -> str:
    names = _nodes([rank], arrivals, local_world)
    return f" ({names[0]})" if names and not names[0].startswith("the node") else ""


def _state(
    rank: int,
    arrivals: Mapping[int, Arrival],
    reports: Mapping[int, Report],
    *,
    software: Mapping[int, list[str]],
    hardware: Mapping[int, list[str]],
    faults: Mapping[int, str],
) -> RankState:
    host = arrivals[rank].host if rank in arrivals else ""
    if rank not in arrivals:
        return RankState(rank=rank, host="", state="missing")
    if rank not in reports:
        return RankState(rank=rank, host=host, state="silent")
    report = reports[rank]
    if rank in faults:
        return RankState(rank=rank, host=host, state="fault", detail="; ".join(report.faults))
    names = software.get(rank, []) + hardware.get(rank, [])
    if names:
        return RankState(rank=rank, host=host, state="differs", detail=", ".join(names))
    if report.unknown:
        return RankState(rank=rank, host=host, state="unknown", detail="; ".join(report.unknown))
    return RankState(rank=rank, host=host, state="ok")


def _summary(code: int, about: Sequence[int], causes: Sequence[str], world: int, ticket: Ticket | None) -> str:
    group = "the one rank is" if world == 1 else f"all {world} ranks are"
    if code == 0:
        return f"{group} {'as verified' if ticket is not None else 'equal'}"
    who = ranks_text(tuple(about))
    first = next((c for c in causes if any(c.startswith((f"rank {r}", "ranks")) for r in about)), "")
    what = {
        CODE_CONFIGURATION: "not as verified" if ticket is not None or world == 1 else "not equal",
        CODE_NODE: "at fault",
        CODE_UNKNOWN: "not known to be right",
    }[code]
    return f"{who} of {world}: {what}" + (f": {first}" if first else "")


def _notes(reports: Mapping[int, Report], ticket: Ticket | None) -> list[str]:
    """Differences that refuse nothing."""
    notes = []
    names = dict.fromkeys(name for r in reports.values() for name in (*r.noted, *(("driver",) if r.hardware else ())))
    for name in names:
        values: dict[str, list[int]] = {}
        for rank, report in sorted(reports.items()):
            values.setdefault(report.noted.get(name, report.hardware.get(name, ABSENT)), []).append(rank)
        if len(values) > 1:
            said = ", ".join(f"{value} on {ranks_text(tuple(ranks))}" for value, ranks in values.items())
            notes.append(f"{name} differs: {said}")
        elif name.startswith("file "):
            notes.append(f"{name[5:]} is {next(iter(values))}: the last one installed wins")
    if ticket is not None:
        slow = [path.symbol for path in ticket.fast_paths if path.training and path.mechanism == "torch"]
        notes += [f"{symbol} runs as PyTorch code, and was admitted so" for symbol in slow]
    if len(notes) > _MOST_NOTES:
        notes = [*notes[:_MOST_NOTES], f"and {len(notes) - _MOST_NOTES} more differences that refuse nothing"]
    return notes


def _slowest(reports: Iterable[Report]) -> dict[str, float]:
    found: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.timings.items():
            found[name] = max(found.get(name, 0.0), round(float(seconds), 3))
    return found
