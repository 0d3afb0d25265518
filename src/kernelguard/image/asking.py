"""The walks of `kernelguard check --image` and `lint`. Wires the rooms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from kernelguard.errors import InputError, UndeterminedError
from kernelguard.image import labels
from kernelguard.image.complaints import GpuRuntimeError
from kernelguard.image.context import walk
from kernelguard.image.engine import Engine
from kernelguard.image.fitness import Situation, image_findings
from kernelguard.image.lint import lint
from kernelguard.image.running import ask_python, command_inside, image_python, model_files
from kernelguard.image.values import ContextFile, ImageFacts
from kernelguard.judge.values import Finding, Status
from kernelguard.resolve.matrix import matrix

_LOOK_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What was said about where the image shall run."""

    driver: str = ""
    gpu: bool = False
    """Pass every GPU in, and say so if there is none."""
    ranks: int | None = None
    shm_bytes: int | None = None
    platform: str = ""
    python: str = ""

    def situation(self) -> Situation:
        """With what is known about drivers."""
        return Situation(
            drivers=matrix().drivers,
            driver=Version(self.driver) if self.driver else None,
            gpu_asked=self.gpu,
            ranks=self.ranks,
            shm_bytes=self.shm_bytes,
            platform=self.platform,
        )


def image_of(engine: Engine, name: str) -> ImageFacts:
    """The facts of an image that a person named.

    Raises:
        InputError: the engine does not have it.
    """
    facts = engine.image(name)
    if facts is None:
        raise InputError(f"the engine has no image {name}", hint=f"docker pull {name}, or docker image ls")
    return facts


def check_image(engine: Engine, name: str, asked: Asked) -> tuple[ImageFacts, tuple[Finding, ...]]:
    """Look at what an image has, in a container without a network; nothing of its packages is imported.

    Raises:
        InputError: there is no such image, or it has no Python where it was said to be.
        UndeterminedError: it did not answer.
    """
    facts = image_of(engine, name)
    python = image_python(facts, asked.python)
    script = Path(__file__).with_name("look.py").read_bytes()
    try:
        seen = _look(engine, facts, python, script, gpu=asked.gpu)
    except GpuRuntimeError as error:
        # The engine cannot give one: that is an answer about this machine, and the rest is still worth knowing.
        seen = _look(engine, facts, python, script, gpu=False)
        lacking = Finding(code="image-no-gpu-passed", status=Status.UNKNOWN, reason=error.message, fix=error.hint or "")
        rest = image_findings(seen, Situation(drivers=matrix().drivers, platform=asked.platform))
        return facts, (lacking, *(f for f in rest if f.status is not Status.PASS))
    tags = [tag for tag in facts.tags if tag == name] or [name]
    found = image_findings(seen, asked.situation(), tags=tags, working_dir=facts.working_dir)
    return facts, (*found, *_claims(facts))


def _look(engine: Engine, facts: ImageFacts, python: str, script: bytes, *, gpu: bool) -> Mapping[str, Any]:
    from kernelguard.image.context import tar_stream  # noqa: PLC0415

    file = ContextFile(path="kernelguard-look.py", content=script, size=len(script))
    ask_python(engine, facts, python)
    with engine.container(facts.id, [python, "-I", "/kernelguard-look.py"], gpu=gpu) as container:
        engine.put(container, "/", tar_stream([file]))
        ran = engine.run(container, timeout=_LOOK_S)
        if ran.code != 0:
            raise UndeterminedError(f"looking into the image ended with {ran.code}: {ran.output}", hint="report this")
        answer: Mapping[str, Any] = json.loads(engine.output(container))
    return answer


def _claims(facts: ImageFacts) -> list[Finding]:
    """Whether an image that claims to be verified still is what was verified."""
    claims = labels.read_labels(facts.labels)
    if claims is None:
        return []
    level = claims.level.name.lower()
    if claims.content != facts.content:
        reason = f"its labels say {claims.state}, level {level}, of content {claims.content}; it has {facts.content}"
        return [Finding(code="image-changed", status=Status.FAIL, reason=reason, fix="build it again from its lock")]
    reason = f"it is a {claims.state} image of lock {claims.lock[:19]}..., level {level}, and unchanged since"
    return [Finding(code="image-claims", status=Status.PASS, reason=reason)]


def check_inside(
    engine: Engine,
    name: str,
    arguments: Sequence[str],
    model: Path,
    extra: Mapping[str, Path],
    *,
    cache: Path,
    python: str = "",
    timeout: float,
    environment: Mapping[str, str],
) -> tuple[int, str, str]:
    """Exit code, standard output and last lines of `kernelguard check` inside; `extra` are files by name."""
    facts = image_of(engine, name)
    chosen = image_python(facts, python)
    files = [*model_files(model)]
    for place, path in extra.items():
        files.append(ContextFile(path=f"in/{place}", source=path, size=path.stat().st_size))
    ran, output = command_inside(
        engine,
        facts,
        ["check", *arguments, "--python", chosen],
        files,
        python=chosen,
        cache=cache,
        gpu=False,
        timeout=timeout,
        environment=environment,
    )
    if ran.code is None:
        raise UndeterminedError(f"the check in the image did not end within {timeout:g} s", hint="--timeout 600")
    return ran.code, output, ran.output


def lint_file(path: Path, asked: Asked) -> tuple[Finding, ...]:
    """The findings of a Dockerfile and of the folder that it lies in, which is its build context.

    Raises:
        InputError: it cannot be read, or is no Dockerfile.
    """
    place = path / "Dockerfile" if path.is_dir() else path
    try:
        text = place.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InputError(f"{place} cannot be read: {why}", hint="kernelguard lint PATH/TO/Dockerfile") from error
    _, unfit = walk(place.parent)
    return lint(text, asked.situation(), matrix(), source=place.name, unfit=unfit)
