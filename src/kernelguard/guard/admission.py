"""May this job start? A lock, a verdict, and what is on this machine, held against each other; nothing is guessed.

Every rule that is not satisfied is a finding with the command that would settle it: a definite no, or unknown, which
admits nothing either. Runs where the job is submitted, never inside a rank.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from packaging.version import InvalidVersion, Version

from kernelguard.guard.question import Admission, Question
from kernelguard.judge.values import Finding, Level, Status
from kernelguard.lock.values import Lock, Role
from kernelguard.observe.values import KERNEL_DISTRIBUTIONS, GpuState
from kernelguard.resolve.archs import text as capability_text
from kernelguard.verify.findings import findings as findings_of_verdict
from kernelguard.verify.requests import ProbeRequest
from kernelguard.verify.values import Fingerprint, ProbeResult

_OPTIONAL = "(assumed)"


def admit(question: Question) -> Admission:
    """Answer it. Every rule is applied, so that all reasons are told at once."""
    rules = (_of_lock, _of_verdict, _of_kernels, _of_signals, _of_content, _of_environment, _of_gpu, _of_image)
    findings = [finding for rule in rules for finding in rule(question)]
    return Admission(
        findings=tuple(findings), overrides=question.overrides.texts, level=question.overrides.accept_level
    )


def _of_lock(q: Question) -> Iterator[Finding]:
    if q.overrides.accept_level is Level.GPU and not q.lock.admits_launch:
        reason = f"the lock for {q.lock.target.spec} admits no launch: it holds no GPU build of every kernel"
        yield _no("launch-lock", reason, f"kernelguard lock {_name(q, 'model')} --target h100")
        return
    yield _yes(f"lock {q.lock_digest[:19]}..., {len(q.lock.pins)} distributions for {q.lock.model.model_type}")


def _of_verdict(q: Question) -> Iterator[Finding]:
    if q.verdict is None:
        yield _unknown("launch-no-verdict", "there is no verdict for this lock, so nothing is known to be right", q)
        return
    level, asked = q.verdict.level, q.overrides.accept_level
    if level < asked:
        reason = f"the verdict is of level {level.name.lower()}; only one of level {asked.name.lower()} admits a launch"
        yield _unknown("launch-level", reason, q)
        return
    told = findings_of_verdict(q.verdict)
    for finding in told:
        if finding.status is Status.FAIL:
            yield _no("launch-verdict-no", f"the verdict says no: {finding.reason}", finding.fix or _verify(q))
        elif finding.status is Status.UNKNOWN and not _accepted(finding, q):
            yield _unknown("launch-verdict-unknown", f"the verdict does not know: {finding.reason}", q)
    yield _yes(f"verdict of level {level.name.lower()}, measured {q.verdict.created or 'at an unknown time'}")


def _accepted(finding: Finding, q: Question) -> bool:
    """Unknowns that were accepted by name, or that the accepted level cannot know."""
    if finding.fast_path is not None and finding.fast_path in q.overrides.accept_unmeasured:
        return True
    below_gpu = q.overrides.accept_level < Level.GPU
    return below_gpu and finding.code in {"interpreted", "loads", "isolation-not-verified"}


def _of_kernels(q: Question) -> Iterator[Finding]:
    """Every kernel that this run calls was measured, at this model's shapes and in its dtype."""
    if q.verdict is None:
        return
    if q.requests is None:
        reason = f"the configuration of the model ({q.lock.model.source}) is not here, so its shapes cannot be compared"
        yield _unknown("launch-model", reason, q, fix="name it: --model /path/to/config.json")
        return
    if q.model_sha256 != q.lock.model.sha256:
        reason = (
            f"{_name(q, 'model')} has another content than the configuration that was locked: "
            f"sha256 {q.model_sha256[:16]}, the lock has {q.lock.model.sha256[:16]}"
        )
        yield _no("launch-model-changed", reason, f"kernelguard lock {_name(q, 'model')} --target {q.lock.target.spec}")
    measured = {(p.package, p.symbol): p for p in q.verdict.probes}
    if q.verdict.fingerprint.model_type != q.lock.model.model_type:
        reason = f"the verdict is of {q.verdict.fingerprint.model_type}, the lock of {q.lock.model.model_type}"
        yield _no("launch-other-model", reason, _verify(q))
    subject = q.verdict.subject
    if subject is not None and subject.config_sha256 != q.lock.model.sha256:
        reason = (
            f"the verdict is of a configuration with sha256 {subject.config_sha256[:16]} ({subject.source}), "
            f"the lock of {q.lock.model.sha256[:16]}"
        )
        yield _no("launch-other-model", reason, _verify(q))
    for request in q.requests:
        probe = measured.get((request.package, request.symbol))
        if probe is None:
            # The trainer takes its own kernel only if the ticket has a probe of it.
            if not request.stands_for and request.symbol not in q.overrides.accept_unmeasured:
                reason = f"the run calls {request.symbol} of {request.package}, and the verdict did not measure it"
                yield _unknown("launch-not-measured", reason, q)
            continue
        yield from _of_shapes(q, request, probe)


