"""Write what `launch --dry-run` prints for each engine into examples/: `python tools/launch_examples.py`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

from kernelguard.launch.engines import ENGINES
from kernelguard.launch.job import Job

ROOT = Path(__file__).resolve().parent.parent
_JOB = Job(
    name="qwen-sft",
    script=("train.py", "--lr", "1e-5"),
    python="/shared/env/bin/python",
    run_dir="/shared/runs/qwen-sft",
    workdir="/shared",
    nodes=2,
    processes=8,
    ticket='{"schema": 1, "and so on": "what the launch tells every rank"}',
    bundle=b"the files of the guard, as a zip",
)
_IMAGE = "registry.example/train@sha256:" + "0123456789abcdef" * 4
_JOBS = {
    "examples/torchrun/launch.sh": ("torchrun", replace(_JOB, nodes=1)),
    "examples/slurm/job.sbatch": ("slurm", replace(_JOB, options={"partition": "gpu", "time": "12:00:00"})),
    "examples/kubernetes/trainjob.yaml": (
        "kubeflow",
        replace(_JOB, python="python", image=_IMAGE, options={"namespace": "ml", "claim": "data"}),
    ),
    "examples/databricks/workload.yaml": ("air", replace(_JOB, python="python", image="main.images.train:v1")),
}


def examples() -> dict[str, str]:
    """Path in the repository -> text."""
    return {path: _text(engine, job) for path, (engine, job) in _JOBS.items()}


def _text(engine: str, job: Job) -> str:
    submission = ENGINES[engine].render(job)
    command = shlex.join(submission.argv)
    text = submission.files[0][1] if submission.files else f"#!/bin/bash\nexec {command}\n"
    about = [
        f"# What `kernelguard launch LOCK --on {engine} --dry-run` prints, and writes into the run directory with the"
    ]
    about.append("# ticket of a real job. Made by tools/launch_examples.py.")
    about += [f"# Submitted by: {command}"] if submission.files else []
    first, newline, rest = text.partition("\n")
    lines = [first, *about] if first.startswith("#!") else [*about, first]
    return "\n".join(lines) + newline + rest


if __name__ == "__main__":
    for name, content in examples().items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(content, encoding="utf-8")
        print(name)
