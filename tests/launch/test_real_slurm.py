"""A guarded launch and the prolog on a real Slurm: what is submitted runs, and the ranks' code becomes the job's."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import launch_world
import pytest
import slurm_cluster

pytestmark = [pytest.mark.slurm, pytest.mark.observed]
PROLOG = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "prolog.sh"
SCRIPT = """
import sys
import torch.distributed as dist

dist.init_process_group("gloo")
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
sys.exit(17)
"""
COMMAND = Path(sys.executable).parent


@pytest.fixture(scope="module")
def world() -> launch_world.World:
    return launch_world.base()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm"), PROLOG) as made:
        yield made


def test_two_nodes_train_and_codes_reach_the_job(
    slurm: slurm_cluster.Cluster, world: launch_world.World, tmp_path: Path
) -> None:
    script, run_dir = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    options = ("--on", "slurm", "--nodes", "2", "--processes", "1", "-o", "time=00:10:00", "--run-dir", run_dir)
    done = world.launch(*options, "--", script, level="import", env=slurm.environ)
    assert done.code == 0, done.err
    assert "Submitted batch job" in done.out
    jobs = slurm.jobs()
    (out,) = run_dir.glob("slurm-*.out")
    said = out.read_text()
    assert "ExitCode=17:0" in jobs, said
    assert "kernelguard: go" in said
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(said.splitlines())
    assert json.loads((run_dir / "outcome.json").read_text())["code"] == 0
    # The same job where another fla was verified.
    ticket = json.loads((run_dir / "ticket.json").read_text())
    ticket["expected"]["distributions"]["fla-core"]["version"] = "0.5.9"
    (run_dir / "ticket.json").write_text(json.dumps(ticket))
    (run_dir / "outcome.json").unlink()
    assert slurm.submit(run_dir / "job.sbatch").returncode == 78
    (new,) = set(run_dir.glob("slurm-*.out")) - {out}
    assert "version of fla-core is 0.6.0, 0.5.9 was verified" in new.read_text()
    assert "rank 0 of 2" not in new.read_text()


def test_the_prolog_ends_a_job_that_is_not_right_and_says_why(
    slurm: slurm_cluster.Cluster, world: launch_world.World, tmp_path: Path
) -> None:
    job = tmp_path / "job.sbatch"
    job.write_text(
        f'#!/bin/bash\n#SBATCH --nodes=1 --ntasks=2 --output={tmp_path}/%j.out\nsrun bash -c "echo the task runs"\n'
    )
    path = {"PATH": f"{COMMAND}:/usr/bin:/bin"}
    assert slurm.submit(job, **path).returncode == 0
    wrong = {"KERNELGUARD_MODEL": str(world.config), "KERNELGUARD_PYTHON": sys.executable}
    assert slurm.submit(job, **path, **wrong).returncode == 1
    right = {"KERNELGUARD_MODEL": str(world.config), "KERNELGUARD_PYTHON": str(world.python)}
    assert slurm.submit(job, **path, **right).returncode == 0
    nothing, bad, good = (file.read_text() for file in sorted(tmp_path.glob("*.out"), key=lambda p: int(p.stem)))
    assert nothing == "the task runs\n" * 2
    assert "causal-conv1d is not installed" in bad
    assert "the task runs" not in bad
    assert good.count("the task runs") == 2
    # Once for the script and once for the step, not for each of its two tasks.
    assert good.count("PASS: qwen3_5_text") == 2
