"""What does all that a source holds come to? One answer for each part of a page; the worst one is the headline's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from kernelguard import data
from kernelguard.judge.rules import load_rules
from kernelguard.judge.values import Finding, Status, worst
from kernelguard.trace.names import load_names
from kernelguard.verify.findings import findings, numbers
from kernelguard.verify.values import Verdict

PACKING = frozenset(
    {
        "signal-not-sent", "signals-unknown", "boundary-never-passed", "boundary-argument-lost", "packing-unsupported",
        "packing-on-fallback", "packing-unknown", "attention-signal-not-sent", "attention-mask-lost-to-cache",
        "attention-boundary-never-passed", "attention-mask-not-read",
    }
)  # fmt: skip
"""Findings about what packed samples see of each other: another question than whether the kernel runs."""
_BYTES = frozenset({"wrong-cuda", "wrong-torch", "wrong-machine", "glibc-too-old", "libstdcxx-too-old", "no-gpu-code"})
_NO_GPU = frozenset({"no-gpu", "gpu-hidden", "cpu-torch", "cpu-torch-on-gpu-machine", "gpu-broken", "gpu-unknown"})
_MEASURED = {
    "wrong-result": ("computes the wrong thing", "compute the wrong thing"),
    "wrong-configuration": (
        "computes the wrong thing with a configuration that may be picked",
        "compute the wrong thing with a configuration that may be picked",
    ),
    "kernel-crashes": ("crashes", "crash"),
    "kernel-raises": ("raises an error", "raise an error"),
    "kernel-did-not-run": ("did not run in a training step", "did not run in a training step"),
    "numbers": ("is not right, as the file says", "are not right, as the file says"),
}
"""What a measurement says of a kernel, of one and of several."""
_UNTOLD = {
    "could-not-verify-hung": "did not end in time",
    "could-not-verify-out-of-memory": "ran out of memory",
    "could-not-verify-no-driver": "found no usable GPU",
    "could-not-verify-unreachable": "could not be loaded from the hub",
    "could-not-verify-unreadable": "ended without a result",
    "could-not-verify-reference": "had nothing to be compared with",
    "could-not-verify-no-probe": "cannot be measured by kernelguard",
    "could-not-interpret": "could not be run without a GPU",
    "loads": "was imported and not run",
}
_PARTLY = frozenset({"configurations-not-measured", "verify-problem", "kernel-names-unknown", "numbers"})
"""What leaves a right result right, and not whole."""
_YES = {
    "resolve": "Kernels exist for every fast path of this model here",
    "import": "The model is bound to its fused kernels",
    "interpreted": "The model is bound to its fused kernels, and they ran in an interpreter",
    "gpu": "The model runs on its fused kernels, and they compute the right thing",
}
"""By the level that was reached: no level claims what only the next one shows."""
_BELOW = {
    "resolve": "Nothing was run: what the kernels compute was not measured",
    "import": "The kernels can be imported; what they compute was not measured",
    "interpreted": "The kernels ran in an interpreter; what they compute on a GPU was not measured",
}
_SEEN = frozenset({"right", "no-backward"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one part of a page comes to."""

    about: str
    """`check`, `verdict`, `trace`, `launch`."""
    status: Status
    headline: str
    lead: str = ""


def worst_answer(answers: Sequence[Answer]) -> Answer | None:
    """The one that decides; of equal ones the first. None: there is none."""
    decides = worst(answer.status for answer in answers)
    return next((answer for answer in answers if answer.status is decides), None)


# --- a check ---------------------------------------------------------------------------------------------------------


def check_answer(check: Mapping[str, Any]) -> Answer:
    """What a check says."""
    told = list(_told(check))
    status = worst([Status(check["status"]), *(finding.status for finding in told)])
    return Answer(about="check", status=status, headline=_check_headline(check, status, told), lead=_check_lead(check))


