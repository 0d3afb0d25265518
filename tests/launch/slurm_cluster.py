"""A Slurm cluster of two nodes on this machine, started by hand: munge, a controller, and a daemon for each node.

Needs root and Debian's packages slurm-wlm and munge; nothing of the machine's own configuration is read or changed.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_PORTS = {"controller": 16817, "first": 16821, "second": 16822}
# Names of nodes that every machine can look up.
_NODES = ("127.0.0.2", "127.0.0.3")
_CONF = """\
ClusterName=kernelguard
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TaskProlog={prolog}
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
GresTypes=gpu
NodeName=127.0.0.2 NodeAddr=127.0.0.1 Port={first} CPUs=2 Gres=gpu:1 State=UNKNOWN
NodeName=127.0.0.3 NodeAddr=127.0.0.1 Port={second} CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        """What Slurm's commands have to be told."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, script: Path | str, **environ: str) -> subprocess.CompletedProcess[str]:
        """`sbatch --wait`: its code is the job's."""
        return self._command("sbatch", "--wait", str(script), **environ)

    def jobs(self) -> str:
        """Everything that `scontrol` knows of all jobs, once none is running any more."""
        end = time.monotonic() + 300.0
        while self._command("squeue", "--noheader").stdout.strip() and time.monotonic() < end:
            time.sleep(0.5)
        return self._command("scontrol", "show", "jobs").stdout

    def _command(self, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, **self.environ, **environ}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=600)


@contextmanager
def cluster(folder: Path, prolog: Path) -> Iterator[Cluster]:
    """Two idle nodes of this machine, each with one GPU that is none."""
    made = Cluster(folder)
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(1024))
    host = socket.gethostname()
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, host=host, prolog=prolog, **_PORTS))
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
    daemons: list[subprocess.Popen[bytes]] = []
    munge = [f"--{name}={folder}/munge.{ending}" for name, ending in (("socket", "sock"), ("pid-file", "pid"))]
    munge += [f"--key-file={key}", f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed", "--force"]
    slurmd = ["slurmd", "-D", "-f", made.environ["SLURM_CONF"], "-N"]
    commands = (["munged", "--foreground", *munge], ["slurmctld", "-D", "-c"], *([*slurmd, node] for node in _NODES))
    try:
        for command in commands:
            with (folder / "daemons.log").open("ab") as log:
                daemons.append(subprocess.Popen(command, env={**os.environ, **made.environ}, stdout=log, stderr=log))
            if command[0] == "munged":
                _wait_for((folder / "munge.sock").exists)
        _wait_for(lambda: made._command("sinfo", "--noheader", "--Node", "--format=%t").stdout.split() == ["idle"] * 2)
        yield made
    finally:
        # Each in its turn: the others speak through munge to the end.
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)


def _wait_for(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end, "Slurm does not come up"
        time.sleep(0.2)
