"""What exactly is built from a lock? The Dockerfile, the whole context, and one digest over both. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelguard import data
from kernelguard.errors import InputError, UndeterminedError
from kernelguard.image.bases import keeps_toolkit, needs_toolkit, toolkit_version
from kernelguard.image.fetch import Wanted, place_of
from kernelguard.image.labels import STAGE
from kernelguard.image.values import Builder, ContextFile, Recipe, Resolved
from kernelguard.lock.check import HUB_FOLDER, local_kernels
from kernelguard.lock.document import digest as lock_digest
from kernelguard.lock.document import dumps, to_document
from kernelguard.lock.values import Lock, Pin, Role, SourcePin

VENV = "/opt/venv"
PYTHON = f"{VENV}/bin/python"
OURS = "/opt/kernelguard/lib"
LOCK = "/opt/kernelguard/kernelguard.lock"
CACHE = "/opt/kernelguard/cache"
UID = 1000
GROUPS = ("torch", "others")
"""Of wheels, each a layer: what torch brings changes seldom and weighs most."""
_QUIET = "--disable-pip-version-check --no-cache-dir --no-input"
_INSTALL = f"--root-user-action=ignore {_QUIET} --no-compile --no-index --no-deps"
_FORCED = ("CAUSAL_CONV1D_FORCE_BUILD", "FLASH_ATTENTION_FORCE_BUILD", "MAMBA_FORCE_BUILD")
"""Their setup.py would rather download a wheel of which nobody has a hash."""
_SHIPPED = ("workers", "guard")
"""The rooms that need nothing but the standard library and torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What a recipe needs beside the lock."""

    tools: tuple[ContextFile, ...] = ()
    """Wheels of what the source builds require, as `tools/<name>`."""
    sources: tuple[tuple[str, tuple[ContextFile, ...]], ...] = ()
    """Place below `sources/` and files of each source build, in the lock's order."""
    added: tuple[tuple[str, tuple[ContextFile, ...]], ...] = ()
    """Name below /workspace and files of each folder that the user adds."""
    max_jobs: int | None = None


def make_recipe(
    lock: Lock,
    *,
    name: str,
    base: Resolved,
    toolkit: Resolved | None,
    builder: Builder,
    cache: Path,
    extras: Extras | None = None,
) -> Recipe:
    """The recipe of a lock. `name`: the lock's file name. `cache`: where fetched files are (to be) found.

    Raises:
        InputError: a source build contradicts the lock's torch, or has no GPU archs to build for.
        UndeterminedError: Jinja2 is not installed.
    """
    more = extras or Extras()
    _check_sources(lock)
    ours = tuple(_ours(lock))
    files = (
        *(_wheel(pin, cache) for pin in lock.pins),
        *(_text(f"wheels/{group}/requirements.txt", offline_requirements(lock, group)) for group in GROUPS),
        _text("settle.py", (data.docker() / "settle.py").read_text("utf-8")),
        *ours,
        *_hub(lock, cache),
        *more.tools,
        *(_below(f"sources/{place}", f) for place, fs in more.sources for f in fs),
        *_source_requirements(lock, more),
        *(_below(f"add/{folder}", f) for folder, fs in more.added for f in fs),
    )
    dockerfile = _render(lock, name=name, base=base, toolkit=toolkit, builder=builder, extras=more)
    files = (_text("Dockerfile", dockerfile), *files)
    return Recipe(
        dockerfile=dockerfile,
        files=files,
        digest=_digest(files),
        python=PYTHON,
        cache=CACHE,
        user=f"{UID}:{UID}",
    )


def digest_of(lock: Lock) -> str:
    """The lock's digest of itself."""
    return lock_digest(to_document(lock))


def wanted_files(lock: Lock) -> tuple[Wanted, ...]:
    """Every file that has to be fetched before building."""
    wheels = (Wanted(url=p.url, filename=p.filename, sha256=p.sha256, size=p.size) for p in lock.pins)
    sources = (
        Wanted(url=p.url, filename=_file_of(p.url), sha256=p.sha256) for p in lock.sources if p.sha256 and not p.commit
    )
    return (*wheels, *sources)


