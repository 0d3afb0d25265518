"""`python -m kernelguard.guard -- SCRIPT ARGS...` or `-- -m MODULE ARGS...`: any training script, behind the guard."""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from typing import Any

from kernelguard.guard.after_import import after_import
from kernelguard.guard.preflight import DONE, preflight

_USAGE = "usage: python -m kernelguard.guard -- SCRIPT ARGS...   or   -- -m MODULE ARGS..."


def main(argv: list[str]) -> None:
    """Preflight, then the script in this very process."""
    rest = argv[1:] if argv[:1] == ["--"] else argv
    if not rest or (rest[0] == "-m" and len(rest) < 2) or (rest[0].startswith("-") and rest[0] != "-m"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2)
    if rest[0] != "-m" and not os.path.exists(rest[0]):  # noqa: PTH110  # nothing is imported that the script did not
        print(f"kernelguard: there is no script {rest[0]}", file=sys.stderr)
        raise SystemExit(2)
    outcome = preflight()
    if outcome.code:
        sys.stderr.flush()
        raise SystemExit(outcome.code)
    os.environ[DONE] = str(os.getpid())
    # The script imports torch when it wants to, after it has set what it wants to set.
    after_import("torch", _watch)
    _become(rest)


def _watch() -> None:
    from kernelguard.guard import watch

    seen = watch()
    atexit.register(_say_if_nothing_was_seen, seen)


def _say_if_nothing_was_seen(watch: Any) -> None:
    if watch.state == "waiting":
        what = "no model that is known here was trained in this process, so nothing was looked at while training"
        # One write: other ranks write there too.
        sys.stderr.write(f"kernelguard: note: {what}\n")


def _become(rest: list[str]) -> None:
    """Run the script as `python SCRIPT ARGS` would."""
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = rest
    # `python -m kernelguard.guard` has put the working folder first; `python SCRIPT` has the script's.
    if not getattr(sys.flags, "safe_path", 0):
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))  # noqa: PTH100, PTH120
    # Absolute, as Python makes `__file__`: a script may change its folder and look for a file beside itself.
    runpy.run_path(os.path.abspath(rest[0]), run_name="__main__")  # noqa: PTH100


if __name__ == "__main__":
    main(sys.argv[1:])
