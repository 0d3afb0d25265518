"""What does the launcher tell every rank? The ticket: what was admitted, what is expected, how long each step may take.

Written by `kernelguard launch`, read in the training interpreter: standard library only, Python 3.9 or newer. Whoever
can write the ticket's file could as well change the training script, so it is checked for form, not for good will;
nothing in it is ever executed or looked up on a network.
"""
# Dataclass fields are read by name in Python 3.9, which has neither slots nor kw_only.

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kernelguard.guard.reader import Reader

SCHEMA = 1
VARIABLE = "KERNELGUARD_TICKET"
"""The environment variable that holds the ticket's path in every rank."""
OUTCOME_LINE = "KERNELGUARD-OUTCOME "
"""How a rank says the group's verdict on stderr when the run directory cannot be written; one JSON object follows."""

CODE_CONFIGURATION = 78
"""This configuration is wrong: starting it again changes nothing."""
CODE_NODE = 75
"""A node is at fault; the outcome names it."""
CODE_UNKNOWN = 3
"""It could not be told."""
CODES = (0, CODE_UNKNOWN, CODE_NODE, CODE_CONFIGURATION)

MECHANISMS = ("package", "hub", "torch")


class TicketError(ValueError):
    """The ticket cannot be used; the message names the file and every problem."""


@dataclass(frozen=True)
class Deadlines:
    """Seconds that each step of the preflight may take, the same in every rank."""

    rendezvous_s: float = 90.0
    """Until every rank has answered; those that have not are named."""
    fingerprint_s: float = 60.0
    probe_s: float = 120.0
    verdict_s: float = 30.0
    """For ranks to tell each other what they found."""
    collective_s: float = 120.0
    """For the collectives that the ranks try together, joining included; 0: they try none."""

    @property
    def alone_s(self) -> float:
        """The longest until the ranks have agreed on what each found by itself."""
        return self.rendezvous_s + self.fingerprint_s + self.probe_s + self.verdict_s

    @property
    def total_s(self) -> float:
        """The longest that a preflight can take before every rank has ended or gone on."""
        return self.alone_s + self.collective_s + self.verdict_s


@dataclass(frozen=True)
class ExpectedDistribution:
    """One installed distribution as it was verified."""

    version: str
    record_sha256: str = ""
    """`record_digest` of its RECORD (see `lock/record.py`); empty: not known."""
    binaries: Mapping[str, str] = field(default_factory=dict)
    """sha256 by path below site-packages."""


@dataclass(frozen=True)
class Expected:
    """What the verdict was measured on. An empty field was not known and is not compared."""

    python: str = ""
    torch: str = ""
    triton: str = ""
    cuda: str = ""
    """The CUDA that torch was built for."""
    transformers: str = ""
    distributions: Mapping[str, ExpectedDistribution] = field(default_factory=dict)
    capability: tuple[int, int] | None = None
    """Compute capability; None: no GPU is asked for (the test override)."""
    gpu: str = ""
    driver: str = ""
    """The verdict's."""
    driver_floor: str = ""
    """The lowest that this CUDA runtime works with."""


@dataclass(frozen=True)
class ExpectedPath:
    """One fast path, and what it has to be bound to in every rank."""

    symbol: str
    bound_to: str
    """The dotted name of the function, as `workers/bindings.py` reports its target; empty: not known."""
    mechanism: str
    """`package`, `hub` or `torch` (bound to the slow path, and admitted so)."""
    module: str
    """The modeling module that holds it."""
    package: str = ""
    layers: int | None = None
    training: bool = True
    """Used in the run; False: only in decoding, so it is not looked at."""


@dataclass(frozen=True)
class Document:
    """A file that the admission rests on."""

    path: str
    digest: str
    """`sha256:...`; a lock's own digest, or that of a verdict's bytes."""
    level: str = ""


@dataclass(frozen=True)
class AdmissionNote:
    """How it was admitted."""

    admitted: bool
    reasons: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Model:
    """The model that was locked for."""

    config: str
    """Path of its config.json; empty: only the digest is known."""
    dtype: str
    model_type: str = ""
    sha256: str = ""
    """Of the configuration in canonical form, as the lock has it."""


@dataclass(frozen=True)
class Ticket:
    """Everything a rank is told."""

    lock: Document
    verdict: Document
    admission: AdmissionNote
    run_dir: str
    level: str
    """`gpu`; `interpreted` or `import` only with the override that tests use. Below `gpu` probes run on the CPU."""
    model: Model
    expected: Expected = field(default_factory=Expected)
    deadlines: Deadlines = field(default_factory=Deadlines)
    fast_paths: tuple[ExpectedPath, ...] = ()
    kernels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By symbol, names of GPU kernels of which step 1 has to show at least one; a trailing `<>` stands for template
    arguments (`trace/names.py`)."""
    fallbacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By symbol, operators and functions that only its slow path runs."""
    packed: bool = False
    signals: tuple[str, ...] = ()
    """Boundary signals that packed batches have to carry."""
    intent: Mapping[str, str] = field(default_factory=dict)
    """What the lock says of the run: `attn_implementation`, `experts_implementation`, `use_kernels`, `liger`, ..."""
    probes: tuple[Mapping[str, Any], ...] = ()
    """Requests for `workers/probe.py`, without `device`."""
    isolation: Mapping[str, Any] | None = None
    """A request for `workers/isolation.py`, without `device`; None: the run does not pack."""
    bindings: Mapping[str, Any] | None = None
    """The request for `workers/bindings.py` with which the expected bindings were read."""
    device: str = "cuda"
    """Where probes run: `cuda`, or `cpu` below the gpu level."""
    image: str = ""
    """The image's digest, where it runs in one."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables that `verify` set and that decide which kernels run (`TRITON_INTERPRET`); only allowed names."""


