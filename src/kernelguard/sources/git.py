"""Which commit does a git source mean?"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass

from packaging.version import Version

from kernelguard.errors import InputError, ToolError, UndeterminedError
from kernelguard.sources.values import Candidate, Kind, Known

_COMMIT = re.compile(r"[0-9a-f]{40}")
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GitSource:
    """A repository at a commit, a tag or a branch, to be built from source."""

    distribution: str
    url: str
    revision: str

    @property
    def name(self) -> str:
        """`git https://... @ v1.2`."""
        return f"git {self.url} @ {self.revision}"

    def find(self, distribution: str) -> tuple[Candidate, ...]:
        """See `Source`; a tag or branch is pinned to the commit that it names now."""
        if distribution != self.distribution:
            return ()
        commit = self.commit()
        return (
            Candidate(
                distribution=self.distribution,
                version=Version(f"0+git.{commit[:12]}"),
                kind=Kind.GIT,
                source=self.name,
                known=Known.SEEN,
                url=f"git+{self.url}@{commit}",
                commit=commit,
                built_for=None,
                needs_nvcc=True,
                evidence=f"{self.name} is {commit}",
            ),
        )

    def commit(self) -> str:
        """The 40 hex digits of the commit.

        Raises:
            InputError: the repository has no such revision.
            UndeterminedError: the repository does not answer.
            ToolError: git is not installed.
        """
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        command = [
            "git",
            "-c",
            "core.askPass=true",
            "ls-remote",
            "--",
            self.url,
            self.revision,
            f"{self.revision}^{{}}",
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except FileNotFoundError as error:
            raise ToolError("git is not installed", hint="apt-get install git") from error
        except subprocess.TimeoutExpired as error:
            raise UndeterminedError(f"{self.url} did not answer within {_TIMEOUT_S:g} s") from error
        if done.returncode != 0:
            raise UndeterminedError(f"{self.name} cannot be read: {done.stderr.strip().splitlines()[-1:]}")
        # Of an annotated tag the second line (^{}) is the commit, the first the tag object.
        lines = [line.split("\t") for line in done.stdout.splitlines()]
        if not lines:
            raise InputError(f"{self.url} has no revision {self.revision!r}", hint="name a commit, a tag or a branch")
        return str(lines[-1][0])
