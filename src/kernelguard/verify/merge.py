"""What do two measurements of one kernel under the same fingerprint say together?

Measuring every configuration can take longer than one sitting allows. A later one goes on where it ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kernelguard.verify.configurations import GRAVITY
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Configuration, Fingerprint, Outcome, ProbeResult, Verdict


def earlier_of(verdict: Verdict | None, request: ProbeRequest, now: Fingerprint) -> ProbeResult | None:
    """What an earlier verdict measured of this kernel at these shapes; None: nothing that still holds."""
    if verdict is None or not same_ground(verdict.fingerprint, now):
        return None
    shapes = [dict(case.shape) for case in request.cases]
    for probe in verdict.probes:
        same = (probe.package, probe.symbol, probe.op, probe.dtype) == (
            request.package,
            request.symbol,
            request.op,
            request.dtype,
        )
        if same and any(dict(case.shape) in shapes for case in probe.cases):
            return probe
    return None


def same_ground(a: Fingerprint, b: Fingerprint) -> bool:
    """Equal in everything but which kernels and shapes were probed, and what older versions did not record."""
    records = a.records == b.records or not a.records or not b.records
    return records and _ground(a) == _ground(b)


def _ground(fingerprint: Fingerprint) -> Fingerprint:
    return replace(fingerprint, shapes="", model_type="", records={}, variables={})


def merged(earlier: ProbeResult | None, later: ProbeResult) -> ProbeResult:
    """Both together: the later one's cases, the earlier one's others, and the worst of each configuration.

    What is wrong in either stays wrong. An earlier measurement cannot make up for a later one that failed.
    """
    if earlier is None or later.outcome not in {Outcome.RIGHT, Outcome.NO_BACKWARD}:
        return later
    names = {case.name for case in later.cases}
    kept = tuple(case for case in earlier.cases if case.name not in names)
    configurations = tuple(_both(earlier.configurations, later.configurations))
    bad = earlier if earlier.outcome in {Outcome.WRONG, Outcome.CRASHED} else later
    return replace(
        later,
        outcome=bad.outcome,
        reason=bad.reason,
        cases=(*later.cases, *kept),
        configurations=configurations,
        seconds=earlier.seconds + later.seconds,
    )


def _both(earlier: Sequence[Configuration], later: Sequence[Configuration]) -> Iterable[Configuration]:
    known = {(c.kernel, c.key, c.config): c for c in earlier}
    for one in later:
        place = (one.kernel, one.key, one.config)
        before = known.get(place)
        if before is None or GRAVITY[one.state] >= GRAVITY[before.state]:
            known[place] = one
        else:
            known[place] = replace(before, picked=one.picked)
    return known.values()