def _check_headline(check: Mapping[str, Any], status: Status, told: Sequence[Finding]) -> str:
    if status is Status.FAIL:
        return _no(told) if _failed(told) else "No: this run would not be on its fused kernels"
    if status is Status.UNKNOWN:
        return "It cannot be told yet"
    if not check["fast_paths"]:
        return "This run needs no fused kernel that transformers would fall back from"
    more = ", with something to know" if status is Status.WARN else ""
    return f"Yes: {_YES[check['reached']][:1].lower()}{_YES[check['reached']][1:]}{more}"


def _check_lead(check: Mapping[str, Any]) -> str:
    counts = Counter(path["status"] for path in check["fast_paths"])
    said = ", ".join(f"{counts[word]} {word}" for word in ("fail", "unknown", "warn", "pass") if counts[word])
    level, reached = check["level"], check["reached"]
    levels = f"level {level} was asked for, {reached} was reached" if level != reached else f"level {level}"
    total = len(check["fast_paths"])
    paths = f"{total} fast path{'s' if total != 1 else ''}" + (f" ({said})" if said else "")
    return f"{check['model']['model_type']}: {paths}; {levels}; exit\u00a0{check['exit_code']}."


def kernel_status(check: Mapping[str, Any], path: Mapping[str, Any]) -> str:
    """The answer for a fast path's kernel alone, whatever packed samples see of each other."""
    own = [row for row in check["findings"] if row["fast_path"] == path["symbol"]]
    if not any(row["code"] in PACKING for row in own):
        return str(path["status"])
    rest = [Status(row["status"]) for row in own if row["code"] not in PACKING]
    return str(worst(rest)) if rest else "unknown"


# --- a verdict -------------------------------------------------------------------------------------------------------


def verdict_findings(
    document: Mapping[str, Any], verdict: Verdict, check: Mapping[str, Any] | None = None
) -> tuple[Finding, ...]:
    """Everything a verdict says, made anew from its numbers, and what a build or a lock added to it.

    `verdict` is what `from_document` read of it. A file that leaves a finding out is not the better for it, nor is one
    that no longer goes with its numbers.
    """
    known = {f.fast_path: f.fix for f in _told(check or {}) if f.fast_path and f.fix and f.status is not Status.PASS}
    fresh = [*findings(verdict, known), *_doubted(document, verdict)]
    codes = {(finding.code, finding.fast_path) for finding in fresh}
    return (*fresh, *(finding for finding in _told(document) if (finding.code, finding.fast_path) not in codes))


def probe_status(document: Mapping[str, Any], verdict: Verdict, number: int) -> Status:
    """What is known about the numbers of one probe: what they say themselves, and what the file says of them."""
    return worst((numbers(verdict.probes[number], verdict.level), Status(document["probes"][number]["numbers"])))


def _doubted(document: Mapping[str, Any], verdict: Verdict) -> Iterator[Finding]:
    """The file itself calls numbers that look right not known, or wrong: whoever measured knows more than its rows."""
    for probe, row in zip(verdict.probes, document["probes"], strict=True):
        said = Status(row["numbers"])
        if verdict.level.name == "GPU" and said is not Status.PASS and numbers(probe, verdict.level) is Status.PASS:
            reason = f"the file says of the numbers of {probe.symbol}: {said}"
            yield Finding(code="numbers", status=said, fast_path=probe.symbol, reason=reason)


def verdict_answer(document: Mapping[str, Any], found: Sequence[Finding]) -> Answer:
    """What a verdict with these findings says."""
    status = worst(finding.status for finding in found)
    probes, level, print_of = document["probes"], document["level"], document["fingerprint"]
    where = f"level {level}, {print_of.get('gpu') or 'no GPU'}, torch {print_of.get('torch') or 'not known'}"
    right = [probe for probe in probes if probe["outcome"] in _SEEN]
    if probes and level == "gpu":
        decoding = sum(probe["outcome"] == "no-backward" for probe in probes)
        ways = "forward and backward" if not decoding else f"forward and backward ({decoding} without one, by design)"
        lead = f"{len(right)} of {len(probes)} kernels compute the right thing, {ways}; {where}."
    else:
        lead = f"{where[:1].upper()}{where[1:]}."
    untold = _untold(found) if status is Status.FAIL else ""
    said = [
        f"Besides, {untold}" if untold else "",
        *(finding.reason for finding in found if finding.code == "verify-problem"),
    ]
    lead += "".join(f" {text[:1].upper()}{text[1:]}." for text in said if text)
    if not found:
        # No finding is no answer, unless the model has nothing to be measured.
        none = document.get("subject") is not None and not document.get("fast_paths")
        status = Status.PASS if none else Status.UNKNOWN
        headline = "The model calls no kernel that had to be measured" if none else "Nothing was measured"
        return Answer(about="verdict", status=status, headline=headline, lead=lead)
    return Answer(about="verdict", status=status, headline=_verdict_headline(document, status, found), lead=lead)


