"""On Kubernetes: a Kubeflow Trainer v2 TrainJob, and a runtime whose jobs are not tried again after exit code 78.

The failure policy is part of the Job, which a TrainJob takes from its runtime; so the runtime is written too. Its nodes
share no disk with this machine: the ticket and the guard travel in a ConfigMap.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from kernelguard.errors import InputError
from kernelguard.guard.ticket import CODE_CONFIGURATION, CODE_UNKNOWN
from kernelguard.launch.job import Job, Submission, Variable, node_command, plain, shell, take

_OPTIONS = ("namespace", "claim", "claim-path", "node-selector", "service-account", "restarts")
_PLACE = "/opt/kernelguard-launch"
_SITE = "/tmp/kernelguard-site"  # noqa: S108 - in a container of its own
_CONFIG_MAP_LIMIT = 1_000_000


class Kubeflow:
    """`--on kubeflow`."""

    name = "kubeflow"
    program = "kubectl"
    shares_disk = False
    needs_image = True

    def render(self, job: Job) -> Submission:
        """One file with three objects: ConfigMap, TrainingRuntime, TrainJob."""
        options = {k: plain(v, what=f"-o {k}") for k, v in take(job.options, _OPTIONS, engine=self.name).items()}
        bundle = base64.b64encode(job.bundle).decode()
        if len(bundle) + len(job.ticket) > _CONFIG_MAP_LIMIT:
            raise InputError("the ticket is larger than a ConfigMap can hold", hint="a model with fewer fast paths")
        labels = {"app.kubernetes.io/managed-by": "kernelguard", "app.kubernetes.io/name": job.name}
        meta = {"name": job.name, "labels": labels}
        if "namespace" in options:
            meta["namespace"] = options["namespace"]
        config = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": meta,
            "data": {"ticket.json": job.ticket},
            "binaryData": {"site.zip": bundle},
        }
        objects = [config, self._runtime(job, meta, options), self._train_job(job, meta)]
        # JSON is YAML, and its quoting leaves nothing to guess.
        text = "".join(f"---\n{json.dumps(item, indent=2)}\n" for item in objects)
        return Submission(
            files=(("trainjob.yaml", text),), argv=("kubectl", "apply", "-f", f"{job.run_dir}/trainjob.yaml")
        )

    def _train_job(self, job: Job, meta: dict[str, Any]) -> dict[str, Any]:
        resources = {"nvidia.com/gpu": str(job.processes)}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": meta,
            "spec": {
                "runtimeRef": {
                    "apiGroup": "trainer.kubeflow.org",
                    "kind": "TrainingRuntime",
                    "name": job.name,
                },
                "trainer": {
                    "image": job.image,
                    "numNodes": job.nodes,
                    "numProcPerNode": job.processes,
                    "resourcesPerNode": {"limits": resources, "requests": resources},
                    "command": ["bash", "-c", self._line(job)],
                },
            },
        }

    def _line(self, job: Job) -> str:
        words = node_command(
            job,
            site=_SITE,
            ticket=f"{_PLACE}/ticket.json",
            node=Variable(name="PET_NODE_RANK"),
            address=Variable(name="PET_MASTER_ADDR"),
            port=Variable(name="PET_MASTER_PORT"),
        )
        unpack = [job.python, "-m", "zipfile", "-e", f"{_PLACE}/site.zip", _SITE]
        return f"set -euo pipefail\n{shell(unpack)}\nexec {shell(words)}"

    def _runtime(self, job: Job, meta: dict[str, Any], options: dict[str, str]) -> dict[str, Any]:
        mounts = [{"name": "kernelguard", "mountPath": _PLACE, "readOnly": True}]
        volumes: list[dict[str, Any]] = [{"name": "kernelguard", "configMap": {"name": job.name}}]
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108 - NCCL's, of the container
        if "claim" in options:
            volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": options["claim"]}})
            mounts.append({"name": "data", "mountPath": options.get("claim-path", "/data")})
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "containers": [{"name": "node", "image": job.image, "volumeMounts": mounts}],
            "volumes": volumes,
        }
        if "node-selector" in options:
            key, _, value = options["node-selector"].partition("=")
            pod["nodeSelector"] = {key: value}
        if "service-account" in options:
            pod["serviceAccountName"] = options["service-account"]
        final = {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": "node",
                "operator": "In",
                "values": sorted([CODE_UNKNOWN, CODE_CONFIGURATION]),
            },
        }
        # A node that is being drained is not the job's fault.
        drained = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
        template = {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {
                "backoffLimit": 0,
                "podFailurePolicy": {"rules": [final, drained]},
                "template": {"spec": pod},
            },
        }
        stop = {"name": "configuration", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainingRuntime",
            "metadata": meta,
            "spec": {
                "mlPolicy": {"numNodes": job.nodes, "torch": {}},
                "template": {
                    "spec": {
                        "failurePolicy": {"maxRestarts": int(options.get("restarts", "0")), "rules": [stop]},
                        "replicatedJobs": [{"name": "node", "template": template}],
                    }
                },
            },
        }