def _group(pin: Pin) -> str:
    return "torch" if pin.role is Role.TORCH else "others"


def offline_requirements(lock: Lock, group: str) -> str:
    """As the lock's requirements.txt, for an installer without a network; one of `GROUPS`."""
    lines = []
    for pin in lock.pins:
        if _group(pin) != group:
            continue
        what = f"{pin.name} @ file:///wheels/{group}/{pin.filename}" if pin.direct else f"{pin.name}=={pin.version}"
        lines.append(f"{what} --hash=sha256:{pin.sha256}\n")
    return "".join(lines)


def environment(lock: Lock) -> tuple[tuple[str, str], ...]:
    """The variables that a process in the image sees."""
    found = [("PATH", f"{VENV}/bin:$PATH"), ("VIRTUAL_ENV", VENV)]
    if keeps_toolkit(lock):
        found += [("CUDA_HOME", f"/usr/local/cuda-{toolkit_version(lock)}")]
    if lock.torch.cuda:
        # Both runtimes look at these; without the second, `compute` alone leaves out nvidia-smi.
        found += [("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")]
    found += [("TRITON_CACHE_DIR", CACHE), ("TRITON_CACHE_AUTOTUNING", "1"), ("FLA_CACHE_RESULTS", "1")]
    found += [("TILELANG_CACHE_DIR", f"{CACHE}/tilelang")]
    if lock.hub:
        found += [("LOCAL_KERNELS", local_kernels(lock, Path(VENV)))]
    return tuple(found)


def _render(
    lock: Lock, *, name: str, base: Resolved, toolkit: Resolved | None, builder: Builder, extras: Extras
) -> str:
    template = _template()
    sources = [
        {
            "name": pin.name,
            "version": pin.version,
            "archs": pin.archs,
            "environment": _source_environment(pin, extras.max_jobs),
            "place": place,
            "hashed": bool(pin.sha256 and not pin.commit),
        }
        for pin, (place, _) in zip(lock.sources, extras.sources, strict=False)
    ]
    # Today's BuildKit can take the network away from a single step. The classic builder, and BuildKit as it was before
    # Docker 23, only from a whole build: there the stage `system` is built first, and the rest in an offline one.
    text: str = template.render(
        lock_name=name,
        lock_digest=digest_of(lock),
        base=base.reference,
        base_name=base.name,
        toolkit=toolkit.reference if toolkit is not None and needs_toolkit(lock) else "",
        keep_toolkit=keeps_toolkit(lock),
        cuda=str(toolkit_version(lock) or ""),
        python=f"python{lock.target.python}",
        run="RUN --network=none" if builder is Builder.BUILDX else "RUN",
        sources=sources,
        cxx=bool(lock.sources) or keeps_toolkit(lock),
        hub=bool(lock.hub),
        hub_folder=HUB_FOLDER.as_posix(),
        added=[folder for folder, _ in extras.added],
        environment=environment(lock),
        ours=OURS,
        cache=CACHE,
        uid=UID,
        stage_label=f"{STAGE}=1",
        quiet=_QUIET,
        install=f"PYTHONPATH=/pip {PYTHON} -m pip install {_INSTALL}",
        settle=f"PYTHONHASHSEED=0 {PYTHON} /wheels/torch/settle.py",
        others=f"/layers/others{VENV}",
    )
    return text