def _verdict_headline(document: Mapping[str, Any], status: Status, found: Sequence[Finding]) -> str:
    probes, level = document["probes"], document["level"]
    if status is Status.FAIL:
        return _no(found)
    if level != "gpu":
        untold = _untold(found)
        return f"{_BELOW[level]}{f'; {untold}' if untold else ''}"
    if status is Status.UNKNOWN:
        if probes and all(f.code in _PARTLY for f in found if f.status is Status.UNKNOWN):
            return "Right in what was measured, and not everything was"
        untold = _untold(found)
        return f"It cannot be told yet: {untold}" if untold else "It cannot be told yet"
    apart = any(row["isolated"] for row in document["isolation"] if not row["left_out"])
    more = ", with something to know" if status is Status.WARN else ""
    if not probes:
        return ("Packed samples stay apart" if apart else "Nothing of a kernel was measured") + more
    return f"The kernels compute the right thing{', and packed samples stay apart' if apart else ''}{more}"


def _untold(found: Iterable[Finding]) -> str:
    by_phrase: dict[str, list[str]] = {}
    for finding in found:
        if finding.status is Status.UNKNOWN and finding.code in _UNTOLD and finding.fast_path:
            by_phrase.setdefault(_UNTOLD[finding.code], []).append(finding.fast_path)
    return "; ".join(f"{_names(names)} {phrase}" for phrase, names in by_phrase.items())


# --- a profiled step -------------------------------------------------------------------------------------------------


def profile_answer(profile: Mapping[str, Any]) -> Answer | None:
    """Which fast paths a recorded step ran on their slow path; None: the trace names none."""
    rows = profile["trace"]["implementations"] if profile["trace"] else []
    if not rows:
        return None
    answers = [(path_status(row), ", ".join(row["symbols"])) for row in rows]
    status = worst(answer for answer, _ in answers)
    slow = _names([names for answer, names in answers if answer is status])
    headline = {
        Status.FAIL: f"No: {slow} ran on the slow path in the recorded step",
        Status.WARN: f"{slow} ran on the slow path too in the recorded step",
    }.get(status, "Every fast path that left a name ran on a fused kernel in the recorded step")
    return Answer(about="trace", status=status, headline=headline, lead=str(profile["verdict"]["sentence"]))


def path_status(row: Mapping[str, Any]) -> Status:
    """The answer for one row of what ran: fused, slow, or both."""
    if not row["fallbacks"]:
        return Status.PASS
    # Which of torch's kernels attention takes depends on its mask: a slow one is something to know, as in `verify`.
    return Status.WARN if row["package"] or set(row["symbols"]) <= _of_torch() else Status.FAIL


@cache
def _of_torch() -> frozenset[str]:
    return frozenset(row.symbol for row in load_names() if row.package == "torch")


# --- a launch --------------------------------------------------------------------------------------------------------


