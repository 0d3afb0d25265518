"""A lock of tiny but real wheels for the real 27B configuration, and verdicts as a GPU would make them."""

from __future__ import annotations

import hashlib
import io
import tarfile
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.base import PYTHON
from kernelguard.declare.config import read_config
from kernelguard.image.engine import Engine
from kernelguard.image.plan import Request
from kernelguard.image.recipe import digest_of
from kernelguard.image.running import Subject
from kernelguard.image.values import Builder, ImageFacts
from kernelguard.judge.values import Level
from kernelguard.lock import load_lock, write_lock
from kernelguard.lock.parts import locked_model
from kernelguard.lock.values import Lock, LockedPath, LockedTarget, LockedTorch, Pin, Role
from kernelguard.verify.files import to_document
from kernelguard.verify.findings import findings
from kernelguard.verify.values import CaseResult, Fingerprint, Outcome, ProbeResult, Verdict
from sources.servers import wheel

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qwen3.8-27b"
SYMBOL = "chunk_gated_delta_rule"
BEFORE: set[str] = set()
"""Ids of what the engine had before the tests."""


def tiny_lock(folder: Path, *, cuda: str = "13.0", files: Mapping[str, bytes] | None = None, **changes: Any) -> Lock:
    """A lock whose wheels lie in `folder`. For an H100, so that it admits a launch."""
    made = {
        "torch": ("2.13.0", wheel("torch", "2.13.0", files={"torch/__init__.py": "__version__ = '2.13.0'\n"})),
        "triton": ("3.7.1", wheel("triton", "3.7.1")),
        "fla-core": ("0.6.0", wheel("fla-core", "0.6.0", files={"fla/__init__.py": "# 0.6.0\n"})),
    }
    pins = []
    for name, (version, usual) in made.items():
        filename = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        body = (files or {}).get(name, usual)
        place = folder / filename
        place.write_bytes(body)
        role = {"torch": Role.TORCH, "triton": Role.TORCH}.get(name, Role.KERNEL)
        digest = hashlib.sha256(body).hexdigest()
        pins.append(
            Pin(
                name=name,
                version=version,
                filename=filename,
                url=place.as_uri(),
                sha256=digest,
                role=role,
                size=len(body),
            )
        )
    lock = Lock(
        model=locked_model(read_config(str(EXAMPLE))),
        intent=(("packed", "False (assumed)"),),
        transformers="5.24.0",
        target=LockedTarget(
            spec="h100",
            python=PYTHON.removeprefix("python"),
            machine="x86_64",
            glibc="2.28",
            driver="580",
            gpus=("NVIDIA H100",),
            capabilities=("9.0",),
        ),
        torch=LockedTorch(version="2.13.0", cuda=cuda, channel="index", cxx11_abi=True, triton="3.7.1"),
        fast_paths=(LockedPath(symbol=SYMBOL, package="fla", served_by="fla-core 0.6.0", layers=48),),
        pins=tuple(pins),
        admits_launch=bool(cuda),
    )
    return replace(lock, **changes)


def verdict(
    level: Level = Level.GPU, outcome: Outcome = Outcome.RIGHT, *, capability: tuple[int, int] = (9, 0), **changes: Any
) -> Verdict:
    """A verdict as `verify` makes it."""
    gpu = level is Level.GPU
    probe = ProbeResult(
        symbol=SYMBOL,
        package="fla",
        op="gated_delta_rule",
        outcome=outcome if gpu else Outcome.LOADED,
        reason="" if outcome is Outcome.RIGHT else "the gradient of k is wrong",
        cases=(CaseResult(name="one row", lengths=(64,), shape={}, outcome=outcome),) if gpu else (),
    )
    print_ = Fingerprint(
        gpu="NVIDIA H100" if gpu else "",
        capability=capability if gpu else None,
        driver="580.95.05" if gpu else "",
        torch="2.13.0",
        cuda="13.0",
        triton="3.7.1",
        distributions={"torch": "2.13.0", "triton": "3.7.1", "fla-core": "0.6.0"},
    )
    return replace(
        Verdict(level=level, fingerprint=print_, probes=(probe,), created="2026-11-29T00:00:00+00:00"), **changes
    )


def answer(of: Verdict) -> dict[str, Any]:
    """What the container answers when this is its verdict."""
    return {"verdict": to_document(of), "check": {}, "findings": [asdict(f) for f in findings(of)]}


Asked = list[tuple[Level, str]]


def says(*verdicts: Verdict, asked: Asked | None = None, cache: dict[str, bytes] | None = None) -> Any:
    """A verifier that gives these verdicts in turn."""
    turn = iter(verdicts)

    def verifier(_engine: Engine, facts: ImageFacts, _subject: object, *, level: Level, warm: str, **_: object) -> Any:
        if asked is not None:
            asked.append((level, facts.id))
        body = io.BytesIO()
        with tarfile.open(fileobj=body, mode="w") as archive:
            for name, content in (cache or {}).items():
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
        return answer(next(turn)), body.getvalue() if warm else None

    return verifier


@dataclass(slots=True, kw_only=True)
class World:
    """A lock on disk, and the name of an image that nobody else uses."""

    folder: Path
    base: str
    wheels: Path | None = None
    """Where its wheels lie, if not in `folder`: the same lock then makes the same steps, which are in the cache."""
    image: str = field(default_factory=lambda: f"kg-test-{uuid.uuid4().hex[:8]}:v1")
    cache: Path = Path()
    lock: Lock = field(init=False)

    def __post_init__(self) -> None:
        self.cache = self.folder / "cache"
        self.take(tiny_lock(self.wheels or self.folder))

    def take(self, lock: Lock) -> None:
        """Make this the lock on disk."""
        write_lock(lock, self.path)
        self.lock = load_lock(self.path)

    @property
    def path(self) -> Path:
        """Of the lock."""
        return self.folder / "kernelguard.lock"

    @property
    def verdict_file(self) -> Path:
        """Where a build writes the verdict."""
        return self.folder / "kernelguard.verdict.json"

    @property
    def digest(self) -> str:
        """Of the lock."""
        return digest_of(self.lock)

    def request(self, **changes: Any) -> Request:
        """A build of the lock."""
        made = Request(
            lock=self.lock,
            path=self.path,
            image=self.image,
            subject=Subject(model=EXAMPLE, lock=self.lock),
            level=Level.IMPORT,
            base=self.base,
            builder=Builder.LEGACY,
        )
        return replace(made, **changes)
