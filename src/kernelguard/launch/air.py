"""On Databricks AI Runtime: a `workload.yaml` that runs in the image, or in a managed environment with the lock's pins.

Keys as in the public reference of `databricks air run` (looked at 2026-11-29): an image is named by catalog, schema,
name and tag, never by digest, so what it holds is compared by every rank.
"""

from __future__ import annotations

import os.path
import re
import shlex
from typing import Any

from kernelguard.errors import InputError
from kernelguard.launch.job import Job, Submission, Variable, node_command, shell, take

_OPTIONS = ("accelerator", "experiment", "root", "environment-version")
_ACCELERATOR = re.compile(r"GPU_(\d+)x([A-Za-z0-9]+)")
_IMAGE = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+:[\w.-]+")
_PLACE = "/tmp/kernelguard-launch"  # noqa: S108 - in a container of its own


class Air:
    """`--on air -o accelerator=GPU_8xH100`."""

    name = "air"
    program = "databricks"
    shares_disk = False
    needs_image = True

    def render(self, job: Job) -> Submission:
        """The workload file and the command that submits it."""
        options = take(job.options, _OPTIONS, engine=self.name)
        kind = options.get("accelerator", f"GPU_{job.processes}xH100")
        found = _ACCELERATOR.fullmatch(kind)
        if found is None or int(found[1]) != job.processes:
            raise InputError(
                f"accelerator is {kind}, and each node runs {job.processes} ranks",
                hint=f"-o accelerator=GPU_{job.processes}xH100, or another --processes",
            )
        if not _IMAGE.fullmatch(job.image):
            raise InputError(
                f"{job.image} is no image of AI Runtime", hint="--image CATALOG.SCHEMA.NAME:TAG, as registered there"
            )
        root = options.get("root", job.workdir)
        inside = os.path.relpath(job.run_dir, root)
        if inside.startswith(".."):
            raise InputError(
                f"the run directory {job.run_dir} is not below {root}, which is uploaded",
                hint=f"--run-dir {root}/runs/NAME, or -o root=FOLDER",
            )
        document: dict[str, Any] = {
            "experiment_name": options.get("experiment", job.name),
            "environment": {"unity_catalog_image": job.image},
            "compute": {"accelerator_type": kind, "num_accelerators": job.processes * job.nodes},
            "code_source": {"root_path": root},
            # 78 stays 78, and what a node is at fault for is looked at by a person first.
            "max_retries": 0,
            "command": self._command(job, inside),
        }
        import yaml  # noqa: PLC0415 - only where it is written

        text = yaml.safe_dump(document, sort_keys=False, width=120)
        path = f"{job.run_dir}/workload.yaml"
        return Submission(files=(("workload.yaml", text),), argv=("databricks", "air", "run", "-f", path))

    def _command(self, job: Job, inside: str) -> str:
        words = node_command(
            job,
            site=f"{_PLACE}/site",
            ticket=f"{_PLACE}/ticket.json",
            node=Variable(name="NODE_RANK"),
            address=Variable(name="MASTER_ADDR"),
            port=Variable(name="MASTER_PORT"),
        )
        # The uploaded code may be read-only; the guard only needs its own few files.
        copy = f'cp -r "$CODE_SOURCE_PATH"/{shlex.quote(inside)}/. {_PLACE}/'
        check = f'[ "$NUM_NODES" = {job.nodes} ]'
        lines = [
            "set -euo pipefail",
            check,
            f"mkdir -p {_PLACE}",
            copy,
            'cd "$CODE_SOURCE_PATH"',
            f"exec {shell(words)}",
        ]
        return "\n".join(lines) + "\n"
