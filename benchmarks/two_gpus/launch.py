"""The guarded launch on one machine: lock and verdict of what is installed, a run with a checkpoint, one rank changed.

    launch.py --out OUT --site SITE [--work WORK] [--model CONFIG] [--level gpu|import] -- -m kernelguard_train ...

SITE is the folder on PYTHONPATH that holds fla. Nothing is fetched: the lock is recorded from the environment, the
verdict measured here (or given with --verdict, which admits only if it was measured on the same). Then two launches:
one that trains, and one in which rank 1 alone finds another fla. Prints one JSON object and writes it to OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import rerecord

_TAIL = 25


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--site", type=Path, required=True, help="the folder on PYTHONPATH that holds fla")
    parser.add_argument("--work", type=Path, default=Path("/tmp/kernelguard-launch-bench"))  # noqa: S108
    parser.add_argument("--model", default="examples/qwen3.8-27b/config.json")
    parser.add_argument("--level", choices=["gpu", "import"], default="gpu")
    parser.add_argument(
        "--verdict", type=Path, help="measured before, on the same kind of machine and the same packages"
    )
    parser.add_argument("--warm-cache", type=Path, help="a folder for what Triton compiles and tunes")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--train-config", default="train/examples/qwen3.5-27b-slice.toml", help="what lock and verdict are for"
    )
    parser.add_argument("--no-packed", action="store_true", help="instead: a run that does not pack")
    parser.add_argument("--verify-seconds", type=float, default=480.0)
    parser.add_argument(
        "--accept-unmeasured", action="append", default=[], help="admit this kernel where verify ran out of time"
    )
    parser.add_argument("--probe-seconds", type=float, default=240.0)
    parser.add_argument("--only", default="verify,lock,train,changed", help="the steps to do")
    parser.add_argument("script", nargs="+")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(given)
    steps = {"verify": bench.verify, "lock": bench.lock, "train": bench.train, "changed": bench.changed}
    for name in given.only.split(","):
        steps[name]()
    text = json.dumps(bench.found, indent=1)
    (given.out / "launch.json").write_text(text + "\n")
    print(text)
    return 0 if bench.right else 1


class Bench:
    """The steps, and what came out."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.found: dict[str, Any] = {"level": given.level, "processes": given.processes}
        self.right = True
        self.lock_file = given.work / "kernelguard.lock"
        self.verdict = given.verdict or given.work / "kernelguard.verdict.json"
        self.intent = ["--no-packed"] if given.no_packed else ["--train-config", given.train_config]

    def verify(self) -> None:
        """Measure the kernels, unless that was done before."""
        if self.given.verdict is not None:
            return
        flags = ["--level", self.given.level, "-o", self.verdict, "--timeout", f"{self.given.verify_seconds:g}"]
        if self.verdict.exists():
            # An earlier call on this machine ran out of time.
            flags += ["--resume", self.verdict]
        if self.given.warm_cache is not None:
            flags += ["--warm-cache", self.given.warm_cache]
        self._step("verify", "verify", self.given.model, *self.intent, *flags, expect=0)
        if self.verdict.exists():
            shutil.copy(self.verdict, self.given.out / "verdict.json")

    def lock(self) -> None:
        """Pin what is installed."""
        self._step("lock", "lock", self.given.model, "--record", *self.intent, "-o", self.lock_file, expect=0)

    def train(self) -> None:
        """A guarded run to its end."""
        run_dir = self.given.work / "run"
        self._launch("train", run_dir, expect=0)
        self._read(run_dir, "train")

    def changed(self) -> None:
        """The same, but rank 1 alone imports another fla."""
        other = self.given.work / "other-fla"
        make_other_fla(self.given.site, other)
        wrapper = self.given.work / "python-of-a-rank"
        wrapper.write_text(
            "#!/bin/bash\n"
            f'if [ "${{LOCAL_RANK:-}}" = 1 ]; then export PYTHONPATH="{other}:$PYTHONPATH"; fi\n'
            f'exec "{sys.executable}" "$@"\n'
        )
        wrapper.chmod(0o755)
        run_dir = self.given.work / "run-changed"
        # torchrun starts its workers with this program.
        self._launch("changed", run_dir, expect=78, PYTHON_EXEC=str(wrapper))
        outcome = self._read(run_dir, "changed")
        named = [row for row in outcome.get("differing", ()) if "fla" in row["field"]]
        self.found["changed"]["named"] = named
        self.right = self.right and any([1] in row["values"].values() for row in named)

    def _launch(self, name: str, run_dir: Path, *, expect: int, **environ: str) -> None:
        shutil.rmtree(run_dir, ignore_errors=True)
        flags = ["--verdict", self.verdict, "--processes", str(self.given.processes), "--run-dir", run_dir]
        flags += ["--model", self.given.model]
        flags += ["--probes", f"{self.given.probe_seconds:g}"]
        if self.given.warm_cache is not None and any(self.given.warm_cache.glob("*")):
            flags += ["--warm-cache", self.given.warm_cache]
        for kernel in self.given.accept_unmeasured:
            flags += ["--accept-unmeasured", kernel]
        if self.given.level != "gpu":
            flags += ["--test-only-accept-level", self.given.level]
        self._step(name, "launch", self.lock_file, *flags, "--", *self.given.script, expect=expect, **environ)

    def _step(self, name: str, *arguments: str | Path, expect: int, **environ: str) -> None:
        words = [str(word) for word in arguments]
        if words[0] in {"verify", "lock", "launch"}:
            # Before `--`, behind the command: the interpreter that is looked into is the one that trains.
            words[2:2] = ["--python", sys.executable]
        command = [sys.executable, "-c", "from kernelguard.cli import main; main()", *words]
        began = time.monotonic()
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, env=os.environ | environ
        )
        seconds = time.monotonic() - began
        (self.given.out / f"{name}.txt").write_text(done.stdout)
        right = done.returncode == expect
        self.right = self.right and right
        self.found[name] = {"code": done.returncode, "expected": expect, "seconds": round(seconds, 1)}
        print(f"{name}: exit {done.returncode} ({expect} expected) after {seconds:.1f} s", file=sys.stderr, flush=True)
        if not right:
            print("\n".join(done.stdout.splitlines()[-_TAIL:]), file=sys.stderr, flush=True)

    def _read(self, run_dir: Path, name: str) -> dict[str, Any]:
        try:
            outcome: dict[str, Any] = json.loads((run_dir / "outcome.json").read_text())
        except (OSError, ValueError) as error:
            self.found[name]["outcome"] = f"{type(error).__name__}: {error}"
            self.right = False
            return {}
        kept = ("code", "summary", "seconds", "timings", "nodes_at_fault", "causes", "noted")
        self.found[name]["outcome"] = {key: outcome[key] for key in kept if key in outcome}
        for path in run_dir.glob("*attestation.json"):
            shutil.copy(path, self.given.out / f"attestation-{name}.json")
        return outcome


def make_other_fla(site: Path, other: Path) -> None:
    """A copy of fla that says it is another version, with one line more in its code and a RECORD that fits."""
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir(parents=True)
    shutil.copytree(site / "fla", other / "fla", symlinks=True)
    with (other / "fla" / "__init__.py").open("a") as handle:
        handle.write("\nCHANGED = True\n")
    for info in site.glob("fla_core-*.dist-info"):
        changed = other / "fla_core-0.5.9.dist-info"
        shutil.copytree(info, changed)
        version = info.name.removeprefix("fla_core-").removesuffix(".dist-info")
        metadata = changed / "METADATA"
        metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", "\nVersion: 0.5.9\n"))
        record = changed / "RECORD"
        record.write_text(record.read_text().replace(info.name, changed.name))
        rerecord.rerecord(other, changed)


if __name__ == "__main__":
    sys.exit(main())