def _of_shapes(q: Question, request: ProbeRequest, probe: ProbeResult) -> Iterator[Finding]:
    if q.verdict is None or q.verdict.level <= Level.IMPORT:
        return
    if probe.dtype and probe.dtype != request.dtype:
        reason = f"{request.symbol} was measured in {probe.dtype}, the run is in {request.dtype}"
        yield _no("launch-other-dtype", reason, _verify(q))
    cases = {case.name: case for case in probe.cases}
    for wanted in request.cases:
        case = cases.get(wanted.name)
        if case is None:
            if request.symbol not in q.overrides.accept_unmeasured:
                reason = f"{request.symbol} was not measured with the inputs '{wanted.name}' that this run has"
                yield _unknown("launch-not-measured", reason, q)
        elif dict(case.shape) != dict(wanted.shape):
            was, needed = _difference(case.shape, wanted.shape)
            reason = f"{request.symbol} was measured with {was}, this model has {needed}"
            yield _no("launch-other-shapes", reason, _verify(q))


def _difference(a: Mapping[str, object], b: Mapping[str, object]) -> tuple[str, str]:
    names = sorted(n for n in {*a, *b} if a.get(n) != b.get(n))
    return ", ".join(f"{n}={a.get(n)}" for n in names), ", ".join(f"{n}={b.get(n)}" for n in names)


def _of_signals(q: Question) -> Iterator[Finding]:
    """A packed run needs a verdict that measured packing, with the signals that it sends."""
    intent = dict(q.lock.intent)
    if q.verdict is None or _said(intent.get("packed", "")) != "True":
        return
    if q.verdict.signals is None:
        yield _unknown("launch-packing", "the run packs samples, and the verdict measured no packing", q)
        return
    wanted = tuple(s for s in _said(intent.get("signals", "")).split(",") if s)
    if wanted and set(wanted) != set(q.verdict.signals):
        sent, measured = ", ".join(wanted), ", ".join(q.verdict.signals) or "none"
        yield _unknown("launch-packing", f"the run sends {sent}; the verdict measured packing with {measured}", q)
    elif not q.verdict.isolation and q.overrides.accept_level is Level.GPU:
        yield _unknown("launch-packing", "whether packed samples stay apart is not in the verdict", q)


def _said(text: str) -> str:
    return text.removesuffix(_OPTIONAL).strip()


def _of_content(q: Question) -> Iterator[Finding]:
    """The verdict was measured on what the lock pins."""
    if q.verdict is None:
        return
    seen = q.verdict.fingerprint
    different = list(_versions(q.lock, seen))
    for what, measured, pinned in different:
        reason = f"the verdict was measured with {what} {measured or '(none)'}, the lock has {pinned}"
        yield _no("launch-stale-verdict", reason, _verify(q))
    pinned_files = {pin.name: pin.files_sha256 for pin in q.lock.pins if pin.files_sha256}
    for name, digest in sorted(seen.records.items()):
        if pinned_files.get(name, digest) != digest:
            reason = f"the verdict was measured on another build of {name}: its RECORD has digest {digest[:16]}, "
            yield _no("launch-stale-verdict", f"{reason}the lock has {pinned_files[name][:16]}", _verify(q))
    minor = ".".join(seen.python.split(".")[:2])
    if minor != q.lock.target.python:
        reason = (
            f"the verdict was measured on Python {seen.python or '(unknown)'}, the lock is for {q.lock.target.python}"
        )
        yield _no("launch-stale-verdict", reason, _verify(q))
    if seen.machine != q.lock.target.machine:
        reason = f"the verdict was measured on {seen.machine or '(unknown)'}, the lock is for {q.lock.target.machine}"
        yield _no("launch-stale-verdict", reason, _verify(q))
    if q.overrides.accept_level is Level.GPU:
        capability = capability_text(seen.capability) if seen.capability is not None else ""
        allowed = q.lock.target.capabilities
        if allowed and capability not in allowed:
            reason = f"the verdict was measured on a GPU of capability {capability or '(unknown)'}, the lock is for "
            yield _no("launch-other-gpu", reason + ", ".join(allowed), _verify(q))
    if not different:
        yield _yes("the verdict was measured on the versions that the lock pins")


