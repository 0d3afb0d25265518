"""Do the ranks reach each other as training will? A second agreement, after each rank alone may start.

It comes after the first agreement and not before the ranks report: a collective waits for everybody, so it is begun
only once every rank is known to be there with probes that are right. A fault that one rank has by itself is then named
as before, without a collective that hangs beside it. Each rank runs one worker with a deadline and tells the others
what it found through the key-value store, so a hang ends, and the rank that did not come has a name.

The workers meet in a store of their own, at a free port of rank 0's station: it outlives every worker, rank 0's too.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from kernelguard.guard.children import Stopwatch, run_worker
from kernelguard.guard.collective_verdict import Finding, judge_collectives, read_finding
from kernelguard.guard.meeting import Meeting, MeetingError
from kernelguard.guard.outcome import Outcome, from_document, to_document
from kernelguard.guard.ranks import Place
from kernelguard.guard.ticket import Deadlines

_WHERE = "collectives/store"
_OUTCOME = "collectives/outcome"


def check_collectives(
    meeting: Meeting, place: Place, go: Outcome, *, device: str, limits: Deadlines, since: Stopwatch
) -> tuple[Outcome, list[int]]:
    """The outcome that holds for all ranks, and those that have reported and will read it.

    `go` is the first agreement's outcome, the same in all ranks; `since` counts from the start of the preflight.

    Raises:
        MeetingError: the store in which the ranks agree is gone.
    """
    watch = Stopwatch()
    # Held until the others have reported: it ends with this object.
    store, where = _serve(place, limits.collective_s) if place.rank == 0 else (None, {})
    if place.rank == 0:
        meeting.put(_WHERE, where)
    else:
        where = meeting.wait_for([_WHERE], limit_s=watch.left(limits.collective_s / 2)).get(_WHERE, {})
    finding = _run(place, where, device=device, watch=watch, limit_s=limits.collective_s)
    meeting.put(f"collectives/{place.rank}", finding.to_document())
    if place.rank != 0:
        # As for the first outcome: rank 0 decides, and when it does not, everybody may.
        found = meeting.wait_for([_OUTCOME], limit_s=watch.left(limits.collective_s + limits.verdict_s))
        if found:
            return _read(found[_OUTCOME])
    keys = {f"collectives/{rank}": rank for rank in range(place.world)}
    told = meeting.wait_for(keys, limit_s=watch.left(limits.collective_s + limits.verdict_s / 2))
    del store
    findings = {keys[key]: Finding.from_document(row, rank=keys[key]) for key, row in told.items()}
    outcome = judge_collectives(go, findings, seconds=since.seconds)
    meeting.put_first(_OUTCOME, {**to_document(outcome), "here": sorted(findings)})
    found = meeting.wait_for([_OUTCOME], limit_s=limits.verdict_s)
    if not found:
        raise MeetingError("the outcome of the collectives that was written to the store is not there")
    return _read(found[_OUTCOME])


def _read(document: Mapping[str, Any]) -> tuple[Outcome, list[int]]:
    return from_document(document), [int(rank) for rank in document.get("here", ())]


def _run(place: Place, where: Mapping[str, Any], *, device: str, watch: Stopwatch, limit_s: float) -> Finding:
    if not where.get("port"):
        problem = where.get("problem") or "rank 0 did not say where"
        return Finding(rank=place.rank, state="failed", text=f"store: {problem}", step="store", first=place.rank == 0)
    left = watch.left(limit_s)
    request = {
        "rank": place.rank,
        "world": place.world,
        "local_rank": place.local_rank,
        "host": where["host"],
        "port": where["port"],
        "device": device,
        # It says by itself whom it waited for; one that cannot even do that is ended.
        "budget_s": left * 0.8,
    }
    # With the variables that the training finds, NCCL's and CUDA_VISIBLE_DEVICES among them.
    result = run_worker("collective", request, timeout=left)
    return read_finding(place.rank, result, took_s=watch.seconds)


def _serve(place: Place, limit_s: float) -> tuple[Any, dict[str, Any]]:
    """A store at a free port, and where the others find it."""
    import torch.distributed as dist

    patience = timedelta(seconds=limit_s)
    try:
        store = dist.TCPStore("localhost", 0, None, True, patience, wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        return None, {"problem": f"it cannot be opened on {place.host}: {(str(error).splitlines() or [''])[0][:300]}"}
    return store, {"host": _own_address(place), "port": store.port}


def _own_address(place: Place) -> str:
    """An address at which the other ranks reach rank 0.

    MASTER_ADDR is rank 0's where rank 0 serves the store. Under torchrun it may be another node's; then it is the
    address from which this node reaches that one.
    """
    if place.hosts_store:
        return place.address
    try:
        found = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # Connecting a datagram socket sends nothing; it only chooses the route.
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return place.address
    # A machine's own name may lead to its loopback, which others cannot reach: they know it by that name.
    return place.address if own.startswith("127.") or own == "::1" else own