def to_document(ticket: Ticket) -> dict[str, Any]:
    """The ticket as JSON values."""
    document: dict[str, Any] = {"schema": SCHEMA}
    document.update(_plain(asdict(ticket)))
    return document


def dumps(ticket: Ticket) -> str:
    """The text of a ticket file."""
    return json.dumps(to_document(ticket), indent=1, sort_keys=True) + "\n"


def load_ticket(path: str) -> Ticket:
    """Read a ticket.

    Raises:
        TicketError: it cannot be read, is no ticket, or was written by a newer kernelguard.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise TicketError(f"the ticket {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise TicketError(f"the ticket {path} is not JSON: {error}") from error
    return from_document(document, source=path)


def from_document(document: Any, *, source: str = "the ticket") -> Ticket:
    """The ticket that JSON values describe.

    Raises:
        TicketError: with every problem.
    """
    if not isinstance(document, dict):
        raise TicketError(f"{source} is no ticket: not an object")
    schema = document.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        raise TicketError(f"{source} has schema {schema}; this kernelguard reads up to {SCHEMA}")
    reader = Reader()
    if schema != SCHEMA:
        reader.problems.append(f"schema: expected {SCHEMA}, found {schema!r}")
    expected = reader.table(document, "expected")
    model = reader.table(document, "model")
    admission = reader.table(document, "admission")
    ticket = Ticket(
        lock=_document(reader, document, "lock"),
        verdict=_document(reader, document, "verdict"),
        admission=AdmissionNote(
            admitted=reader.boolean(admission, "admitted", "admission."),
            reasons=reader.texts(admission, "reasons", "admission."),
            overrides=reader.texts(admission, "overrides", "admission."),
        ),
        run_dir=reader.text(document, "run_dir"),
        level=reader.text(document, "level", one_of=("gpu", "interpreted", "import")),
        model=Model(
            config=reader.text(model, "config", "model.", default=""),
            dtype=reader.text(model, "dtype", "model."),
            model_type=reader.text(model, "model_type", "model.", default=""),
            sha256=reader.text(model, "sha256", "model.", default=""),
        ),
        expected=_expected(reader, expected),
        deadlines=_deadlines(reader, reader.table(document, "deadlines", default={})),
        fast_paths=tuple(_path(reader, row, place) for place, row in reader.rows(document, "fast_paths")),
        kernels=reader.text_lists(document, "kernels"),
        fallbacks=reader.text_lists(document, "fallbacks"),
        packed=reader.boolean(document, "packed", default=False),
        signals=reader.texts(document, "signals"),
        intent=reader.text_map(document, "intent"),
        probes=tuple(row for _, row in reader.rows(document, "probes")),
        isolation=reader.optional_table(document, "isolation"),
        bindings=reader.optional_table(document, "bindings"),
        device=reader.text(document, "device", one_of=("cuda", "cpu"), default="cuda"),
        image=reader.text(document, "image", default=""),
        variables=reader.text_map(document, "variables"),
    )
    if reader.problems:
        raise TicketError(f"{source} is no ticket: {'; '.join(reader.problems)}")
    return ticket


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _document(reader: Reader, document: Mapping[str, Any], key: str) -> Document:
    row = reader.table(document, key)
    return Document(
        path=reader.text(row, "path", f"{key}."),
        digest=reader.text(row, "digest", f"{key}."),
        level=reader.text(row, "level", f"{key}.", default=""),
    )


def _deadlines(reader: Reader, row: Mapping[str, Any]) -> Deadlines:
    standard = Deadlines()
    names = ("rendezvous_s", "fingerprint_s", "probe_s", "verdict_s", "collective_s")
    found = {n: reader.seconds(row, n, "deadlines.", getattr(standard, n), none=n == "collective_s") for n in names}
    return Deadlines(**found)


def _expected(reader: Reader, row: Mapping[str, Any]) -> Expected:
    names = ("python", "torch", "triton", "cuda", "transformers", "gpu", "driver", "driver_floor")
    capability = row.get("capability")
    if capability is not None and not _is_capability(capability):
        reader.problems.append("expected.capability: expected two numbers or null")
        capability = None
    found = {}
    for name, item in reader.table(row, "distributions", "expected.", {}).items():
        place = f"expected.distributions.{name}."
        if not isinstance(item, dict):
            reader.problems.append(f"{place[:-1]}: expected an object, found {type(item).__name__}")
            continue
        found[name] = ExpectedDistribution(
            version=reader.text(item, "version", place),
            record_sha256=reader.text(item, "record_sha256", place, default=""),
            binaries=reader.text_map(item, "binaries", place),
        )
    texts = {name: reader.text(row, name, "expected.", default="") for name in names}
    return Expected(distributions=found, capability=tuple(capability) if capability else None, **texts)


def _is_capability(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value)


def _path(reader: Reader, row: Mapping[str, Any], place: str) -> ExpectedPath:
    layers = row.get("layers")
    if layers is not None and type(layers) is not int:
        reader.problems.append(f"{place}layers: expected a number or null")
        layers = None
    return ExpectedPath(
        symbol=reader.text(row, "symbol", place),
        bound_to=reader.text(row, "bound_to", place, default=""),
        mechanism=reader.text(row, "mechanism", place, one_of=MECHANISMS),
        module=reader.text(row, "module", place),
        package=reader.text(row, "package", place, default=""),
        layers=layers,
        training=reader.boolean(row, "training", place, default=True),
    )
