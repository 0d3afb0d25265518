"""Carry out a recipe: by the engine's classic builder, or by BuildKit where there is one. One image id comes out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kernelguard.errors import KernelguardError, ToolError, UndeterminedError
from kernelguard.image.complaints import build_error, plain
from kernelguard.image.context import tar_stream
from kernelguard.image.engine import Engine
from kernelguard.image.values import Builder, ContextFile

_TAIL_LINES = 20
_STEP = re.compile(r"^Step (?P<number>\d+)/(?P<total>\d+) : (?P<what>.*)")
_BUILDKIT_STEP = re.compile(r"^#(?P<id>\d+) \[(?P<where>[^\]]*?(?P<number>\d+)/(?P<total>\d+))\] (?P<what>.*)")
_BUILDKIT_LINE = re.compile(r"^#(?P<id>\d+) (?:\d+\.\d+ )?(?P<text>.*)")
_STEP_IMAGE = re.compile(r"^ ---> (?P<id>[0-9a-f]{12})$")
_KILLED = re.compile(r"(non-zero code: 137|exit code: 137)\b")
_ASK_S = 20.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One build."""

    files: tuple[ContextFile, ...]
    """With a `Dockerfile` among them."""
    labels: Mapping[str, str] = field(default_factory=dict)
    online_target: str = ""
    """The stage that may use the network; nothing else may. Empty: nothing may."""
    target: str = ""
    """Build this stage only; empty: the last one."""
    tag: str = ""
    """Where BuildKit leaves its result; the classic builder needs none."""
    network: str | None = None
    """Of `online_target`; None: the engine's default."""
    no_cache: bool = False
    sbom: bool = False
    """SBOM and provenance, where the builder can."""
    cache_ref: str = ""
    """A registry reference for buildx's cache."""


def find_builder(wanted: Builder | None, environ: Mapping[str, str]) -> tuple[Builder, str]:
    """Which builder to use, and why it is that one.

    Raises:
        UndeterminedError: the wanted one is not here.
    """
    docker = shutil.which("docker", path=environ.get("PATH", os.defpath))
    if wanted is Builder.LEGACY:
        return Builder.LEGACY, "asked for"
    buildx = docker is not None and _answers([docker, "buildx", "version"], environ)
    if buildx and wanted in {None, Builder.BUILDX}:
        return Builder.BUILDX, "docker buildx is installed"
    if wanted is Builder.BUILDX:
        raise UndeterminedError(
            "docker buildx is not installed" if docker else "there is no docker command, so no buildx",
            hint="apt-get install docker-buildx-plugin, or --builder legacy",
        )
    if wanted is Builder.BUILDKIT:
        version = _client_version(docker, environ) if docker else None
        if version is None or version >= 23:
            raise UndeterminedError(
                "a docker command before 23 is needed for BuildKit without buildx"
                + (f", this one is {version}" if version else ", and there is none"),
                hint="apt-get install docker-buildx-plugin and --builder buildx, or --builder legacy",
            )
        return Builder.BUILDKIT, "asked for"
    return Builder.LEGACY, "docker buildx is not installed"


