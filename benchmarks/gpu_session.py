"""Runs a plan of measurements on a borrowed GPU machine: several GPUs at once, within a budget, losing nothing.

    python3 benchmarks/gpu_session.py start PLAN.toml... --work W [--budget 1500] [--only NAME,...]
    python3 benchmarks/gpu_session.py wait --work W --out OUT [--seconds 570]
    python3 benchmarks/gpu_session.py check PLAN.toml...

Where one command may take ten minutes and the machine goes back when none runs, `start` leaves a process of its own
session behind, and `wait`, called again and again, tells what happened and brings the results so far into OUT as one
archive. A job starts when the jobs it comes after are done and its GPUs and cores are free, in the plan's order or
that of --only; one that is ready and waits for GPUs is not overtaken by later ones that want GPUs too.

Several plans are one: the later ones' jobs come after the first's and may wait for them.

A plan is TOML: `[environment]` (variables, which may name earlier ones as $NAME) and one `[[job]]` for each, with
    name, command (for bash, run in the repository's root)
    after = [names]      jobs that have to be over, well or not
    needs = [names]      jobs that have to have ended well
    gpus = 1             GPUs of its own (CUDA_VISIBLE_DEVICES); 0: none
    cores = 4            cores of its own
    limit = 300          seconds after which it is ended
    least = 30           it is left out when less of the budget is left
Each job finds OUT (its own folder, brought back), WORK (shared, stays) and SECONDS_LEFT (its limit or what is left).
Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARGIN = 5.0
"""Seconds that a job is given to end after SIGTERM."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One measurement."""

    name: str
    command: str
    after: list[str] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    gpus: int = 0
    cores: int = 1
    limit: float = 600.0
    least: float = 20.0


class PlanError(Exception):
    """The plan cannot be run; the text says why."""


def read_plans(paths: list[Path]) -> tuple[dict[str, str], list[Job]]:
    """Variables and jobs of all of them, in this order.

    Raises:
        PlanError: every problem of the first plan that has any, one to a line.
    """
    variables: dict[str, str] = {}
    jobs: list[Job] = []
    for path in paths:
        own, more = read_plan(path, {job.name for job in jobs})
        clashing = [name for name in own if variables.get(name, own[name]) != own[name]]
        if clashing:
            raise PlanError(f"{path}: {', '.join(clashing)}: another value than in {paths[0]}")
        variables |= own
        jobs += more
    return variables, jobs


def read_plan(path: Path, above: Collection[str] = ()) -> tuple[dict[str, str], list[Job]]:
    """Variables and jobs; `above` are the names of jobs that other plans had before.

    Raises:
        PlanError: every problem of the file, one to a line.
    """
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error
    problems, jobs = [], []
    known = {f for f in Job.__dataclass_fields__ if f}
    for number, row in enumerate(document.get("job", []), 1):
        name = row.get("name", f"number {number}")
        problems += [f"job {name}: unknown key {key}; known: {', '.join(sorted(known))}" for key in row.keys() - known]
        problems += [f"job {name}: {key} is missing" for key in ("name", "command") if not row.get(key)]
        if not problems:
            jobs.append(Job(**row))
    seen = set(above)
    for job in jobs:
        # Only what stands above can be waited for, so a plan cannot wait for itself.
        for other in (*job.after, *job.needs):
            if other not in seen:
                problems.append(f"job {job.name}: waits for {other}, which is no job above it")
        if job.name in seen:
            problems.append(f"job {job.name}: two jobs have this name")
        seen.add(job.name)
    problems += [f"{key}: unknown table; known: environment, job" for key in document.keys() - {"environment", "job"}]
    if not jobs and not problems:
        problems.append("no [[job]]")
    if problems:
        raise PlanError("\n".join(f"{path}: {problem}" for problem in problems))
    return document.get("environment", {}), jobs


