"""Which packages does a RUN of a Dockerfile install, and are they compiled? Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kernelguard.image.dockerfile import Instruction, Stage

_INSTALL = re.compile(
    r"\b(?:pip3?|uv\s+pip|python[\d.]*\s+-m\s+pip|uv)\s+(?P<verb>install|sync|add)\b(?P<rest>[^;&|]*)", re.IGNORECASE
)
_SPEC = re.compile(
    r"^['\"]?(?P<name>[A-Za-z][\w.-]*)(?:\[[^\]]*\])?\s*(?:(?P<op>===?|>=|~=|<=|<|>)\s*(?P<version>[\w.+*!-]+))?"
)
SOURCE_ONLY = frozenset({"apex", "causal-conv1d", "flash-attn", "mamba-ssm", "transformer-engine", "grouped-gemm"})
"""On the package index these are sdists: pip compiles them, unless it is given a wheel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Install:
    """One package that a RUN installs."""

    name: str
    operator: str
    version: str
    text: str
    """The whole RUN."""
    line: int
    options: str
    environment: Mapping[str, str]
    url: str = ""

    @property
    def pinned(self) -> str:
        """The exact version; empty: it is open."""
        return self.version if self.operator in {"==", "==="} else ""

    @property
    def from_source(self) -> bool:
        """Whether pip compiles it."""
        if self.url:
            return not self.url.split("#")[0].split("?")[0].endswith(".whl")
        return self.name in SOURCE_ONLY and "--only-binary" not in self.options and "--find-links" not in self.options


def installs_of(step: Instruction) -> Iterator[Install]:
    """The packages that one instruction installs, in its order."""
    if step.word != "RUN":
        return
    for command in _INSTALL.finditer(step.text):
        words = command["rest"].split()
        options = " ".join(w for w in words if w.startswith("-"))
        takes_value = False
        for word in words:
            if takes_value or word.startswith("-"):
                takes_value = word in {
                    "-r",
                    "-c",
                    "-i",
                    "-f",
                    "--index-url",
                    "--extra-index-url",
                    "--find-links",
                    "-t",
                    "--target",
                    "--requirement",
                    "--constraint",
                    "--python",
                    "--torch-backend",
                }
                continue
            plain = word.strip("'\"")
            is_url = "://" in plain or plain.endswith(".whl")
            name_of = re.search(
                r"([A-Za-z][\w.-]*?)(?:-\d[^/]*\.whl|\.git|\.tar\.gz)?(?:@[^/]*)?(?:#.*)?$", plain.rpartition("/")[2]
            )
            shape = _SPEC.match(plain)
            name = (name_of[1] if name_of else plain) if is_url else shape["name"] if shape else ""
            if not name:
                continue
            yield Install(
                name=name.lower().replace("_", "-"),
                operator=(shape["op"] or "") if shape and not is_url else "",
                version=(shape["version"] or "") if shape and not is_url else "",
                text=step.text,
                line=step.line,
                options=f"{options} {command['rest']}",
                environment=step.environment,
                url=plain if is_url else "",
            )


def all_installs(stages: Sequence[Stage]) -> list[Install]:
    """Those of stages, in their order."""
    return [i for stage in stages for step in stage.instructions for i in installs_of(step)]
