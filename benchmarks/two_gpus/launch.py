"""The guarded launch on one machine: lock and verdict of what is installed, a run with a checkpoint, one rank changed.

    launch.py --out OUT --site SITE [--work WORK] [--model CONFIG] [--level gpu|import] -- -m kernelguard_train ...

SITE is the folder on PYTHONPATH that holds fla. Nothing is fetched: the lock is recorded from the environment, the
verdict measured here (or given with --verdict, which admits only if it was measured on the same). Then launches of
SCRIPT, which is the bundled trainer with its configuration:

    train     a run to its end
    changed   rank 1 alone finds another fla: every rank has to end with 78, and the outcome to name it
    killed    a run that saves every third step; once a later step is done its last rank is killed (137)
    resumed   two runs go on from that checkpoint, on as many ranks and on one, which exports the model

What `resumed` has to show: the losses that the killed run had after its checkpoint, and of one rank those of several,
within `compare_losses`. Losses that changed by less than four times that since the checkpoint could not show a fault,
which is said. Prints one JSON object and writes it to OUT.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import rerecord

_TAIL = 25
_SAVED = 3
"""A run that will be killed saves every so many steps, and goes on for so many."""
_STEADY = ("optim.warmup=0", "optim.decay=constant")
"""Runs of another length would have another learning rate at the same step."""
_ROUNDING = 2.0**-9


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
    parser.add_argument("--only", default="verify,lock,train,changed,killed,resumed", help="the steps to do")
    parser.add_argument(
        "--small", action="append", default=[], help="a setting of the runs of killed and resumed: model.layers=4"
    )
    parser.add_argument("--kill-seconds", type=float, default=240.0, help="until the run to be killed got far enough")
    parser.add_argument("script", nargs="+")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    given.work.mkdir(parents=True, exist_ok=True)
    bench = Bench(given)
    steps = {"verify": bench.verify, "lock": bench.lock, "train": bench.train, "changed": bench.changed,
             "killed": bench.killed, "resumed": bench.resumed}  # fmt: skip
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

    def killed(self) -> None:
        """A run whose last rank dies after a checkpoint."""
        output = self.given.work / "killed"
        shutil.rmtree(output, ignore_errors=True)
        more = [*_STEADY, *self.given.small, f"train.output={output}", f"checkpoint.every={_SAVED}", "train.steps=99"]
        row = self.found["killed"] = {"code": None, "expected": 137}
        words = self._words(self.given.work / "run-killed", self.given.processes, more)
        began = time.monotonic()
        with (self.given.out / "killed.txt").open("w") as log:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
            while not (self._saved(output) and max(losses(output), default=0) > self._saved(output)):
                if process.poll() is not None or time.monotonic() - began > self.given.kill_seconds:
                    break
                time.sleep(0.02)
            else:
                row["after_seconds"] = round(time.monotonic() - began, 1)
                row["rank_killed"] = self.given.processes - 1
                os.kill(process_of_rank(process.pid, self.given.processes - 1), signal.SIGKILL)
                killed_at = time.monotonic()
                with suppress(subprocess.TimeoutExpired):
                    row["code"] = process.wait(timeout=120)
                    row["seconds_until_all_had_ended"] = round(time.monotonic() - killed_at, 1)
            if process.poll() is None:
                row["problem"] = "it did not end" if "rank_killed" in row else "no step after a checkpoint in time"
                process.terminate()
                process.wait()
        row |= {"checkpoint": self._saved(output), "losses": losses(output)}
        self._read(self.given.work / "run-killed", "killed")
        self.right = self.right and row["code"] == row["expected"]
        print(f"killed: {row['code']} after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)

    def resumed(self) -> None:
        """Two runs that go on where that one had saved."""
        killed = self.given.work / "killed"
        saved = self._saved(killed)
        before = losses(killed)
        rows: dict[int, dict[int, float]] = {}
        for ranks in dict.fromkeys((self.given.processes, 1)):
            name = f"resumed-{ranks}"
            output = self.given.work / name
            shutil.rmtree(output, ignore_errors=True)
            # Of the large checkpoint the files themselves, which no run changes; nothing else is needed to go on.
            place = Path("checkpoints", f"step-{saved:08d}")
            shutil.copytree(killed / place, output / place, copy_function=os.link)
            more = [
                *_STEADY,
                *self.given.small,
                f"train.output={output}",
                f"train.steps={saved + _SAVED}",
                "checkpoint.every=0",
            ]
            more += ["checkpoint.at_end=false", f"checkpoint.export={str(ranks == 1).lower()}"]
            self._launch(name, self.given.work / f"run-{name}", expect=0, processes=ranks, more=more)
            self._read(self.given.work / f"run-{name}", name)
            rows[ranks] = self.found[name]["losses"] = losses(output)
            exported = sorted((output / "model").glob("*.safetensors"))
            if ranks == 1:
                self.found[name]["exported_bytes"] = sum(path.stat().st_size for path in exported)
                self.right = self.right and bool(exported)
        several, one = rows[self.given.processes], rows[1]
        found = compare_losses(before, several, one, saved, trained_tokens(killed))
        self.found["resumed"] = found
        self.right = self.right and found["passed"]

    @staticmethod
    def _saved(output: Path) -> int:
        """The step of the newest whole checkpoint; 0: none."""
        steps = [int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-????????")]
        return max(steps, default=0)

    def _launch(
        self, name: str, run_dir: Path, *, expect: int, processes: int = 0, more: Sequence[str] = (), **environ: str
    ) -> None:
        words = self._words(run_dir, processes or self.given.processes, more)
        self._run(name, words, expect=expect, **environ)

    def _words(self, run_dir: Path, processes: int, more: Sequence[str]) -> list[str]:
        """The command line of a launch; `more` are settings of the trainer."""
        shutil.rmtree(run_dir, ignore_errors=True)
        flags = ["--verdict", self.verdict, "--processes", str(processes), "--run-dir", run_dir]
        flags += ["--model", self.given.model]
        flags += ["--probes", f"{self.given.probe_seconds:g}"]
        if self.given.warm_cache is not None and any(self.given.warm_cache.glob("*")):
            flags += ["--warm-cache", self.given.warm_cache]
        for kernel in self.given.accept_unmeasured:
            flags += ["--accept-unmeasured", kernel]
        if self.given.level != "gpu":
            flags += ["--test-only-accept-level", self.given.level]
        return self._command("launch", self.lock_file, *flags, "--", *self.given.script, *more)

    def _step(self, name: str, *arguments: str | Path, expect: int) -> None:
        self._run(name, self._command(*arguments), expect=expect)

    @staticmethod
    def _command(*arguments: str | Path) -> list[str]:
        words = [str(word) for word in arguments]
        # Before `--`, behind the command: the interpreter that is looked into is the one that trains.
        words[2:2] = ["--python", sys.executable]
        return [sys.executable, "-c", "from kernelguard.cli import main; main()", *words]

    def _run(self, name: str, command: Sequence[str], *, expect: int, **environ: str) -> None:
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
        kept = ("code", "summary", "seconds", "timings", "nodes_at_fault", "causes", "noted", "collectives")
        self.found[name]["outcome"] = {key: outcome[key] for key in kept if key in outcome}
        for path in run_dir.glob("*attestation.json"):
            shutil.copy(path, self.given.out / f"attestation-{name}.json")
        return outcome


def losses(output: Path) -> dict[int, float]:
    """By step; of one that was done twice, the second time."""
    path = output / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows}


def process_of_rank(pid: int, rank: int) -> int:
    """The process below `pid` that torchrun started as this rank.

    Raises:
        LookupError: there is none.
    """
    waiting = [pid]
    while waiting:
        one = waiting.pop(0)
        try:
            variables = Path(f"/proc/{one}/environ").read_bytes().split(b"\0")
            children = Path(f"/proc/{one}/task/{one}/children").read_text().split()
        except OSError:
            continue  # it ended meanwhile
        if f"LOCAL_RANK={rank}".encode() in variables:
            return one
        waiting += map(int, children)
    raise LookupError(f"no process below {pid} is rank {rank}")


def trained_tokens(output: Path) -> int:
    """Tokens that a step of the run trained, at most."""
    path = output / "steps.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    tokens = [0, *(json.loads(line).get("tokens", 0) for line in lines if line.endswith("\n"))]
    return max((after - before for before, after in pairwise(tokens)), default=0)


def compare_losses(
    killed: Mapping[int, float], several: Mapping[int, float], one: Mapping[int, float], saved: int, tokens: int
) -> dict[str, Any]:
    """Whether runs that went on from step `saved` have the losses of the killed one, and each other's.

    Relative to the loss, they may differ by `tokens` 2^-24 (the order in which that many losses are added up), and
    where the number of ranks is another, by 2^-9 of what the updates since the checkpoint changed the loss by: one rank
    sums gradients in float32, several round each batch's to bf16 (as in train_resume.py).
    """
    start = killed.get(saved, math.nan)
    summing = tokens * 2.0**-24
    found: dict[str, Any] = {"from_step": saved, "tokens": tokens}
    passed = min(several, default=0) == min(one, default=0) == saved + 1  # neither did a step that the checkpoint held
    for name, left, right, share in (("to_killed", killed, several, 0.0), ("one_to_several", several, one, _ROUNDING)):
        rows = {
            step: (abs(left[step] - right[step]) / abs(left[step]), summing + share * abs(1 - start / left[step]))
            for step in sorted(left)
            if step > saved and step in right
        }
        worst = max(rows, key=lambda step: rows[step][0] / max(rows[step][1], 1e-300), default=None)
        difference, tolerance = rows[worst] if worst is not None else (None, summing)
        found[name] = {"steps": list(rows), "difference": difference, "tolerance": tolerance}
        passed = passed and difference is not None and difference <= tolerance
    # What went on from other weights, or without the optimizer's state, would be off by about as much as the updates
    # since the checkpoint changed.
    last = several[max(several)] if several else start
    found["change_since_the_checkpoint"] = abs(1 - start / last) if last else 0.0
    found["can_show_a_fault"] = found["change_since_the_checkpoint"] > 4 * found["one_to_several"]["tolerance"]
    found["passed"] = passed
    return found


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
