"""Completion as bash and zsh really do it: installed by the command, asked by the shell."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def variables(home: Path) -> dict[str, str]:
    return {"PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8"}


BASH = """
source ~/.bashrc
asked() {
  COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
  _kernelguard_completion kernelguard "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
  echo "${COMPREPLY[*]}"
}
complete -p kernelguard >/dev/null
asked kernelguard pro
asked kernelguard check --lev
asked kernelguard check --level i
asked kernelguard matrix sh
asked kernelguard explain fla-grouped
"""


def test_bash(tmp_path: Path) -> None:
    home = variables(tmp_path)
    made = subprocess.run(
        ["bash", "-c", "kernelguard --install-completion; exit $?"],
        env=home,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "installed" in made.stdout
    done = subprocess.run(["bash", "-ec", BASH], env=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    offered = [set(line.split()) for line in done.stdout.splitlines()]
    assert offered == [{"profile", "promote"}, {"--level"}, {"import", "interpreted"}, {"show"}, {"fla-grouped-values"}]


class Zsh:
    """A person at a zsh."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.execvpe("zsh", ["zsh", "-i"], {**environ, "PS1": "ready> "})  # noqa: S606
        self.text = ""

    def types(self, keys: str, until: str) -> str:
        """Send keys and read until the screen shows it; what came."""
        os.write(self.terminal, keys.encode())
        self.text, deadline = "", time.monotonic() + 120
        while until not in self.text:
            assert time.monotonic() < deadline, self.text
            if select.select([self.terminal], [], [], 1)[0]:
                self.text += os.read(self.terminal, 65536).decode(errors="replace")
        return self.text

    def leaves(self) -> None:
        os.write(self.terminal, b"\x15exit\n")
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


@pytest.mark.thorough
def test_zsh(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh: .ci/browser.sh installs it")
    home = variables(tmp_path)
    install = ["zsh", "-fc", "kernelguard --install-completion; exit $?"]
    subprocess.run(install, env=home, capture_output=True, text=True, check=True)
    shell = Zsh(home)
    shell.types("", "ready> ")
    # The first Tab of a new zsh only loads what typer installed; the second completes.
    shell.types("kernelguard surv\t\t", "ey ")
    shell.types("\x15kernelguard check --level inter\t", "interpreted ")
    shell.types("\x15kernelguard matrix re\t", "refresh ")
    shell.leaves()
