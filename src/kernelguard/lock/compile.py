"""Which versions of everything else go with the chosen ones, and with which hashes? Asked of pip-tools or uv."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from kernelguard.errors import ToolError, UndeterminedError
from kernelguard.lock.tools import Tools
from kernelguard.sources.pipconfig import PipConfig

_UV_GLIBC = (17, 28, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40)
"""Minors of glibc 2.x that `uv --python-platform` has a name for."""
_UNREACHABLE = re.compile(
    r"(connection|connect error|timed? ?out|temporary failure|name or service|network|dns|unreachable"
    r"|certificate|max retries|error sending request|status code 5\d\d|\b50[234]\b)",
    re.IGNORECASE,
)


class Engine(StrEnum):
    """Who resolves the rest."""

    PIP_TOOLS = "pip-tools"
    """Resolves as pip on this very machine will."""
    UV = "uv"
    """Resolves for a platform that is not this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Where the result will be installed."""

    python: Version
    machine: str
    glibc: Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One line of the result."""

    name: str
    version: str
    """Empty: a direct URL."""
    url: str
    hashes: frozenset[str]
    """sha256 of every file that would do; empty: the engine wrote none."""


def compile_requirements(
    wanted: Sequence[str],
    *,
    engine: Engine,
    tools: Tools,
    config: PipConfig,
    platform: Platform,
    extra_indexes: Sequence[str] = (),
    find_links: Sequence[str] = (),
) -> tuple[Compiled, ...]:
    """Everything that has to be installed for `wanted`, with hashes. Only wheels: nothing is ever built.

    Raises:
        ToolError: the requirements exclude each other, or something has no wheel for this platform.
        UndeterminedError: an index or a file cannot be reached.
    """
    with tempfile.TemporaryDirectory(prefix="kernelguard-") as folder:
        source, target = Path(folder, "in.txt"), Path(folder, "out.txt")
        source.write_text("".join(f"{line}\n" for line in wanted), encoding="utf-8")
        if engine is Engine.PIP_TOOLS:
            command = _pip_tools(config, extra_indexes, find_links)
        else:
            command = _uv(config, platform, extra_indexes, find_links)
        try:
            tools.run(*command, f"--output-file={target}", str(source), cwd=Path(folder))
        except ToolError as error:
            if _UNREACHABLE.search(error.message):
                raise UndeterminedError(error.message, hint="is the network up? lock again when it is") from error
            raise
        return parse_compiled(target.read_text("utf-8"))


def _pip_tools(config: PipConfig, extra_indexes: Sequence[str], find_links: Sequence[str]) -> list[str]:
    # pip-tools reads pip's configuration too (certificates, proxies, constraints); where to look is said once more, so
    # that it is what was asked when the candidates were gathered.
    return [
        "piptools",
        "compile",
        # Shown only when it fails: the last file that it fetched tells which one was bad.
        "--verbose",
        "--generate-hashes",
        "--allow-unsafe",
        "--strip-extras",
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--no-emit-options",
        "--pip-args=--only-binary :all:",
        f"--index-url={config.index_url}",
        *(f"--extra-index-url={url}" for url in [*extra_indexes, *config.extra_index_urls]),
        *(f"--find-links={place}" for place in [*find_links, *config.find_links]),
    ]


def _uv(config: PipConfig, platform: Platform, extra_indexes: Sequence[str], find_links: Sequence[str]) -> list[str]:
    extra = [*extra_indexes, *config.extra_index_urls]
    return [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--generate-hashes",
        "--no-header",
        "--no-annotate",
        "--no-emit-index-url",
        "--no-emit-find-links",
        "--only-binary=:all:",
        "--no-python-downloads",
        # As pip does it; what may come from where is held to the hashes of the chosen files afterwards.
        "--index-strategy=unsafe-best-match",
        f"--default-index={config.index_url}",
        *(f"--index={url}" for url in extra),
        *(f"--find-links={place}" for place in [*find_links, *config.find_links]),
        f"--python-version={platform.python.major}.{platform.python.minor}",
        f"--python-platform={uv_platform(platform)}",
    ]


def uv_platform(platform: Platform) -> str:
    """The name that uv has for this platform: the newest one that is not newer than its glibc."""
    minor = max((m for m in _UV_GLIBC if m <= platform.glibc.minor), default=_UV_GLIBC[0])
    glibc = "manylinux2014" if minor == _UV_GLIBC[0] else f"manylinux_2_{minor}"
    return f"{platform.machine}-{glibc}"


def parse_compiled(text: str) -> tuple[Compiled, ...]:
    """Read a requirements file with hashes, as both engines write it."""
    found = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        plain = line.split("#")[0].strip() if line.lstrip().startswith("#") else line.strip()
        if not plain or plain.startswith("-"):
            continue
        what, *options = re.split(r"\s+--hash=", plain)
        requirement = Requirement(what.strip())
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        found.append(
            Compiled(
                name=canonicalize_name(requirement.name),
                version=exact[0] if exact else "",
                url=requirement.url or "",
                hashes=frozenset(option.strip().removeprefix("sha256:") for option in options),
            )
        )
    return tuple(sorted(found, key=lambda line: line.name))
