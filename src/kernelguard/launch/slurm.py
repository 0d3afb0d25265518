"""On a Slurm cluster: a batch script with one task for each node. The run directory has to be on a shared disk."""

from __future__ import annotations

import shlex

from kernelguard.launch.job import Job, Submission, Variable, node_command, plain, shell

_OWN = frozenset({"nodes", "ntasks", "ntasks-per-node", "gpus-per-node", "job-name", "output", "requeue", "no-requeue"})


class Slurm:
    """`--on slurm`. Any option of sbatch can be given: `-o partition=gpu -o time=12:00:00`."""

    name = "slurm"
    program = "sbatch"
    shares_disk = True
    needs_image = False

    def render(self, job: Job) -> Submission:
        """The batch script and the sbatch command."""
        own = sorted(set(job.options) & _OWN)
        if own:
            from kernelguard.errors import InputError  # noqa: PLC0415 - only to refuse

            raise InputError(f"{', '.join(own)} is set by kernelguard", hint="see --nodes and --processes")
        directives = {
            "job-name": job.name,
            "nodes": str(job.nodes),
            "ntasks-per-node": "1",
            "gpus-per-node": str(job.processes),
            "output": plain(f"{job.run_dir}/slurm-%j.out", what="the run directory"),
        }
        directives |= {name: plain(value, what=f"-o {name}") for name, value in job.options.items()}
        names = "\n".join(f"#SBATCH --{plain(n, what='an option')}={v}" for n, v in directives.items())
        words = node_command(
            job,
            site=f"{job.run_dir}/site",
            ticket=f"{job.run_dir}/ticket.json",
            node=Variable(name="SLURM_NODEID"),
            address=Variable(name="MASTER_ADDR"),
            port=Variable(name="MASTER_PORT"),
        )
        # One shell on each node, so that the node's own number is looked up there.
        line = f"exec {shell(words)}"
        container = ["--container-image", job.image, "--container-workdir", job.workdir] if job.image else []
        mounts = ["--container-mounts", f"{job.run_dir}:{job.run_dir},{job.workdir}:{job.workdir}"] if job.image else []
        srun = ["srun", "--kill-on-bad-exit=1", "--chdir", job.workdir, *container, *mounts, "bash", "-c", line]
        settle = shlex.join([job.python, f"{job.run_dir}/site/kernelguard/launch/supervisor.py"])
        script = f"""#!/bin/bash
{names}
#SBATCH --no-requeue
# Written by `kernelguard launch`: one supervisor on each node, which runs torchrun and ends with the ranks' code.
set -uo pipefail
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="${{hosts[0]}}"
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
{shlex.join(srun)}
code=$?
# srun reports the highest code of any task; a task that was killed because another ended must not hide that one's code.
exec {settle} --ticket {shlex.quote(f"{job.run_dir}/ticket.json")} --settle "$code"
"""
        if job.image:
            # Outside the image there may be no such interpreter.
            script = script.replace(f"exec {settle} ", f"exec python3 {settle.partition(' ')[2]} ")
        return Submission(files=(("job.sbatch", script),), argv=("sbatch", f"{job.run_dir}/job.sbatch"))