def _answers(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=_ASK_S, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _client_version(docker: str, environ: Mapping[str, str]) -> int | None:
    done = subprocess.run(
        [docker, "--version"], capture_output=True, text=True, check=False, timeout=_ASK_S, env=dict(environ)
    )
    found = re.search(r"version (\d+)\.", done.stdout)
    return int(found[1]) if found else None


def build(
    engine: Engine,
    builder: Builder,
    order: Order,
    *,
    environ: Mapping[str, str],
    timeout: float,
    tell: Tell = lambda _: None,
    sent: Callable[[int, int], None] = lambda _done, _total: None,
) -> str:
    """Build, and give the image's id.

    `tell` gets one line for each step and each line that a step prints, `sent` the bytes of the context.

    Raises:
        ToolError: a step failed (the message has its last lines), or the engine's disk is full.
        UndeterminedError: it did not end within `timeout` seconds; the build was stopped.
    """
    job = _Job(deadline=time.monotonic() + timeout, timeout=timeout, tell=tell, sent=sent)
    if builder is Builder.BUILDKIT:
        return _old_buildkit(engine, order, environ, job)
    if builder is Builder.BUILDX:
        return _buildkit(engine, builder, order, environ, job)
    if order.online_target:
        _classic(engine, order, order.online_target, job)
    return _classic(engine, order, "", job)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Until when, and to whom to talk."""

    deadline: float
    timeout: float
    tell: Tell
    sent: Callable[[int, int], None]


def _classic(engine: Engine, order: Order, target: str, job: _Job) -> str:
    deadline, timeout, tell, sent = job.deadline, job.timeout, job.tell, job.sent
    network = order.network if target else "none"
    total = sum(file.size for file in order.files)
    watch = _Watch(tell=tell, made=engine.steps)
    # Only what the stage needs is sent: it copies nothing.
    files = _dockerfile_of(order.files) if target else order.files
    events = engine.build_classic(
        tar_stream(files, lambda done: sent(done, total)),
        labels={} if target else order.labels,
        target=target,
        network=network,
        # A stage that was just built with a network must be taken from the cache, or it would be built without one.
        no_cache=order.no_cache and bool(target or not order.online_target),
        timeout=max(deadline - time.monotonic(), 1.0),
    )
    made, ended = "", False
    try:
        for event in events:
            if time.monotonic() > deadline:
                raise _late(watch, timeout)
            if "stream" in event:
                watch.classic(str(event["stream"]))
            elif "aux" in event and "ID" in event["aux"]:
                made = str(event["aux"]["ID"])
            elif "errorDetail" in event or "error" in event:
                detail = event.get("errorDetail") or {}
                raise watch.failure(str(detail.get("message") or event.get("error")))
        ended = True
    except KernelguardError as error:
        if "timed out" in error.message.lower():
            raise _late(watch, timeout) from error
        raise
    finally:
        events.close()
        if not ended:
            engine.adopt_last_step(watch.bases)
    if not made:
        raise ToolError("the builder ended without an image and without an error", hint="docker info")
    return made


def _old_buildkit(engine: Engine, order: Order, environ: Mapping[str, str], job: _Job) -> str:
    """In two builds: BuildKit takes nothing from its cache that was built with another network."""
    files = order.files
    if order.online_target:
        name = f"kernelguard-base-{order.online_target}:{engine.run_id}"
        first = replace(order, files=_dockerfile_of(files), target=order.online_target, labels={}, tag=name)
        engine.tag_for_now(_buildkit(engine, Builder.BUILDKIT, first, environ, job), f"base-{order.online_target}")
        files = tuple(_starting_at(name, order.online_target, file) for file in files)
    return _buildkit(engine, Builder.BUILDKIT, replace(order, files=files, network="none"), environ, job)


def _dockerfile_of(files: Sequence[ContextFile]) -> tuple[ContextFile, ...]:
    return tuple(file for file in files if file.path == "Dockerfile")


def _starting_at(image: str, stage: str, file: ContextFile) -> ContextFile:
    """The Dockerfile with an image in the place of a stage that was built already."""
    if file.path != "Dockerfile" or file.content is None:
        return file
    built = rf"^FROM \S+ AS {stage}\n(?:(?!FROM ).*\n)*"
    text = re.sub(built, f"FROM {image} AS {stage}\n\n", file.content.decode(), flags=re.MULTILINE)
    body = text.encode()
    return replace(file, content=body, size=len(body), sha256="")


def _buildkit(engine: Engine, builder: Builder, order: Order, environ: Mapping[str, str], job: _Job) -> str:
    watch = _Watch(tell=job.tell)
    with tempfile.TemporaryDirectory(prefix="kernelguard-") as folder:
        result = Path(folder, "iid")
        command = buildkit_command(builder, order, result)
        env = {**environ, **({"DOCKER_BUILDKIT": "1"} if builder is Builder.BUILDKIT else {})}
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )
        except OSError as error:
            raise UndeterminedError(f"docker cannot be started: {error}", hint="--builder legacy") from error
        feeder = threading.Thread(target=_feed, args=(process, order.files), daemon=True)
        feeder.start()
        late = threading.Event()
        timer = threading.Timer(max(job.deadline - time.monotonic(), 0.1), _stop, args=(process, late))
        timer.start()
        try:
            assert process.stdout is not None  # noqa: S101  # PIPE was asked for
            with process.stdout as output:
                for raw in output:
                    watch.buildkit(plain(raw.decode("utf-8", "replace")).rstrip("\n"))
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        finally:
            timer.cancel()
            feeder.join(1.0)
        if late.is_set():
            raise _late(watch, job.timeout)
        if code != 0:
            raise watch.failure(watch.complaint or f"docker build ended with {code}")
        # With attestations the id in the file is the index's; the tag is what the engine knows.
        facts = engine.image(order.tag) if order.tag else engine.image(result.read_text("utf-8").strip())
    if facts is None:
        raise ToolError(
            "the image was built, and the engine does not have it",
            hint="a buildx builder of the driver docker-container needs --load: docker buildx use default",
        )
    return facts.id


def buildkit_command(builder: Builder, order: Order, result: Path) -> list[str]:
    """The command line of a BuildKit build whose context comes on standard input."""
    command = ["docker", "buildx", "build", "--load"] if builder is Builder.BUILDX else ["docker", "build"]
    command += ["--progress=plain", f"--iidfile={result}"]
    command += [f"--label={name}={value}" for name, value in order.labels.items()]
    if order.tag:
        command.append(f"--tag={order.tag}")
    if order.target:
        command.append(f"--target={order.target}")
    if order.network:
        command.append(f"--network={order.network}")
    if order.no_cache:
        command.append("--no-cache")
    if builder is Builder.BUILDX:
        # Both need a store that keeps them; without one buildx refuses.
        command += ["--sbom=true", "--provenance=mode=max"] if order.sbom else ["--provenance=false"]
        if order.cache_ref:
            command += [f"--cache-from=type=registry,ref={order.cache_ref}"]
            command += [f"--cache-to=type=registry,ref={order.cache_ref},mode=max"]
    return [*command, "-"]


def _feed(process: subprocess.Popen[bytes], files: Sequence[ContextFile]) -> None:
    assert process.stdin is not None  # noqa: S101  # PIPE was asked for
    try:
        with process.stdin as pipe:
            for chunk in tar_stream(files):
                pipe.write(chunk)
    except (BrokenPipeError, KernelguardError):
        # The builder ended first, or a file changed: either way the builder says that its context broke off.
        process.terminate()


def _stop(process: subprocess.Popen[bytes], late: threading.Event) -> None:
    late.set()
    process.terminate()


def _late(watch: _Watch, timeout: float) -> UndeterminedError:
    return UndeterminedError(
        f"the build did not end within {timeout:g} s; it was at: {watch.step or 'its first step'}",
        hint="--timeout 14400, if it is only slow",
    )


@dataclass(slots=True, kw_only=True)
class _Watch:
    """What a build is at, and its last lines."""

    tell: Tell
    made: list[str] = field(default_factory=list)
    """Gets the id of each image that a step made."""
    bases: list[str] = field(default_factory=list)
    """Ids of the images that stages start from."""
    step: str = ""
    complaint: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    _steps: dict[str, str] = field(default_factory=dict)
    _rest: str = ""

    def classic(self, text: str) -> None:
        """A piece of the classic builder's output; lines may come in pieces."""
        whole = self._rest + plain(text)
        *lines, self._rest = whole.split("\n")
        for line in lines:
            found = _STEP.match(line)
            if found is not None:
                self._begin(f"{found['number']}/{found['total']} {found['what']}")
            elif line.startswith(" ---> "):
                image_id = _STEP_IMAGE.match(line)
                if image_id is not None:
                    # After FROM it is the base, which is somebody else's.
                    (self.bases if " FROM " in self.step[:12] else self.made).append(image_id["id"])
            elif line.strip() and not line.startswith("Removing intermediate container "):
                self._say(line)

    def buildkit(self, line: str) -> None:
        """A line of BuildKit's plain progress."""
        if line.startswith(("ERROR:", "error:", "failed to solve")):
            self.complaint = line
            return
        found = _BUILDKIT_STEP.match(line)
        if found is not None:
            self._steps[found["id"]] = f"{found['number']}/{found['total']} {found['what']}"
            self._begin(self._steps[found["id"]])
            return
        told = _BUILDKIT_LINE.match(line)
        if told is not None and told["text"].strip():
            if told["id"] in self._steps:
                self.step = self._steps[told["id"]]
            self._say(told["text"])

    def _begin(self, step: str) -> None:
        self.step = step
        self.lines.clear()
        self.tell(f"step {step}")

    def _say(self, line: str) -> None:
        self.lines.append(line)
        self.tell(f"  {line}")

    def failure(self, text: str) -> KernelguardError:
        """What to say of a step that failed."""
        text = plain(text).strip()
        told = "\n".join([text, *(f"  {line}" for line in self.lines)])
        known = build_error(told, "building")
        if known is not None:
            return type(known)(f"{known.message}", hint=known.hint)
        short = self.step if len(self.step) < 160 else f"{self.step[:157]}..."
        if _KILLED.search(text):
            return ToolError(
                f"the step {short} was killed, as the kernel does when memory runs out:\n{told}",
                hint="give the engine more memory; for a source build also --max-jobs 2",
            )
        if "DO NOT MATCH THE HASHES" in told:
            return ToolError(
                f"a file in the image is not what was locked:\n{told}",
                hint="remove it from the cache and build again; a new lock takes what is there now",
            )
        what = f"the step {short}" if short else "the build"
        return ToolError(f"{what} failed:\n{told}", hint=_hint(told))


def _hint(told: str) -> str:
    if "Temporary failure resolving" in told or "Could not resolve" in told:
        return "the stage `system` needs a network: --network host, or a base that has gcc and Python.h: --base IMAGE"
    return "the lines above are the step's own; --dry-run shows the whole Dockerfile"
