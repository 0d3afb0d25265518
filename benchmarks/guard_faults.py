"""How many faults does the preflight name right, how often does it refuse a healthy group, and how long does it take?

python benchmarks/guard_faults.py [--repeats 2] [--json benchmarks/results/guard-faults.json]

Groups of two or three real processes on the CPU; in each one rank has one fault, or none has. Named right means: all
ranks ended with the right code, the outcome names the right rank, and it says what is wrong there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "guard"), str(ROOT / "tests" / "verify")]

import group  # noqa: E402
from faults import FAULTS, Packages  # noqa: E402

from crafted import without  # noqa: E402
from kernelguard.guard import ticket as tickets  # noqa: E402
from observed import Interpreter  # noqa: E402

_SHORT = replace(group.QUICK, rendezvous_s=30.0, fingerprint_s=30.0, probe_s=20.0)
_EXTRA = ("hidden-package", "never-starts", "dies-in-between", "port-taken", "disk-read-only")


class Bench:
    """Runs groups in one interpreter and keeps what came out."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env: Interpreter = group.light(folder / "env", Packages.working())
        self.bare: Interpreter = group.light(folder / "bare", without(Packages.working(), "fla", "flash"))
        self.base = group.make_ticket(self.env, folder / "base")
        self.count = 0

    def group(self, **changes: Any) -> group.Group:
        """One group; `ticket` changes the ticket, everything else is an argument of `run_group`."""
        self.count += 1
        place = self.folder / str(self.count)
        ticket = replace(self.base, **{"run_dir": str(place / "run"), **changes.pop("ticket", {})})
        env = changes.pop("env", self.env)
        return group.run_group(env, ticket, place, **changes)

    def fault(self, name: str) -> tuple[bool, float]:
        """Whether one fault was named right, and the seconds until the group had ended."""
        if name in FAULTS:
            fault = FAULTS[name]
            variables = dict(fault.variables or {})
            if fault.packages is not None:
                variables["PYTHONPATH"] = str(group.write(self.folder / name, fault.packages()))
            probes = (group.CONVOLUTION,) if fault.probe else ()
            ended = self.group(ticket={"probes": probes, "deadlines": fault.limits}, variables={1: variables})
            told = " ".join(c for c in ended.outcome["causes"] if c.startswith("rank 1"))
            states = [row["state"] for row in ended.outcome["ranks"]]
            right = all(word in told for word in fault.said) and states == ["ok", fault.state]
            return right and set(ended.codes.values()) == {fault.code}, ended.seconds
        return getattr(self, "_" + name.replace("-", "_"))()  # type: ignore[no-any-return]

    def _hidden_package(self) -> tuple[bool, float]:
        ended = self.group(env={0: self.env, 1: self.bare})
        told = " ".join(ended.outcome["causes"])
        return set(ended.codes.values()) == {78} and "rank 1: version of fla-core is absent" in told, ended.seconds

    def _never_starts(self) -> tuple[bool, float]:
        ended = self.group(ticket={"deadlines": _SHORT}, world=3, starting=[0, 2])
        states = [row["state"] for row in ended.outcome["ranks"]]
        return set(ended.codes.values()) == {75} and states == ["ok", "missing", "ok"], ended.seconds

    def _dies_in_between(self) -> tuple[bool, float]:
        def kill(processes: dict[int, subprocess.Popen[str]]) -> None:
            group.wait_for_child(processes[1].pid, "station.py", "/workers/probe.py")
            os.kill(processes[1].pid, signal.SIGKILL)

        limits = {"deadlines": _SHORT, "probes": (group.CONVOLUTION,)}
        ended = self.group(ticket=limits, variables={1: {"FAULT": "hang"}}, during=kill)
        states = [row["state"] for row in ended.outcome["ranks"]]
        return ended.codes[0] == 75 and states in (["ok", "silent"], ["ok", "missing"]), ended.seconds

    def _port_taken(self) -> tuple[bool, float]:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            ended = self.group(ticket={"deadlines": _SHORT}, port=taken.getsockname()[1])
        return set(ended.codes.values()) == {75} and "is taken by another program" in ended.err, ended.seconds

    def _disk_read_only(self) -> tuple[bool, float]:
        front = str(group.write(self.folder / "front", Packages.another_fla()))
        variables = {1: {"PYTHONPATH": front}}
        ended = self.group(ticket={"run_dir": "/proc/kernelguard/run"}, variables=variables)
        lines = [x for x in ended.err.splitlines() if x.startswith(tickets.OUTCOME_LINE)]
        return set(ended.codes.values()) == {78} and len(lines) == 2 and '"code": 78' in lines[0], ended.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    kinds: dict[str, dict[str, Any]] = {}
    healthy: list[tuple[bool, float, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as name:
        bench = Bench(Path(name))
        for number in range(options.repeats):
            for world in (2, 3):
                ended = bench.group(ticket={"probes": (group.CONVOLUTION,)}, world=world)
                healthy.append((set(ended.codes.values()) == {0}, ended.outcome["seconds"], ended.outcome["timings"]))
                print(f"healthy group of {world}: {ended.codes} {ended.seconds:.1f} s", file=sys.stderr)
            for kind in (*FAULTS, *_EXTRA):
                right, seconds = bench.fault(kind)
                row = kinds.setdefault(kind, {"injected": 0, "named_right": 0, "seconds": []})
                row["injected"] += 1
                row["named_right"] += right
                row["seconds"].append(round(seconds, 1))
                print(f"{number + 1}/{options.repeats} {kind}: {right} {seconds:.1f} s", file=sys.stderr)
    result = {
        "faults_injected": sum(row["injected"] for row in kinds.values()),
        "named_right": sum(row["named_right"] for row in kinds.values()),
        "healthy_groups": len(healthy),
        "false_refusals": sum(not good for good, _, _ in healthy),
        "seconds_by_step": {
            step: round(statistics.median(steps[step] for _, _, steps in healthy), 1) for step in healthy[0][2]
        },
        "seconds_to_go_median": round(statistics.median(s for _, s, _ in healthy), 1),
        "kinds": {kind: {**row, "seconds": max(row["seconds"])} for kind, row in kinds.items()},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores shared with other work, no GPU",
        "retrieved": datetime.now(UTC).date().isoformat(),
    }
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
