"""Where does this machine's pip look? Its configured index, extra indexes and folders, read by asking pip itself."""

from __future__ import annotations

import ast
import re
import subprocess
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from kernelguard.errors import ToolError, UndeterminedError

_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipConfig:
    """What pip's configuration files and environment variables add up to."""

    index_url: str
    """Without a slash at the end."""
    extra_index_urls: tuple[str, ...]
    find_links: tuple[str, ...]


def pip_config(python: Path) -> PipConfig:
    """Ask the pip of `python`. Environment variables win over files, `[install]` over `[global]`, as in pip.

    Raises:
        ToolError: that interpreter has no working pip.
        UndeterminedError: the index that pip uses by default could not be read out of its help.
    """
    settings: dict[str, str] = {}
    listed: dict[int, dict[str, str]] = {0: {}, 1: {}, 2: {}}
    for line in _pip(python, "config", "list").splitlines():
        shape = re.fullmatch(r"(?P<section>:env:|[\w-]+)\.(?P<key>[\w-]+)=(?P<value>.*)", line)
        if shape is None:
            continue
        strength = {"global": 0, "install": 1, ":env:": 2}.get(shape["section"])
        if strength is not None:
            listed[strength][shape["key"]] = _value(shape["value"])
    for strength in (0, 1, 2):
        settings |= listed[strength]
    index = settings.get("index-url") or _default_index(python)
    return PipConfig(
        index_url=index.rstrip("/"),
        extra_index_urls=tuple(url.rstrip("/") for url in settings.get("extra-index-url", "").split()),
        find_links=tuple(settings.get("find-links", "").split()),
    )


def local_folder(place: str) -> Path | None:
    """The folder that a find-links entry or file URL names; None: it names something else, or is not there."""
    parts = urllib.parse.urlsplit(place)
    if parts.scheme not in {"", "file"}:
        return None
    folder = Path(urllib.parse.unquote(parts.path)) if parts.scheme else Path(place)
    return folder if folder.is_dir() else None


def _value(text: str) -> str:
    # pip prints values as Python literals.
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
    return value if isinstance(value, str) else text


def _default_index(python: Path) -> str:
    text = re.sub(r"\s+", " ", _pip(python, "install", "--help"))
    shape = re.search(r"--index-url <url>.*?\(default (https?://[^)\s]+)\)", text)
    if shape is None:
        raise UndeterminedError(
            f"the default index of {python}'s pip could not be read", hint="name it: --index URL, or PIP_INDEX_URL"
        )
    return shape[1]


def _pip(python: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [str(python), "-m", "pip", *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolError(f"{python} -m pip {arguments[0]} failed: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ToolError(f"{python} -m pip {arguments[0]} failed: {last[0]}")
    return done.stdout