class Session:
    """Starts jobs, ends them, and writes down what happened."""

    def __init__(self, work: Path, variables: dict[str, str], jobs: list[Job], *, budget: float, gpus: int) -> None:
        self.work, self.jobs, self.end = work, jobs, time.time() + budget
        self.free_gpus = list(range(gpus))
        self.free_cores = sorted(os.sched_getaffinity(0))
        self.most = (gpus, len(self.free_cores))
        self.running: dict[str, tuple[subprocess.Popen[bytes], float, list[int], list[int]]] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        self.begun: dict[str, float] = {}
        self.variables: dict[str, str] = {"ROOT": str(ROOT), "WORK": str(work)}
        for name, text in variables.items():
            self.variables[name] = Template(str(text)).safe_substitute({**os.environ, **self.variables})

    def run(self) -> None:
        """Until every job is over or the budget is spent."""
        while True:
            for name in list(self.running):
                self._look_at(name)
            waiting = [job for job in self.jobs if job.name not in self.rows and job.name not in self.running]
            held = False
            for job in waiting:
                held |= self._consider(job, held=held)
            self._write(over=not self.running and not waiting)
            if not self.running and not waiting:
                return
            time.sleep(0.2)

    def _look_at(self, name: str) -> None:
        process, until, gpus, cores = self.running[name]
        code = process.poll()
        if code is None and time.time() < until:
            return
        seconds = round(time.time() - self.begun[name], 1)
        _end(process)  # also what it may have left in its process group
        outcome = "ended at its limit" if code is None else "done" if code == 0 else f"exit code {code}"
        self.rows[name] = {"seconds": seconds, "outcome": outcome}
        del self.running[name]
        self.free_gpus = sorted([*self.free_gpus, *gpus])
        self.free_cores = sorted([*self.free_cores, *cores])

    def _consider(self, job: Job, *, held: bool) -> bool:
        """Starts the job if it can be; whether it is ready and waits for GPUs."""
        if any(name not in self.rows for name in (*job.after, *job.needs)):
            return False
        failed = [name for name in job.needs if self.rows[name]["outcome"] != "done"]
        left = self.end - time.time()
        if failed or left < job.least or job.gpus > self.most[0]:
            why = f"{', '.join(failed)} did not end well" if failed else f"{left:.0f} s are left"
            why = f"it wants {job.gpus} GPUs of {self.most[0]}" if job.gpus > self.most[0] else why
            self.rows[job.name] = {"seconds": 0.0, "outcome": f"left out: {why}"}
            return False
        wanted = min(job.cores, self.most[1])
        if job.gpus and (held or len(self.free_gpus) < job.gpus):
            return True
        if len(self.free_cores) >= wanted:
            self._start(job, wanted, min(job.limit, left))
            return False
        return job.gpus > 0

    def _start(self, job: Job, cores: int, limit: float) -> None:
        gpus = [self.free_gpus.pop(0) for _ in range(job.gpus)]
        mine, self.free_cores = self.free_cores[:cores], self.free_cores[cores:]
        out = self.work / "out" / job.name
        out.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ, **self.variables, "OUT": str(out), "SECONDS_LEFT": f"{limit:.0f}",
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
        }  # fmt: skip
        with (out / "log.txt").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"set -eo pipefail\n{job.command}"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, cwd=ROOT, start_new_session=True,
            )  # fmt: skip
        with suppress(OSError):  # it is over already
            os.sched_setaffinity(process.pid, mine)
        self.begun[job.name] = time.time()
        self.running[job.name] = (process, time.time() + limit, gpus, mine)

    def _write(self, *, over: bool) -> None:
        now = time.time()
        state = {
            "over": over, "left": round(self.end - now), "jobs": self.rows,
            "running": {name: round(now - self.begun[name]) for name in self.running},
            "waiting": [j.name for j in self.jobs if j.name not in self.rows and j.name not in self.running],
        }  # fmt: skip
        beside = self.work / "state.tmp"
        beside.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        beside.replace(self.work / "state.json")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a job's process group; what does not go by itself is killed."""
    for number, pause in ((signal.SIGTERM, MARGIN), (signal.SIGKILL, 0.0)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        until = time.time() + pause
        while time.time() < until and process.poll() is None:
            time.sleep(0.05)
    process.wait()


def start(options: argparse.Namespace) -> int:
    """Leaves the session running behind."""
    variables, jobs = read_plans(options.plan)
    if options.only:
        wanted = list(dict.fromkeys(options.only.split(",")))
        unknown = set(wanted) - {job.name for job in jobs}
        if unknown:
            raise PlanError(f"--only: {', '.join(sorted(unknown))} is no job of {', '.join(map(str, options.plan))}")
        jobs = sorted((job for job in jobs if job.name in wanted), key=lambda job: wanted.index(job.name))
        for job in jobs:
            job.after = [name for name in job.after if name in wanted]
            job.needs = [name for name in job.needs if name in wanted]
    options.work.mkdir(parents=True, exist_ok=True)
    (options.work / "state.json").unlink(missing_ok=True)
    if os.fork():
        return 0
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(options.work / "session.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    Session(options.work, variables, jobs, budget=options.budget, gpus=options.gpus or gpus_here()).run()
    return 0


def gpus_here() -> int:
    """How many GPUs the driver names."""
    try:
        shown = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in shown.splitlines())


def wait(options: argparse.Namespace) -> int:
    """Tells what happened until the session is over or the time is; brings the results."""
    until, told = time.time() + options.seconds, set()
    state: dict[str, Any] = {}
    while time.time() < until and not state.get("over"):
        try:
            state = json.loads((options.work / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            state = {}
        for name, row in state.get("jobs", {}).items():
            if name not in told:
                told.add(name)
                print(f"{time.strftime('%T')} {name}: {row['outcome']} after {row['seconds']} s", flush=True)
        time.sleep(0.5)
    print(json.dumps({key: state.get(key) for key in ("over", "left", "running", "waiting")}), flush=True)
    bring(options.work, options.out)
    return 0 if state.get("over") else 3


def bring(work: Path, out: Path) -> None:
    """All jobs' folders and the state as one archive; whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    beside = out / "session.tar.gz.new"
    with tarfile.open(beside, "w:gz") as tar:
        for name in ("out", "state.json", "session.log"):
            if (work / name).exists():
                tar.add(work / name, arcname=name)
    shutil.move(beside, out / "session.tar.gz")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("start")
    one.add_argument("plan", type=Path, nargs="+")
    one.add_argument("--work", type=Path, required=True)
    one.add_argument("--budget", type=float, default=1500.0, help="seconds for all of it")
    one.add_argument("--gpus", type=int, default=0, help="how many to use; 0: all")
    one.add_argument("--only", default="", help="names of jobs in the order to take them, comma separated")
    two = verbs.add_parser("wait")
    two.add_argument("--work", type=Path, required=True)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--seconds", type=float, default=570.0)
    three = verbs.add_parser("check")
    three.add_argument("plan", type=Path, nargs="+")
    options = parser.parse_args()
    try:
        if options.verb == "check":
            _, jobs = read_plans(options.plan)
            print(f"{len(jobs)} jobs, {sum(job.limit for job in jobs):.0f} s at most one after the other")
            return 0
        return start(options) if options.verb == "start" else wait(options)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
