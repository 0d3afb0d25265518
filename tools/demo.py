"""`make demo`: check the 27B example here and for an H100, and hold both to the exit code they must give."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = "examples/qwen3.8-27b"


def installed(distribution: str) -> bool:
    """Whether this environment, which is the one that the demo observes, has the distribution."""
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


def expected_here() -> tuple[int, str]:
    """The exit code that the check of this machine must give, and why."""
    if not (installed("causal-conv1d") and (installed("flash-linear-attention") or installed("fla-core"))):
        return 1, "a definite no: the kernels that this model trains on are not installed here"
    return 3, "cannot be determined: gradients are verified on a GPU only, which this version does not do yet"


def demonstrate(arguments: list[str], code: int, why: str) -> bool:
    """Run one check, show its report, and say whether the exit code is the one it must be."""
    shown = " ".join(["kernelguard", "check", *arguments])
    print(f"\n$ {shown}\n", flush=True)
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix}
    command = [str(Path(sys.executable).parent / "kernelguard"), "check", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if done.returncode != code:
        print(f"\ndemo: exit code {done.returncode}, but it has to be {code} ({why})", file=sys.stderr)
        return False
    print(f"\ndemo: exit code {code} is right: {why}", flush=True)
    return True


def main() -> int:
    """Both checks; 0 when both gave the right exit code."""
    here, why = expected_here()
    results = [
        demonstrate([MODEL], here, why),
        demonstrate(
            [MODEL, "--target", "h100"],
            3,
            "cannot be determined: nobody has seen the wheel of causal-conv1d",
        ),
    ]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