def _versions(lock: Lock, seen: Fingerprint) -> Iterator[tuple[str, str, str]]:
    pinned = {pin.name: pin.version for pin in lock.pins}
    built = {source.name: source.version for source in lock.sources}
    if not _same(seen.torch, lock.torch.version, local=False):
        yield "torch", seen.torch, lock.torch.version
    if seen.cuda != lock.torch.cuda:
        yield "CUDA", seen.cuda, lock.torch.cuda or "none"
    if lock.torch.triton and not _same(seen.triton, lock.torch.triton):
        yield "triton", seen.triton, lock.torch.triton
    if lock.transformers and not _same(seen.transformers, lock.transformers):
        yield "transformers", seen.transformers, lock.transformers
    for name in sorted(({*pinned, *built, *seen.distributions} & set(KERNEL_DISTRIBUTIONS)) - _COMPARED_ABOVE):
        version, measured = pinned.get(name) or built.get(name, ""), seen.distributions.get(name, "")
        if not _same(measured, version):
            yield name, measured, version or "none of it"


_COMPARED_ABOVE = frozenset({"torch", "triton", "transformers"})


def _same(a: str, b: str, *, local: bool = True) -> bool:
    """Equal versions. Without `local`, a local part (`+cpu`) that only one of them says is not compared."""
    try:
        first, second = Version(a), Version(b)
    except InvalidVersion:
        return a == b
    if not local and not (first.local and second.local):
        return first.public == second.public
    return first == second


def _of_environment(q: Question) -> Iterator[Finding]:
    """The interpreter that will train is the lock's, byte by byte, and has the binaries that were measured."""
    here = q.place.environment
    if here is None:
        yield _yes("what each rank has installed is compared by the ranks before they start")
        return
    dependencies = {pin.name for pin in q.lock.pins if pin.role is Role.DEPENDENCY}
    kernels = {pin.name for pin in q.lock.pins if pin.role is not Role.DEPENDENCY}
    for finding in q.place.lock_findings:
        about = finding.reason.split(":")[0].split(" ")[0]
        accepted = q.overrides.accept_other_dependencies and about in dependencies
        if finding.code == "file-two-owners" and not any(f" {name}" in finding.reason for name in kernels):
            # Two distributions that hold no kernel share a file, as many do with a licence or a `tests` package.
            continue
        if finding.status is Status.FAIL and not accepted:
            fix = f"kernelguard sync {_name(q, 'lock')} --python {_name(q, 'python')}"
            yield _no(f"launch-{finding.code}", f"not what the lock says: {finding.reason}", fix)
        elif finding.status is Status.UNKNOWN:
            yield _unknown(f"launch-{finding.code}", finding.reason, q, fix=finding.fix)
    for finding in q.place.check_findings:
        if finding.status is Status.FAIL:
            yield _no(f"launch-{finding.code}", finding.reason, finding.fix)
        elif finding.status is Status.UNKNOWN and finding.fast_path not in q.overrides.accept_unmeasured:
            yield _unknown(f"launch-{finding.code}", finding.reason, q, fix=finding.fix)
    if q.verdict is None:
        return
    measured, now = q.verdict.fingerprint.binaries, q.place.binaries
    for path in sorted({*measured, *now}):
        if measured.get(path) != now.get(path):
            was, found = (digest[:16] if digest else "no such file" for digest in (measured.get(path), now.get(path)))
            reason = f"{path} is not what was measured: sha256 {found} here, {was} in the verdict"
            yield _no("launch-other-binary", reason, _verify(q))
    if not q.place.lock_findings:
        yield _unknown("launch-environment", f"{_name(q, 'python')} was not held against the lock", q)
        return
    yield _yes(f"{here.origin} holds what the lock says, and the binaries that were measured")


