"""Verify or check inside a container of an image: carry kernelguard in, run it, bring its answer out."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kernelguard.errors import InputError, ToolError, UndeterminedError
from kernelguard.image.containers import Ran
from kernelguard.image.context import tar_stream
from kernelguard.image.engine import Engine
from kernelguard.image.inside import ANSWER, IN, OUT
from kernelguard.image.toolbox import BOX, PROBE, Interpreter, interpreter_of, toolbox
from kernelguard.image.values import ContextFile, ImageFacts
from kernelguard.judge.values import Level
from kernelguard.lock.document import dumps as lock_text
from kernelguard.lock.values import Lock

_PROBE_S = 60.0
_MODEL_FILES = (".json", ".py")
_LARGEST_MODEL_FILE = 1 << 20
SHM_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is verified in the image."""

    model: Path
    """A config.json, or a folder that holds one."""
    lock: Lock | None = None
    intent: Mapping[str, Any] | None = None
    """As an intent file; None: nothing was said."""
    length: int = 4096


def image_python(facts: ImageFacts, given: str = "") -> str:
    """The interpreter to look into: the given one, that of the labels, that of VIRTUAL_ENV, else `python`."""
    from kernelguard.image.labels import PREFIX  # noqa: PLC0415

    if given:
        return given
    labelled = facts.labels.get(f"{PREFIX}python", "")
    if labelled:
        return labelled
    active = next((v.partition("=")[2] for v in facts.environment if v.startswith("VIRTUAL_ENV=")), "")
    return f"{active}/bin/python" if active else "python"


def ask_python(engine: Engine, facts: ImageFacts, python: str) -> Interpreter:
    """Which Python an image has.

    Raises:
        InputError: it has none there.
    """
    with engine.container(facts.id, [python, "-c", PROBE]) as container:
        try:
            ran = engine.run(container, timeout=_PROBE_S)
        except ToolError as error:
            raise InputError(
                f"the image has no {python} that can be run: {error.message}", hint="name it with --python PATH"
            ) from error
    if ran.code != 0:
        raise InputError(f"{python} in the image failed with {ran.code}: {ran.output}", hint="--python PATH")
    return interpreter_of(ran.output.strip().splitlines()[-1])


def verify_inside(
    engine: Engine,
    facts: ImageFacts,
    subject: Subject,
    *,
    level: Level,
    python: str,
    cache: Path,
    warm: str = "",
    timeout: float = 600.0,
    gpu: bool | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Mapping[str, Any], bytes | None]:
    """The answer of `inside`, and, with `warm`, a tar of what that folder of the container then holds.

    Raises:
        UndeterminedError: it could not be told: no GPU to be had, the time limit, or the container was killed.
        InputError: what was asked for makes no sense in that image.
    """
    request = {
        "do": "verify",
        "model": f"{IN}/model",
        "python": python,
        "level": level.name.lower(),
        "length": subject.length,
        "timeout": timeout,
        "cache": warm,
        "intent": f"{IN}/intent.json" if subject.intent is not None else "",
        "lock": f"{IN}/kernelguard.lock" if subject.lock is not None else "",
        "capabilities": list(subject.lock.target.capabilities) if subject.lock is not None else [],
    }
    box = toolbox(ask_python(engine, facts, python), cache)
    with engine.container(
        facts.id,
        [python, "-I", BOX],
        gpu=level is Level.GPU if gpu is None else gpu,
        shm_bytes=SHM_BYTES,
    ) as container:
        engine.put(container, "/", _open_folder(OUT.name))
        engine.put(container, "/", tar_stream(_boxed([*box, *_requests(request, subject)])))
        ran = engine.run(container, timeout=timeout + 60.0, fetch=(str(ANSWER),), line=_progress(say))
        answer = _answer(ran, timeout)
        warmed = engine.archive(container, warm) if warm else None
    return answer, warmed


def command_inside(
    engine: Engine,
    facts: ImageFacts,
    arguments: Sequence[str],
    files: Sequence[ContextFile],
    *,
    python: str,
    cache: Path,
    gpu: bool,
    timeout: float,
    environment: Mapping[str, str],
) -> tuple[Ran, str]:
    """Run a command of kernelguard inside; what became of it, and what it printed to standard output."""
    request = {"do": "command", "arguments": list(arguments)}
    box = toolbox(ask_python(engine, facts, python), cache)
    body = json.dumps(request).encode()
    asked = ContextFile(path="in/request.json", content=body, size=len(body))
    with engine.container(
        facts.id,
        [python, "-I", BOX],
        gpu=gpu,
        environment=environment,
        shm_bytes=SHM_BYTES,
    ) as container:
        engine.put(container, "/", tar_stream(_boxed([*box, asked, *files])))
        ran = engine.run(container, timeout=timeout)
        return ran, engine.output(container)


def model_files(model: Path, below: str = "in/model") -> Iterator[ContextFile]:
    """A model's configuration and the code beside it, for a container."""
    if model.is_file():
        yield _file(f"{below}/config.json", model)
        folder = model.parent
    else:
        folder = model
    for place in sorted(folder.iterdir()):
        small = place.is_file() and place.suffix in _MODEL_FILES and place.stat().st_size <= _LARGEST_MODEL_FILE
        if small and not (model.is_file() and place.name == "config.json"):
            yield _file(f"{below}/{place.name}", place)


def _requests(request: Mapping[str, Any], subject: Subject) -> Iterator[ContextFile]:
    yield _text("in/request.json", json.dumps(request))
    yield from model_files(subject.model)
    if subject.intent is not None:
        yield _text("in/intent.json", json.dumps(subject.intent))
    if subject.lock is not None:
        yield _text("in/kernelguard.lock", lock_text(subject.lock))


def _answer(ran: Ran, timeout: float) -> Mapping[str, Any]:
    body = ran.files.get(str(ANSWER))
    if body is not None and ran.code is not None:
        answer: Mapping[str, Any] = json.loads(body)
        if "error" in answer:
            kind = InputError if answer["exit_code"] == InputError.exit_code else UndeterminedError
            raise kind(f"in the image: {answer['error']}", hint=answer["hint"] or None)
        return answer
    if ran.oom_killed or ran.code == 137:
        raise UndeterminedError(
            "verifying in the image was killed, as the kernel does when memory runs out",
            hint="give the engine more memory",
        )
    if ran.code is None:
        raise UndeterminedError(f"verifying in the image did not end within {timeout:g} s", hint="--timeout 3600")
    raise ToolError(f"verifying in the image ended with {ran.code} and no answer:\n{ran.output}", hint="report this")


def _progress(say: Callable[[str], None]) -> Callable[[str], None]:
    def line(text: str) -> None:
        if text.startswith("kernelguard: "):
            say(text.removeprefix("kernelguard: "))

    return line


def _open_folder(name: str) -> bytes:
    """A tar of one empty folder into which every user may write: the container's user is the image's."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.mode = tarfile.DIRTYPE, 0o1777
        archive.addfile(info)
    return body.getvalue()


def _boxed(files: Sequence[ContextFile]) -> Iterator[ContextFile]:
    return (replace(file, path=f"{BOX[1:]}/{file.path}") for file in files)


def _file(path: str, place: Path) -> ContextFile:
    return ContextFile(path=path, source=place, size=place.stat().st_size)


def _text(path: str, text: str) -> ContextFile:
    body = text.encode()
    return ContextFile(path=path, content=body, size=len(body))
