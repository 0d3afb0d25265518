"""The walk of `kernelguard launch`: lock, verdict, this machine, admission, ticket, submission. Wires the rooms."""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from kernelguard.check import Request as CheckRequest
from kernelguard.check import run_check, transformers_tree
from kernelguard.data import matrices
from kernelguard.declare.choices import unasked
from kernelguard.declare.config import read_config
from kernelguard.declare.declaration import declare
from kernelguard.declare.intent import resolve_intent
from kernelguard.declare.values import Declaration, Intent, ModelConfig, Phase
from kernelguard.errors import InputError, UndeterminedError
from kernelguard.guard.admission import admit
from kernelguard.guard.question import Admission, Image, Overrides, Place, Question
from kernelguard.guard.ticket import Deadlines, Ticket, dumps
from kernelguard.image.labels import read_labels
from kernelguard.image.values import ImageFacts, State
from kernelguard.judge.rules import load_rules
from kernelguard.judge.values import Finding, Level
from kernelguard.launch.engines import ENGINES
from kernelguard.launch.job import Engine, Job, Submission, check_name
from kernelguard.launch.tickets import Admitted, make_ticket
from kernelguard.lock import Lock, check_lock, load_lock
from kernelguard.lock.document import digest, to_document
from kernelguard.lock.parts import locked_model
from kernelguard.observe.interpreter import find_interpreter
from kernelguard.report.document import Check
from kernelguard.resolve.matrix import matrix
from kernelguard.verify.files import load_verdict
from kernelguard.verify.fingerprint import binary_digests
from kernelguard.verify.plan import TRAINING_LENGTH, plan
from kernelguard.verify.values import Verdict