def _template() -> Any:
    try:
        import jinja2  # noqa: PLC0415 - only where an image is built
    except ImportError as error:
        raise UndeterminedError(
            "Jinja2 is not installed, so no Dockerfile can be written",
            hint="pip install 'kernelguard-preflight[image]'",
        ) from error
    text = (data.docker() / "Dockerfile.j2").read_text("utf-8")
    made = jinja2.Environment(
        autoescape=False,  # noqa: S701 - a Dockerfile is no HTML
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return made.from_string(text)


def _check_sources(lock: Lock) -> None:
    """A source build that cannot come out right is refused before anything is fetched; every problem is named."""
    problems = []
    wanted = toolkit_version(lock)
    for pin in lock.sources:
        if pin.nvcc and wanted is None:
            problems.append(f"{pin.name} is built with nvcc {pin.nvcc}, and torch {lock.torch.version} is a CPU build")
        elif pin.nvcc and toolkit_of(pin.nvcc) != str(wanted):
            problems.append(
                f"{pin.name} is built with nvcc {pin.nvcc}, and torch {lock.torch.version} was built for CUDA "
                f"{wanted}: what they make cannot be loaded together"
            )
        if pin.nvcc and not pin.archs:
            problems.append(
                f"{pin.name} has no list of GPU archs: a build without a GPU would compile for whatever its setup.py "
                "takes, or fail"
            )
    if problems:
        raise InputError("; ".join(problems), hint="lock again for the GPU that will train: --target h100")


def toolkit_of(nvcc: str) -> str:
    """major.minor of an nvcc's version."""
    return ".".join(nvcc.split(".")[:2])


def _source_environment(pin: SourcePin, max_jobs: int | None) -> list[tuple[str, str]]:
    found = [(name, "TRUE") for name in _FORCED]
    if pin.archs and pin.arch_variable:
        found.append((pin.arch_variable, ";".join(pin.archs)))
    if max_jobs is not None:
        found.append(("MAX_JOBS", str(max_jobs)))
    return found


def _source_requirements(lock: Lock, extras: Extras) -> Iterator[ContextFile]:
    for pin, (place, files) in zip(lock.sources, extras.sources, strict=False):
        if pin.sha256 and not pin.commit:
            text = f"{pin.name} @ file:///sources/{place}/{files[0].path} --hash=sha256:{pin.sha256}\n"
            yield _text(f"sources/{place}/requirements.txt", text)
    if extras.tools:
        lines = (f"file:///tools/{Path(f.path).name} --hash=sha256:{f.sha256}\n" for f in extras.tools)
        yield _text("tools/requirements.txt", "".join(lines))


def _wheel(pin: Pin, cache: Path) -> ContextFile:
    wanted = Wanted(url=pin.url, filename=pin.filename, sha256=pin.sha256)
    return ContextFile(
        path=f"wheels/{_group(pin)}/{pin.filename}",
        source=place_of(wanted, cache),
        sha256=pin.sha256,
        size=pin.size or 0,
    )


def _hub(lock: Lock, cache: Path) -> Iterator[ContextFile]:
    for pin in lock.hub:
        for file in pin.files:
            wanted = Wanted(url="", filename=Path(file.path).name, sha256=file.sha256)
            yield ContextFile(
                path=f"hub/{pin.repository}/build/{pin.variant}/{file.path}",
                source=place_of(wanted, cache),
                sha256=file.sha256,
                size=file.size,
            )


def _ours(lock: Lock) -> Iterator[ContextFile]:
    yield _text("kernelguard/kernelguard.lock", dumps(lock))
    package = data.package()
    yield _text("kernelguard/lib/kernelguard/__init__.py", (package / "__init__.py").read_text("utf-8"))
    for room in _SHIPPED:
        for file in sorted((package / room).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                path = f"kernelguard/lib/kernelguard/{file.relative_to(package).as_posix()}"
                body = file.read_bytes()
                yield ContextFile(path=path, content=body, sha256=hashlib.sha256(body).hexdigest(), size=len(body))


def _text(path: str, text: str) -> ContextFile:
    body = text.encode()
    return ContextFile(path=path, content=body, sha256=hashlib.sha256(body).hexdigest(), size=len(body))


def _below(folder: str, file: ContextFile) -> ContextFile:
    return ContextFile(
        path=f"{folder}/{file.path}",
        content=file.content,
        source=file.source,
        sha256=file.sha256,
        size=file.size,
        mode=file.mode,
    )


def _digest(files: Sequence[ContextFile]) -> str:
    lines = sorted(f"{file.path} {file.sha256 or _hash(file)} {file.mode:o}\n" for file in files)
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _hash(file: ContextFile) -> str:
    if file.source is None:
        return hashlib.sha256(file.content or b"").hexdigest()
    try:
        with file.source.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{file.source} cannot be read: {error.strerror}") from error


def _file_of(url: str) -> str:
    from kernelguard.lock.files import file_name_of  # noqa: PLC0415

    return file_name_of(url)