def _of_gpu(q: Question) -> Iterator[Finding]:
    """Same capability; a driver at or above the floor, of the same or a newer branch than the verdict's."""
    here, verdict = q.place.environment, q.verdict
    if verdict is None or q.overrides.accept_level is not Level.GPU:
        return
    if not q.place.gpus_here or here is None:
        yield _yes("GPU kind and driver are checked by every rank before it starts")
        return
    seen = verdict.fingerprint
    if here.gpu_state is not GpuState.USABLE or not here.gpus:
        reason = f"no GPU can be used on this machine: {here.gpu_detail or here.gpu_state.value}"
        yield _unknown("launch-no-gpu", reason, q, fix="launch on the machine that will train, or --on slurm")
        return
    kinds = {gpu.capability for gpu in here.gpus}
    told = sorted(
        {f"{gpu.name} ({capability_text(gpu.capability) if gpu.capability else 'unknown'})" for gpu in here.gpus}
    )
    if kinds != {seen.capability}:
        measured = capability_text(seen.capability) if seen.capability else "(unknown)"
        reason = f"the verdict was measured on {seen.gpu or 'a GPU'} ({measured}), this machine has {', '.join(told)}"
        yield _no("launch-other-gpu", reason, _verify(q))
    else:
        yield _yes(f"{len(here.gpus)} x {told[0]}, the kind that was measured")
    yield from _of_driver(q, here.driver, seen)


def _of_driver(q: Question, driver: Version | None, seen: Fingerprint) -> Iterator[Finding]:
    if driver is None or not seen.driver:
        which = "this machine" if driver is None else "the verdict"
        yield _unknown("launch-driver", f"the driver of {which} is not known", q)
        return
    if q.floor is None:
        yield _unknown("launch-driver", f"which driver CUDA {seen.cuda} needs is not known", q)
        return
    if driver < q.floor:
        reason = f"CUDA {seen.cuda} needs driver {q.floor} or newer, this machine has {driver}"
        yield _no("launch-driver", reason, f"install NVIDIA driver {q.floor} or newer")
        return
    if driver.major < Version(seen.driver).major and not q.overrides.accept_older_driver:
        reason = f"the verdict was measured with driver {seen.driver}, this machine has {driver} of an older branch"
        yield _no("launch-driver-branch", reason, f"{_verify(q)}, or --accept-older-driver-branch")
        return
    yield _yes(f"driver {driver}, measured with {seen.driver}, floor {q.floor}")


def _of_image(q: Question) -> Iterator[Finding]:
    image = q.place.image
    if image is None:
        return
    if image.candidate and q.overrides.accept_level is Level.GPU:
        reason = f"{image.reference} is a candidate: it was built where there is no GPU, and never verified on one"
        yield _no("launch-candidate", reason, f"kernelguard promote {image.reference} --verdict VERDICT")
    if not image.digest and not image.tag_is_all:
        reason = f"{image.reference} names a tag, which can move; a launch needs the image's digest"
        fix = f"docker buildx imagetools inspect {image.reference}, then --image NAME@sha256:..."
        yield _no("launch-image-tag", reason, fix)
    if image.changed:
        reason = f"{image.reference} is no longer what was verified: its content is not that of its labels"
        yield _no("launch-image-changed", reason, f"kernelguard build {_name(q, 'lock')} -t IMAGE")
    if image.lock_digest and image.lock_digest != q.lock_digest:
        reason = f"{image.reference} was built from lock {image.lock_digest}, this is {q.lock_digest}"
        yield _no("launch-other-image", reason, f"kernelguard build {_name(q, 'lock')} -t IMAGE")
    if not image.lock_digest:
        why = "was not made by `kernelguard build`" if image.foreign else "is not known to an engine here"
        reason = f"{image.reference} {why}; each rank compares its content"
        yield Finding(code="launch-image", status=Status.WARN, reason=reason)


def _name(q: Question, what: str) -> str:
    """As it is typed in a shell."""
    return shlex.quote(q.names.get(what, what.upper()))


def _verify(q: Question) -> str:
    return f"kernelguard verify {_name(q, 'model')} --python {_name(q, 'python')} --level gpu -o {_name(q, 'verdict')}"


def _yes(reason: str) -> Finding:
    return Finding(code="launch-ok", status=Status.PASS, reason=reason)


def _no(code: str, reason: str, fix: str) -> Finding:
    return Finding(code=code, status=Status.FAIL, reason=reason, fix=fix)


def _unknown(code: str, reason: str, q: Question, *, fix: str = "") -> Finding:
    return Finding(code=code, status=Status.UNKNOWN, reason=reason, fix=fix or _verify(q))