def launch_answer(attestation: Mapping[str, Any]) -> Answer | None:
    """Whether the guard let the launch pass, and over what; None: the file does not say."""
    admission = attestation.get("admission")
    if not isinstance(admission, dict) or "admitted" not in admission:
        return None
    reasons = "; ".join(map(str, admission.get("reasons") or ()))
    overrides = "; ".join(map(str, admission.get("overrides") or ()))
    if not admission["admitted"]:
        return Answer(about="launch", status=Status.FAIL, headline="No: the launch was not admitted", lead=reasons)
    if overrides:
        headline = "The launch was admitted only because it was asked to be"
        return Answer(about="launch", status=Status.WARN, headline=headline, lead=f"Overrides: {overrides}.")
    return Answer(about="launch", status=Status.PASS, headline="The launch was admitted", lead=reasons)


# --- in words --------------------------------------------------------------------------------------------------------


def _told(document: Mapping[str, Any]) -> Iterator[Finding]:
    """The findings that stand in a document; rows that are none are left out."""
    rows = document.get("findings")
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("status") in set(Status):
            yield Finding(
                code=str(row.get("code", "")),
                status=Status(row["status"]),
                reason=str(row.get("reason", "")),
                fast_path=row.get("fast_path"),
                fix=str(row.get("fix") or ""),
            )


def _failed(found: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in found if finding.status is Status.FAIL]


def _no(found: Sequence[Finding]) -> str:
    """`No: a computes the wrong thing; packed samples see each other`: what was measured first."""
    said: dict[str, None] = {}
    failed = _failed(found)
    for code, (one, several) in _MEASURED.items():
        names = list(dict.fromkeys(f.fast_path or "a kernel" for f in failed if f.code == code))
        if names:
            said[f"{_names(names)} {one if len(names) == 1 else several}"] = None
    if any(finding.code == "packed-samples-leak" for finding in failed):
        said["packed samples see each other"] = None
    here = {f.fast_path for f in found if f.code in {"bound", "fits", "locked", "verified"} and f.fast_path}
    known_bad = list(dict.fromkeys(f.fast_path for f in failed if f.code in _rule_ids() and f.fast_path in here))
    rest = [f for f in failed if f.code not in _MEASURED and f.code != "packed-samples-leak"]
    many = "is" if len(known_bad) == 1 else "are"
    phrases: tuple[tuple[str, Callable[[Finding], bool]], ...] = (
        ("no GPU can be used", lambda f: f.code in _NO_GPU),
        ("this run would not be on its fused kernels", lambda f: _not_on(f) and f.fast_path not in known_bad),
        (
            f"{_names([name or '' for name in known_bad])} {many} known to go wrong here",
            lambda f: f.fast_path in known_bad and f.code not in PACKING,
        ),
        (
            "packed samples would see each other",
            lambda f: f.code in PACKING and "packed samples see each other" not in said,
        ),
        ("a combination of versions is known to go wrong here", lambda f: not f.fast_path and f.code in _rule_ids()),
        ("attention would not run as it was asked for", lambda f: f.code.startswith("attention-") and not _packs(f)),
        ("experts would run slowly", lambda f: f.code.startswith(("experts-", "grouped-mm"))),
        ("a kernel of the hub has a wrong backward", lambda f: f.code == "hub-wrong-gradient"),
        ("the environment is not what the lock says", lambda f: f.code.startswith(("lock-", "file-", "torch-moved"))),
    )
    told: set[int] = set()
    for phrase, holds in phrases:
        those = {number for number, finding in enumerate(rest) if holds(finding)}
        if those - told:
            said[phrase] = None
            told |= those
    left = [f.code for n, f in enumerate(rest) if n not in told and not _packs(f)]
    if left:
        said[", ".join(dict.fromkeys(left))] = None
    return f"No: {'; '.join(said)}"


def _packs(finding: Finding) -> bool:
    return finding.code in PACKING


def _not_on(finding: Finding) -> bool:
    return finding.code in _BYTES or (finding.fast_path is not None and finding.code not in PACKING)


@cache
def _rule_ids() -> frozenset[str]:
    return frozenset(rule.id for rule in load_rules(data.matrices() / "rules.toml"))


def _names(names: Sequence[str]) -> str:
    """`a, b and c`, each once."""
    once = list(dict.fromkeys(names))
    return once[0] if len(once) == 1 else f"{', '.join(once[:-1])} and {once[-1]}" if once else ""