_PACKAGE = Path(__file__).resolve().parent
_NEEDED_BY_RANKS = ("__init__.py", "guard/*.py", "launch/*.py", "workers/**/*.py")
_ASSUMED = " (assumed)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked on the command line."""

    lock: Path
    script: tuple[str, ...]
    verdict: Path | None = None
    model: str | None = None
    python: Path | None = None
    image: str | None = None
    transformers: str | None = None
    engine: str = "torchrun"
    nodes: int = 1
    processes: int | None = None
    max_restarts: int = 0
    stop_within_s: float = 600.0
    options: Mapping[str, str] = field(default_factory=dict)
    overrides: Overrides = field(default_factory=Overrides)
    run_dir: Path | None = None
    name: str | None = None
    warm_cache: Path | None = None
    probe_s: float | None = None
    collective_s: float = 120.0
    rendezvous_s: float = 90.0
    timeout: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What would be submitted, and whether it may be."""

    admission: Admission
    engine: Engine
    run_dir: Path
    ticket: Ticket | None = None
    """None: it was refused."""
    submission: Submission | None = None
    site: bytes = b""
    """What ranks need of kernelguard, as a zip."""


def run_launch(request: Request, environ: Mapping[str, str], say: Callable[[str], None]) -> Launch:
    """Ask for admission; if it is given, everything that would be written and run. Nothing is written here.

    Raises:
        InputError: an argument or a file is unusable.
        UndeterminedError: the interpreter or transformers' source cannot be looked at.
    """
    engine = _engine(request)
    lock = load_lock(request.lock)
    lock_digest = digest(to_document(lock))
    verdict_path = request.verdict or _beside(request.lock)
    verdict = load_verdict(verdict_path) if request.verdict is not None or verdict_path.exists() else None
    where = request.model or lock.model.source
    config = read_config(where) if Path(where).exists() else None
    here = _Here() if request.image is not None else _look(request, lock, config, environ, say)
    declaration = here.check.declaration if here.check is not None else _declared(request, lock, config, environ)
    intent = here.check.intent if here.check is not None else resolve_intent(intent_flags(lock))
    requests = None
    if declaration is not None:
        requests = plan(
            declaration,
            intent,
            length=_length(verdict),
            capabilities=[(v.major, v.minor) for v in map(Version, lock.target.capabilities)],
        )
    names = {"lock": str(request.lock), "model": where, "verdict": str(verdict_path), "python": here.python or "PYTHON"}
    say("deciding")
    admission = admit(
        Question(
            lock=lock,
            lock_digest=lock_digest,
            verdict=verdict,
            requests=requests,
            model_sha256=locked_model(config).sha256 if config is not None else "",
            place=Place(
                environment=here.check.environment if here.check is not None else None,
                lock_findings=here.lock_findings,
                check_findings=here.check_findings,
                binaries=here.binaries,
                gpus_here=engine.name == "torchrun",
                image=_image(request.image, engine, environ) if request.image is not None else None,
            ),
            floor=_floor(lock, verdict),
            overrides=request.overrides,
            names=names,
        )
    )
    name = check_name(request.name or f"kernelguard-{lock_digest.removeprefix('sha256:')[:8]}")
    run_dir = (request.run_dir or Path("runs", f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name[-8:]}")).absolute()
    if not admission.admitted or verdict is None or declaration is None or requests is None:
        return Launch(admission=admission, engine=engine, run_dir=run_dir)
    admitted = Admitted(
        admission=admission,
        lock=lock,
        lock_path=str(request.lock.absolute()),
        lock_digest=lock_digest,
        verdict=verdict,
        verdict_path=str(verdict_path.absolute()),
        verdict_digest="sha256:" + hashlib.sha256(verdict_path.read_bytes()).hexdigest(),
        declaration=declaration,
        intent=intent,
        requests=requests,
        environment=here.check.environment if here.check is not None else None,
        bindings=here.check.bindings if here.check is not None else None,
        floor=str(_floor(lock, verdict) or ""),
        image=request.image or "",
        warm_cache=request.warm_cache,
        deadlines=_deadlines(request),
    )
    # Nodes that share no disk with this machine have a place of their own.
    remote = "/tmp/kernelguard-run"  # noqa: S108 - in a container of its own
    ticket = make_ticket(admitted, run_dir=str(run_dir) if engine.shares_disk else remote)
    site = bundle()
    job = Job(
        name=name,
        script=script_of(request.script),
        python=here.python or "python",
        run_dir=str(run_dir),
        workdir=str(Path.cwd()),
        nodes=request.nodes,
        processes=request.processes or _gpus(here) or 1,
        max_restarts=request.max_restarts,
        stop_within_s=request.stop_within_s,
        rendezvous_s=request.rendezvous_s,
        image=request.image or "",
        options=request.options,
        bundle=site,
        ticket=dumps(ticket),
    )
    return Launch(
        admission=admission,
        engine=engine,
        run_dir=run_dir,
        ticket=ticket,
        submission=engine.render(job),
        site=site,
    )


def write_run(launch: Launch) -> None:
    """Make the run directory: ticket, the guard's own files, and what is submitted.

    Raises:
        InputError: it cannot be written.
    """
    if launch.ticket is None or launch.submission is None:
        raise AssertionError("only what was admitted is written")
    try:
        launch.run_dir.mkdir(parents=True, exist_ok=True)
        (launch.run_dir / "ticket.json").write_text(dumps(launch.ticket), encoding="utf-8")
        for name, text in launch.submission.files:
            (launch.run_dir / name).write_text(text, encoding="utf-8")
        with zipfile.ZipFile(io.BytesIO(launch.site)) as archive:
            archive.extractall(launch.run_dir / "site")
    except OSError as error:
        raise InputError(
            f"the run directory {launch.run_dir} cannot be written: {error.strerror}", hint="--run-dir FOLDER"
        ) from error


def bundle() -> bytes:
    """A zip of the files of kernelguard that run inside a rank; the same files give the same bytes."""
    from kernelguard.launch.supervisor import STAGED  # noqa: PLC0415 - the marker's one place

    kept = sorted({p for pattern in _NEEDED_BY_RANKS for p in _PACKAGE.glob(pattern) if p.is_file()})
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(zipfile.ZipInfo(STAGED), "")
        for path in kept:
            info = zipfile.ZipInfo(str(Path("kernelguard", path.relative_to(_PACKAGE))))
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return memory.getvalue()


def script_of(words: tuple[str, ...]) -> tuple[str, ...]:
    """`SCRIPT ARGS` or `-m MODULE ARGS`; a leading `python` is what everybody types, and is left out.

    Raises:
        InputError: there is nothing to run.
    """
    rest = words[1:] if words and Path(words[0]).name.rstrip("0123456789.") == "python" else words
    if not rest or (rest[0] == "-m" and len(rest) < 2):
        raise InputError("what to run was not said", hint="kernelguard launch LOCK -- train.py ARGS")
    if rest[0].startswith("-") and rest[0] != "-m":
        raise InputError(f"{rest[0]} is an option of Python; only -m MODULE or a script can be launched")
    return rest


def intent_flags(lock: Lock) -> dict[str, Any]:
    """What a lock says of the run, as values of `Intent`; what was only assumed is said here."""
    kinds = {f.name: str(f.type) for f in fields(Intent)}
    flags: dict[str, Any] = {}
    for name, text in lock.intent:
        said = text.removesuffix(_ASSUMED)
        kind = kinds.get(name, "")
        if kind == "bool":
            flags[name] = said == "True"
        elif not said:
            continue
        elif kind.startswith("tuple"):
            flags[name] = tuple(part for part in said.split(",") if part)
        elif kind == "Phase":
            flags[name] = Phase(said)
        elif kind:
            flags[name] = said
    return flags


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """What was found out on this machine."""

    python: str = ""
    check: Check | None = None
    lock_findings: tuple[Finding, ...] = ()
    check_findings: tuple[Finding, ...] = ()
    binaries: Mapping[str, str] = field(default_factory=dict)


def _look(
    request: Request, lock: Lock, config: ModelConfig | None, environ: Mapping[str, str], say: Callable[[str], None]
) -> _Here:
    python = find_interpreter(request.python, environ)
    say(f"holding {python} against the lock")
    if config is None:
        return _Here(python=python, lock_findings=check_lock(lock, Path(python), timeout=request.timeout))
    asked = CheckRequest(
        model=str(config.source),
        python=Path(python),
        flags=intent_flags(lock),
        level="import",
        timeout=request.timeout,
    )
    # One process there hashes files while another imports the model's code.
    with ThreadPoolExecutor(1) as beside:
        looking = beside.submit(run_check, asked, environ)
        lock_findings = check_lock(lock, Path(python), timeout=request.timeout)
        say("reading what the model is bound to")
        check = looking.result()
    rules = {rule.id for rule in load_rules(matrices() / "rules.toml")}
    return _Here(
        python=python,
        check=check,
        lock_findings=lock_findings,
        # Known bad combinations are what a verdict is for: it measured them here.
        check_findings=tuple(f for f in check.assessment.findings if f.code not in rules),
        binaries=binary_digests(check.environment),
    )


def _declared(
    request: Request, lock: Lock, config: ModelConfig | None, environ: Mapping[str, str]
) -> Declaration | None:
    if config is None:
        return None
    tree = transformers_tree(request.transformers or lock.transformers or None, environ)
    intent = resolve_intent(intent_flags(lock))
    return declare(config, tree, leave_out=unasked(intent))


def _engine(request: Request) -> Engine:
    engine = ENGINES.get(request.engine)
    if engine is None:
        raise InputError(f"{request.engine} is no engine", hint=f"--on {', '.join(sorted(ENGINES))}")
    if engine.needs_image and request.image is None:
        raise InputError(f"--on {engine.name} runs in an image", hint="--image NAME@sha256:...")
    if request.image is not None and engine.name == "torchrun":
        raise InputError("torchrun runs in the interpreter here, not in an image", hint="start it inside the image")
    if request.nodes < 1 or (request.processes is not None and request.processes < 1):
        raise InputError("nodes and processes are counted from 1", hint="--nodes 1")
    if request.max_restarts < 0:
        raise InputError(f"--max-restarts is {request.max_restarts}, but must be 0 or more", hint="--max-restarts 0")
    if not (math.isfinite(request.collective_s) and 0 <= request.collective_s < 86_400):
        raise InputError(
            f"--collectives is {request.collective_s:g}, but must be seconds from 0, less than a day",
            hint="--collectives 120, or 0 for none",
        )
    if not (math.isfinite(request.stop_within_s) and request.stop_within_s >= 0):
        raise InputError(
            f"--stop-within is {request.stop_within_s:g}, but must be seconds from 0", hint="--stop-within 600"
        )
    return engine


def _beside(lock: Path) -> Path:
    """Where a verdict is looked for when none was named."""
    return lock.with_suffix(".verdict.json")


def _length(verdict: Verdict | None) -> int:
    """The training length that the verdict was measured at: as it says, else its longest sequence."""
    if verdict is not None and verdict.subject is not None and verdict.subject.length:
        return verdict.subject.length
    lengths = [sum(c.lengths) for p in (verdict.probes if verdict else ()) for c in p.cases if c.name == "training"]
    return max(lengths, default=TRAINING_LENGTH)


def _floor(lock: Lock, verdict: Verdict | None) -> Version | None:
    cuda = lock.torch.cuda or (verdict.fingerprint.cuda if verdict is not None else "")
    try:
        return matrix().drivers.floor(Version(cuda)) if cuda else None
    except InvalidVersion:
        return None


def _image(reference: str, engine: Engine, environ: Mapping[str, str]) -> Image:
    """What a reference says of an image, and its labels where an engine here has it."""
    name, _, found = reference.partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    image = Image(
        reference=reference,
        digest=found,
        candidate=tag.endswith("candidate"),
        tag_is_all=engine.name == "air",
    )
    facts = _facts(reference, environ)
    if facts is None:
        return image
    claims = read_labels(facts.labels)
    if claims is None:
        return replace(image, foreign=True)
    return replace(
        image,
        candidate=claims.state is State.CANDIDATE,
        lock_digest=claims.lock,
        changed=claims.content != facts.content,
    )


def _facts(reference: str, environ: Mapping[str, str]) -> ImageFacts | None:
    """What the engine of this machine has under that name; None: there is no engine, or it does not have it."""
    from kernelguard.image.engine import connect  # noqa: PLC0415 - the SDK is only needed where an image is named

    try:
        with connect(environ) as docker:
            return docker.image(reference)
    except UndeterminedError:
        # Nothing is known then, and the admission says so.
        return None


def _deadlines(request: Request) -> Deadlines:
    # A cold Triton cache compiles for minutes; with a warm one a probe is over in seconds.
    probe_s = request.probe_s or (120.0 if request.warm_cache is not None else 600.0)
    return replace(Deadlines(), rendezvous_s=request.rendezvous_s, probe_s=probe_s, collective_s=request.collective_s)


def _gpus(here: _Here) -> int:
    return len(here.check.environment.gpus) if here.check is not None else 0


__all__ = ["Launch", "Level", "Request", "bundle", "intent_flags", "run_launch", "script_of", "write_run"]
