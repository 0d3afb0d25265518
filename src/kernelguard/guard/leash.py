"""Run one script so that it dies with the process that started it: `python leash.py PARENT SCRIPT ARGUMENTS...`.

A rank can be killed at any moment. A probe that it started must not go on holding the GPU after that.
"""
# The same few path calls as in the workers, without pathlib.
# ruff: noqa: PTH118, PTH120

from __future__ import annotations

import os
import sys

# `python file.py` puts the file's folder in front of sys.path; a training script would not see it there.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

_PR_SET_PDEATHSIG = 1
_SIGKILL = 9


def _hold(parent: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != parent:
        # It died before the line above.
        os._exit(1)


def main() -> None:
    """Hold on to the parent, then become the script."""
    import runpy

    _hold(int(sys.argv[1]))
    script = os.path.join(sys.argv[2])
    sys.argv[:] = sys.argv[2:]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
